"""Post-mortem of a rank that died or hangs: asks Ray, the network and other workers of its node."""

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from raypp.control import process_evidence
from raypp.control.process_evidence import Death, DeathEvidence, cause_of_death
from raypp.control.ray_state import all_nodes
from raypp.control.seats import Rank
from raypp.control.worker_group import WorkerGroup
from raypp.failure_kinds import FailureKind

_ANSWER_S = 1.5
_STACKS_S = 3.0
_RECORDS_S = 10.0
_FROZEN_STACKS_S = 8.0
_MOST_RANKS = 64
# Ray's reasons for a planned end of a node: it was terminated, preempted, or idle.
_PLANNED_NODE_ENDS = (1, 3, 4)


def cause_of_worker_death(rank: Rank, ray_error: str, workers: WorkerGroup) -> Death:
    """Finds out whether a rank died with its node, with its node's raylet, or alone, and then of
    what. `ray_error`: the text of the error Ray raised for the actor."""
    node = _node_of(rank)
    if node is not None and not node["Alive"] and node.get("DeathReason") in _PLANNED_NODE_ENDS:
        return Death(FailureKind.PREEMPTED, f"its node {rank.node} was preempted or drained")
    answers = None if node is None else process_evidence.host_answers(rank.node, int(node["NodeManagerPort"]))
    if node is not None and answers is None:
        return _raylet_lost(rank)
    if node is None or not node["Alive"]:
        seen = "it answers again, but Ray has declared it dead" if answers else "it does not answer"
        return Death(FailureKind.NODE_LOST, f"its node {rank.node} is lost: {seen}")
    if answers is False:
        cause = f"its node {rank.node} does not answer any more; Ray has not declared it dead yet"
        return Death(FailureKind.NODE_LOST, cause)
    return cause_of_death(rank.pid, ray_error, _evidence(rank, workers))


def raylet_death(rank: Rank) -> Death | None:
    """Returns the death of a silent rank whose node's raylet has ended; else None."""
    node = _node_of(rank)
    if node is None or process_evidence.host_answers(rank.node, int(node["NodeManagerPort"])) is not None:
        return None
    return _raylet_lost(rank)


def death_during_controller_outage(rank: Rank) -> Death:
    """Returns the death of a rank that was gone when the controller restarted."""
    if rank.node and not any(node["Alive"] and node["NodeManagerAddress"] == rank.node for node in all_nodes()):
        return Death(FailureKind.NODE_LOST, f"its node {rank.node} was lost while the controller was down")
    return Death(FailureKind.KILLED, "its process was gone when the controller restarted")


def _raylet_lost(rank: Rank) -> Death:
    return Death(FailureKind.RAYLET_LOST, f"the raylet (Ray's process) on its node {rank.node} ended; the host is up")


def _node_of(rank: Rank) -> dict[str, Any] | None:
    return next((node for node in all_nodes() if node["NodeID"] == rank.node_id), None)


def _evidence(rank: Rank, workers: WorkerGroup) -> DeathEvidence | None:
    if rank.info is None:
        return None
    log, before = rank.info.log, rank.info.oom_kills
    if ray.get_runtime_context().get_node_id() == rank.node_id:
        return process_evidence.death_evidence(rank.pid, log, before)
    helpers = workers.helpers(rank.node_id, except_bundle=rank.bundle)
    asked = [helper.death_evidence.remote(rank.pid, log, before) for helper in helpers]
    end = time.monotonic() + _ANSWER_S
    while asked:
        ready, asked = ray.wait(asked, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            break
        with contextlib.suppress(RayError):  # this one is dead as well
            evidence: DeathEvidence = ray.get(ready[0])
            return evidence
    return None


def collect_stacks(ranks: Sequence[Rank], workers: WorkerGroup, first: int) -> dict[int, str]:
    """Returns the stacks of at most 64 ranks, each bounded, by rank. Other workers of its node
    examine a process that does not answer. `first`: the rank whose stacks matter most."""
    chosen = sorted(ranks, key=lambda rank: (rank.rank != first, rank.rank))[:_MOST_RANKS]
    asked = {rank.actor.stacks.remote(): rank for rank in chosen if rank.actor is not None and not rank.ended}
    stacks: dict[int, str] = {}
    for reference in ray.wait(list(asked), num_returns=len(asked), timeout=_STACKS_S)[0] if asked else ():
        with contextlib.suppress(RayError):
            stacks[asked[reference].rank] = str(ray.get(reference))
    silent = []
    for rank in asked.values():
        if rank.rank not in stacks:
            if ray.get_runtime_context().get_node_id() == rank.node_id:
                stacks[rank.rank] = process_evidence.stacks_of(rank.pid, _log_of(rank), workers.request.run)
            else:
                silent.append(rank)
    return stacks | _stacks_by_helpers(silent, workers)


def collect_flight_records(ranks: Sequence[Rank]) -> dict[int, str]:
    """Returns torch's flight records of the ranks that answer, by rank; "" where torch has none."""
    asked = {one.actor.flight_record.remote(): one.rank for one in ranks if one.actor is not None and not one.ended}
    records: dict[int, str] = {}
    for reference in ray.wait(list(asked), num_returns=len(asked), timeout=_RECORDS_S)[0] if asked else ():
        with contextlib.suppress(RayError):
            records[asked[reference]] = str(ray.get(reference))
    return records


def _stacks_by_helpers(ranks: Sequence[Rank], workers: WorkerGroup) -> dict[int, str]:
    """Asks one helper of each rank after the other, until one answers: a dead one fails at once,
    and several would make the process write its stacks several times."""
    stacks: dict[int, str] = {}
    asked: dict[Any, tuple[Rank, list[Any]]] = {}

    def ask(rank: Rank, helpers: list[Any]) -> None:
        if helpers:
            asked[helpers[0].stacks_of.remote(rank.pid, _log_of(rank))] = (rank, helpers[1:])

    for rank in ranks:
        ask(rank, workers.helpers(rank.node_id, except_bundle=rank.bundle))
    end = time.monotonic() + _FROZEN_STACKS_S
    while asked:
        ready, _ = ray.wait(list(asked), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            break
        rank, others = asked.pop(ready[0])
        try:
            stacks[rank.rank] = str(ray.get(ready[0]))
        except RayError:
            ask(rank, others)
    return stacks


def _log_of(rank: Rank) -> str:
    return rank.info.log if rank.info is not None else ""
