"""The default policy: bounded restarts with growing delays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raypp.control.recovery.policy import (
    AttemptEnd,
    Decision,
    GiveUp,
    Restart,
    describe,
    restarts_without_progress,
    root_cause,
    same_again,
)
from raypp.failure_kinds import FailureKind
from raypp.job.job import RecoverySection
from raypp.kinds import PolicyKind

KIND = PolicyKind(
    "default", "restart, with growing pauses, until recovery.max_restarts restarts in a row brought no newer checkpoint"
)

_FIRST_DELAY_S = 1.0
_LONGEST_DELAY_S = 30.0


def build(recovery: RecoverySection) -> DefaultPolicy:
    return DefaultPolicy(recovery.max_restarts, recovery.on_nonfinite == "restart")


@dataclass(frozen=True)
class DefaultPolicy:
    """The policy of runs whose job names no other. `max_restarts`: restarts in a row without a
    newer committed step. `restart_on_nonfinite`: whether a step with a loss or gradients that are
    not finite is retried; otherwise it ends the run."""

    max_restarts: int = 3
    restart_on_nonfinite: bool = False

    def decide(self, history: Sequence[AttemptEnd]) -> Decision:
        """Decides what follows the last attempt of `history`, which has failed. A permanent
        failure, such as an error in the job or its data, ends the run at once. A recurring one,
        such as an exception, ends it when it happens twice in a row at the same step for the same
        reason. After any other failure the run restarts, the first time without a pause, then with
        growing ones, until `max_restarts` restarts in a row brought no newer commit. After a
        preemption it restarts at once, which does not count."""
        cause = root_cause(history[-1].failures)
        traits = cause.kind.traits
        if traits.permanent:
            return GiveUp(describe(cause), traits.exit_code)
        if not traits.counts:
            return Restart(0.0)
        if cause.kind is FailureKind.NONFINITE and not self.restart_on_nonfinite:
            return GiveUp(describe(cause), traits.exit_code)
        if traits.recurring and same_again(history):
            return GiveUp(f"{describe(cause)} (twice in a row, so a restart would not help)", traits.exit_code)
        in_vain = restarts_without_progress(history)
        if in_vain >= self.max_restarts:
            spent = f"{in_vain} restarts in a row brought no newer checkpoint (recovery.max_restarts)"
            return GiveUp(f"{describe(cause)}; {spent if in_vain else 'recovery.max_restarts is 0'}", traits.exit_code)
        return Restart(0.0 if in_vain == 0 else min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0 ** (in_vain - 1)))
