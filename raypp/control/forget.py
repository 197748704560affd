"""What a run that failed leaves in the memory of its nodes, and how it goes."""

from __future__ import annotations

import logging
import time
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypp.checkpoint.memory_files import list_slots, memory_directory, remove_run

log = logging.getLogger(__name__)

_PATIENCE_S = 5.0
_ALL_NODES_S = 15.0


def forget_snapshots(run: str) -> None:
    """Removes a run's snapshots from the memory of every living node. Its processes must have been ended.

    A node that does not answer in time keeps them until the next job that starts there, or until it is ended.
    """
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    task: Any = ray.remote(num_cpus=0, max_retries=0)(remove_snapshots)
    try:
        tasks = [
            task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(run)
            for node in nodes
        ]
        ray.wait(tasks, num_returns=len(tasks), timeout=_ALL_NODES_S)
    except RayError as error:
        log.warning("snapshots of %s may be left in memory: %s", run, error)


def remove_snapshots(run: str) -> None:
    """Removes a run's snapshots of this node; waits a little for processes that are about to end."""
    end = time.monotonic() + _PATIENCE_S
    while True:
        remove_run(run)
        left = any(name.run == run for name, _ in list_slots(memory_directory()))
        if not left or time.monotonic() > end:
            return
        time.sleep(0.1)
