"""Recovery policies decide whether a run continues after a failed attempt. Pure functions."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from raypp.errors import JobError, Problem, origin_in_words
from raypp.job.job import RecoverySection
from raypp.kinds import POLICIES
from raypp.records import RankFailure

_KEY = "recovery.policy"
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


@dataclass(frozen=True)
class AttemptEnd:
    """The end of a failed attempt. `failures`: in the order they were found; never empty.
    `committed_step`: the newest when the attempt ended; None before the first."""

    attempt: int
    failures: tuple[RankFailure, ...]
    committed_step: int | None


@dataclass(frozen=True)
class Restart:
    """Start the next attempt after `delay_s` seconds."""

    delay_s: float


@dataclass(frozen=True)
class GiveUp:
    """End the run as failed, with a reason and an exit code."""

    reason: str
    exit_code: int = 1


Decision: TypeAlias = Restart | GiveUp


class Policy(Protocol):
    """Decides after each failed attempt. Pure: no clocks, no processes, the same decision for the
    same history. A policy is a value: a controller that restarts decides by the history in the
    store. tests/unit/recovery/test_policies.py holds the contract of every policy."""

    def decide(self, history: Sequence[AttemptEnd]) -> Decision:
        """Decides what follows the last attempt of `history`, which has failed. `history`: all
        failed attempts since the run was submitted, oldest first; never empty."""


def policy_of(recovery: RecoverySection) -> Policy:
    """Returns the policy that a job names, with its options. Raises JobError: there is no policy of
    that name, its module cannot be imported, or it does not return a policy."""
    try:
        build = POLICIES.get(recovery.policy, key=_KEY).build()
    except JobError as error:
        raise JobError(replace(problem, key=_KEY) for problem in error.problems) from error
    fix = "it must be a function of the `recovery` section that returns an object with `decide(history)`"
    try:
        made = build(recovery)
    except Exception as error:  # it may be the user's code
        fault = f"{recovery.policy} raised {origin_in_words(error)}"
        raise JobError(Problem(_KEY, fault, fix)) from error
    if not callable(getattr(made, "decide", None)):
        raise JobError(Problem(_KEY, f"{recovery.policy} returned {type(made).__name__}, which is not a policy", fix))
    policy: Policy = made
    return policy


def check_policy(recovery: RecoverySection) -> list[Problem]:
    """Returns why the policy that a job names cannot be used; empty when it can."""
    try:
        policy_of(recovery)
    except JobError as error:
        return list(error.problems)
    return []


def root_cause(failures: Sequence[RankFailure]) -> RankFailure:
    """Returns the failure that explains the others: the first that is no loss of a peer."""
    return next((failure for failure in failures if not failure.kind.traits.witness), failures[0])


def restarts_without_progress(history: Sequence[AttemptEnd]) -> int:
    """Returns how many of the last attempts in a row committed nothing newer than the one before
    them. Preempted attempts do not count: they say nothing about whether a restart helps."""
    history = [end for end in history if root_cause(end.failures).kind.traits.counts]
    count = 0
    for end, before in zip(reversed(history), reversed(history[:-1]), strict=False):
        if _step(end) > _step(before):
            break
        count += 1
    return count


def same_again(history: Sequence[AttemptEnd]) -> bool:
    """Returns whether the last two attempts failed for the same reason at the same step."""
    if len(history) < 2:
        return False
    before, last = (root_cause(end.failures) for end in history[-2:])
    if (before.kind, before.step) != (last.kind, last.step):
        return False
    return last.kind.traits.same_by_kind or _gist(before) == _gist(last)


def bad_nodes(history: Sequence[AttemptEnd]) -> dict[str, int]:
    """Returns the addresses of nodes that were lost repeatedly, and how many attempts each ended.
    Only the loss of a node or of its raylet counts. The death of a rank may be the job's fault."""
    counts: Counter[str] = Counter()
    for end in history:
        lost = {failure.node for failure in end.failures if failure.kind.traits.node_lost and failure.node}
        counts.update(lost)
    return {node: count for node, count in counts.items() if count > 1}


def describe(failure: RankFailure) -> str:
    """Describes a failure in one line: which rank, where, what."""
    culprit = f"rank {failure.rank} ({failure.label}) on {failure.node}" if failure.rank >= 0 else failure.node
    step = f" at step {failure.step}" if failure.step else ""
    cause = failure.cause or failure.kind.traits.words
    return f"{culprit}{step}: {cause}" if culprit else cause


def _gist(failure: RankFailure) -> str:
    """Returns the cause without what differs between processes: addresses, sizes, process ids."""
    return _NUMBER.sub("#", failure.cause)


def _step(end: AttemptEnd) -> int:
    return -1 if end.committed_step is None else end.committed_step
