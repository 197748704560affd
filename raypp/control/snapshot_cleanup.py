"""What a run that failed leaves in the memory of its nodes, and how it goes."""

from __future__ import annotations

import logging
import time
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypp.memory.files import files_of, remove_run

log = logging.getLogger(__name__)

_PATIENCE_S = 5.0
_ALL_NODES_S = 15.0


def forget_snapshots(run: str, before: int | None = None) -> None:
    """Removes a run's snapshots from the memory of every living node. Whoever wrote them must have been ended.

    A node that does not answer in time keeps them until the next job that starts there, or until it is ended.

    Args:
        before: Only those of attempts before this one, which may be under way: nobody waits for it.
    """
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    task: Any = ray.remote(num_cpus=0, max_retries=0)(remove_snapshots)
    try:
        tasks = [
            task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(run, before)
            for node in nodes
        ]
        if before is None:
            ray.wait(tasks, num_returns=len(tasks), timeout=_ALL_NODES_S)
    except RayError as error:
        log.warning("snapshots of %s may be left in memory: %s", run, error)


def remove_snapshots(run: str, before: int | None = None) -> None:
    """Removes a run's snapshots of this node; waits a little for processes that are about to end.

    Args:
        before: Only those of attempts before this one.
    """
    end = time.monotonic() + _PATIENCE_S
    while True:
        remove_run(run, before=before)
        if not files_of(run, before=before) or time.monotonic() > end:
            return
        time.sleep(0.1)
