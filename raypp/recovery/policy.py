"""Whether a run goes on after an attempt failed: a pure function of what happened so far."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from raypp.records import RankFailure

_FIRST_DELAY_S = 1.0
_LONGEST_DELAY_S = 30.0
# A witness saw a peer vanish; it explains nothing by itself.
_WITNESS_KINDS = ("lost_peer",)
# Somebody took the node away on purpose; neither the job nor the machine is to blame.
_BLAMELESS_KINDS = ("preempted",)
# The same again at the same step is no bad luck.
_DETERMINISTIC_KINDS = ("raised", "nonfinite", "out_of_memory")
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
NODE_KINDS = ("node_lost", "raylet_lost")
"""What is a node's own doing, and no rank's."""


@dataclass(frozen=True)
class Policy:
    """What the job allows.

    Attributes:
        max_restarts: Restarts in a row without a newer committed step.
        restart_on_nonfinite: A step whose loss or gradients are not finite may be tried again; else it ends the run.
    """

    max_restarts: int = 3
    restart_on_nonfinite: bool = False


@dataclass(frozen=True)
class AttemptEnd:
    """How an attempt ended that did not finish.

    Attributes:
        attempt: Its number, from 1.
        failures: The evidence, in the order it came in; never empty.
        committed_step: Newest committed step of the run when the attempt ended; None before the first.
    """

    attempt: int
    failures: tuple[RankFailure, ...]
    committed_step: int | None


@dataclass(frozen=True)
class Restart:
    """Start the next attempt after `delay_s` seconds."""

    delay_s: float


@dataclass(frozen=True)
class GiveUp:
    """End the run as failed, and say why."""

    reason: str
    user_error: bool = False


def root_cause(failures: Sequence[RankFailure]) -> RankFailure:
    """The failure that explains the others: the first that is not only a witness of another's death."""
    return next((failure for failure in failures if failure.kind not in _WITNESS_KINDS), failures[0])


def restarts_without_progress(history: Sequence[AttemptEnd]) -> int:
    """How many of the last attempts in a row committed nothing newer than the one before them.

    Attempts that a preemption ended are left out: they say nothing about whether a restart helps.
    """
    history = [end for end in history if root_cause(end.failures).kind not in _BLAMELESS_KINDS]
    count = 0
    for end, before in zip(reversed(history), reversed(history[:-1]), strict=False):
        if _step(end) > _step(before):
            break
        count += 1
    return count


def bad_nodes(history: Sequence[AttemptEnd], times: int = 2) -> dict[str, int]:
    """The addresses of nodes that were lost again and again, with how many attempts each of them ended.

    Only what is the node's own doing counts: that it was lost, or Ray's process on it. A rank that dies may have died
    of its job.
    """
    counts: dict[str, int] = {}
    for end in history:
        lost = {failure.node for failure in end.failures if failure.kind in NODE_KINDS and failure.node}
        for node in lost:
            counts[node] = counts.get(node, 0) + 1
    return {node: count for node, count in counts.items() if count >= times}


def decide(history: Sequence[AttemptEnd], policy: Policy) -> Restart | GiveUp:
    """What to do now that the last attempt of `history` has failed.

    An error in the job or its data would come again: the run ends at once. An exception raised at the same
    step for the same reason twice in a row ends it too. Everything else is tried again, the first time without
    a pause, then with growing ones, until `policy.max_restarts` restarts in a row brought no newer commit.
    A preemption is followed by a restart at once, and is not counted.
    """
    last = history[-1]
    cause = root_cause(last.failures)
    if cause.kind == "user_error":
        return GiveUp(describe(cause), user_error=True)
    if cause.kind in _BLAMELESS_KINDS:
        return Restart(0.0)
    if cause.kind == "nonfinite" and not policy.restart_on_nonfinite:
        return GiveUp(describe(cause))
    if cause.kind in _DETERMINISTIC_KINDS and len(history) > 1:
        before = root_cause(history[-2].failures)
        if (before.kind, before.step, _gist(before)) == (cause.kind, cause.step, _gist(cause)):
            return GiveUp(f"{describe(cause)} (twice in a row, so a restart would not help)")
    in_vain = restarts_without_progress(history)
    if in_vain >= policy.max_restarts:
        return GiveUp(
            f"{describe(cause)}; {in_vain} restarts in a row brought no newer checkpoint (recovery.max_restarts)"
            if in_vain
            else f"{describe(cause)}; recovery.max_restarts is 0"
        )
    return Restart(0.0 if in_vain == 0 else min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0 ** (in_vain - 1)))


def describe(failure: RankFailure) -> str:
    """One line for people: which rank, where, what."""
    place = f"rank {failure.rank} ({failure.label}) on {failure.node}" if failure.rank >= 0 else failure.node
    step = f" at step {failure.step}" if failure.step else ""
    return f"{place}{step}: {failure.cause}" if place else failure.cause


def _gist(failure: RankFailure) -> str:
    """The cause without what differs between two lives: addresses, sizes, process ids."""
    return _NUMBER.sub("#", failure.cause)


def _step(end: AttemptEnd) -> int:
    return -1 if end.committed_step is None else end.committed_step
