"""The controller's questions about a process that died or stands still, to whoever is left on its node."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from raypp.control import process_evidence
from raypp.control.placement import all_nodes
from raypp.control.seats import Rank
from raypp.control.worker_group import Crew
from raypp.failure_kinds import FailureKind
from raypp.recovery.evidence import Death, Remains, cause_of_death

_ANSWER_S = 1.5
_STACKS_S = 3.0
_FROZEN_STACKS_S = 8.0
_MOST_RANKS = 64
# Ray's reasons for the end of a node that somebody wanted: it was told to go, preempted, or idle.
_WANTED_NODE_ENDS = (1, 3, 4)


def inquest(rank: Rank, ray_words: str, crew: Crew) -> Death:
    """How a rank's process died: with its node, with its node's raylet, or alone, and then of what.

    Args:
        ray_words: The error Ray raised for the actor.
    """
    node = _node_of(rank)
    if node is not None and not node["Alive"] and node.get("DeathReason") in _WANTED_NODE_ENDS:
        return Death(FailureKind.PREEMPTED, f"its node {rank.node} was taken away")
    host = None if node is None else process_evidence.host_answers(rank.node, int(node["NodeManagerPort"]))
    if node is not None and host is None:
        return _raylet_lost(rank)
    if node is None or not node["Alive"]:
        return Death(FailureKind.NODE_LOST, f"its node {rank.node} is lost: {_seen(host)}")
    if host is False:
        return Death(
            FailureKind.NODE_LOST, f"its node {rank.node} does not answer any more; Ray has not yet given it up"
        )
    return cause_of_death(rank.pid, ray_words, _remains(rank, crew))


def raylet_ended(rank: Rank) -> Death | None:
    """How a rank died that does not answer, when Ray's process on its node has ended: no rank outlives that."""
    node = _node_of(rank)
    if node is None or process_evidence.host_answers(rank.node, int(node["NodeManagerPort"])) is not None:
        return None
    return _raylet_lost(rank)


def unseen_death(rank: Rank) -> Death:
    """How a rank died that was gone when the controller came back; of its place only the address is known."""
    if rank.node and not any(node["Alive"] and node["NodeManagerAddress"] == rank.node for node in all_nodes()):
        return Death(FailureKind.NODE_LOST, f"its node {rank.node} was lost while no controller was there")
    return Death(FailureKind.KILLED, "its process was gone when the controller came back")


def _raylet_lost(rank: Rank) -> Death:
    return Death(FailureKind.RAYLET_LOST, f"Ray's process on its node {rank.node} ended; the host itself is there")


def _node_of(rank: Rank) -> dict[str, Any] | None:
    return next((node for node in all_nodes() if node["NodeID"] == rank.node_id), None)


def _seen(host: bool | None) -> str:
    return "it answers again, but Ray has given it up" if host else "nothing answers there"


def _remains(rank: Rank, crew: Crew) -> Remains | None:
    if rank.presence is None:
        return None
    log, before = rank.presence.log, rank.presence.oom_kills
    if ray.get_runtime_context().get_node_id() == rank.node_id:
        return process_evidence.remains_of(rank.pid, log, before)
    helper = crew.helper(rank.node_id, but=rank.bundle)
    if helper is None:
        return None
    with contextlib.suppress(RayError):
        found: Remains = ray.get(helper.remains_of.remote(rank.pid, log, before), timeout=_ANSWER_S)
        return found
    return None


def stacks_of_all(ranks: Sequence[Rank], crew: Crew, first: int) -> dict[int, str]:
    """The stacks of all ranks (of the first 64, beginning with one), each bounded, by rank.

    A process that does not answer is looked at by another one of its node.
    """
    chosen = sorted(ranks, key=lambda rank: (rank.rank != first, rank.rank))[:_MOST_RANKS]
    found = _answers({rank.actor.stacks.remote(): rank for rank in chosen if _lives(rank)}, _STACKS_S)
    asked = {}
    for rank in chosen:
        if _lives(rank) and rank.rank not in found:
            log = rank.presence.log if rank.presence is not None else ""
            if ray.get_runtime_context().get_node_id() == rank.node_id:
                found[rank.rank] = process_evidence.stacks_of(rank.pid, log, crew.request.run)
            elif (helper := crew.helper(rank.node_id, but=rank.bundle)) is not None:
                asked[helper.stacks_of.remote(rank.pid, log)] = rank
    return found | _answers(asked, _FROZEN_STACKS_S)


def _lives(rank: Rank) -> bool:
    return rank.actor is not None and not rank.ended


def _answers(asked: dict[Any, Rank], patience_s: float) -> dict[int, str]:
    found: dict[int, str] = {}
    if not asked:
        return found
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=patience_s)
    for reference in ready:
        with contextlib.suppress(RayError):
            found[asked[reference].rank] = str(ray.get(reference))
    return found
