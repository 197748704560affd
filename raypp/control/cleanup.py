"""Finds a run's processes by the run's name, ends them, and removes their snapshots in memory."""

import contextlib
import logging
import time
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypp.control.protocol import NAMESPACE, WorkerStatus
from raypp.control.ray_state import all_nodes
from raypp.state.memory.files import files_of, keep_run, remove_run

log = logging.getLogger(__name__)

_STATUS_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 20.0
_EXIT_TIMEOUT_S = 5.0
_ALL_NODES_TIMEOUT_S = 15.0


def workers_of(run: str) -> list[Any]:
    """Returns the living workers of a run, no matter which controller started them."""
    workers: list[Any] = []
    for entry in ray.util.list_named_actors(all_namespaces=True):
        name = entry["name"]
        if entry["namespace"] == NAMESPACE and name.startswith(f"raypp/{run}/"):
            with contextlib.suppress(ValueError):
                workers.append(ray.get_actor(name, namespace=NAMESPACE))
    return workers


def end_actor(actor: Any) -> None:
    """Ends an actor for good; one that has ended already is fine."""
    with contextlib.suppress(RayActorError, ValueError):
        ray.kill(actor, no_restart=True)


def find_workers(run: str) -> list[tuple[Any, WorkerStatus]]:
    """Returns the living workers of a run with their status. Ends those that do not answer."""
    asked = {handle.status.remote(): handle for handle in workers_of(run)}
    ready, silent = ray.wait(list(asked), num_returns=len(asked), timeout=_STATUS_TIMEOUT_S) if asked else ([], [])
    living = []
    for reference in ready:
        with contextlib.suppress(RayError):
            living.append((asked[reference], ray.get(reference)))
    for reference in silent:
        end_actor(asked[reference])
    return living


def end_workers(run: str) -> None:
    """Ends every worker of a run and waits until they are gone."""
    workers = workers_of(run)
    waiting = [worker.outcome.remote(-1, 600.0) for worker in workers]  # fails when the process is gone
    for worker in workers:
        end_actor(worker)
    if waiting:
        ray.wait(waiting, num_returns=len(waiting), timeout=_END_TIMEOUT_S)


def look_after_snapshots(life: str, keep: bool) -> None:
    """Removes an ended run's snapshots from the memory of every living node, or keeps them there
    for a resume. The processes that wrote them must have ended. A node that does not answer in time
    keeps them until the next job that starts there, or until it is shut down."""
    nodes = [node["NodeID"] for node in all_nodes() if node["Alive"]]
    task: Any = ray.remote(num_cpus=0, max_retries=0)(keep_run if keep else remove_local_snapshots)
    try:
        tasks = [
            task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(life)
            for node in nodes
        ]
        ray.wait(tasks, num_returns=len(tasks), timeout=_ALL_NODES_TIMEOUT_S)
    except RayError as error:
        log.warning("snapshots may remain in memory: %s", error)


def remove_local_snapshots(life: str) -> None:
    """Removes a run's snapshots from this node; waits some seconds for processes to end."""
    end = time.monotonic() + _EXIT_TIMEOUT_S
    while True:
        remove_run(life)
        if not files_of(life) or time.monotonic() > end:
            return
        time.sleep(0.1)
