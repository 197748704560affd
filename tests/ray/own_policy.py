"""A user-defined recovery policy, referenced as `own_policy:build`."""

from collections.abc import Sequence
from dataclasses import dataclass

from raypp.control.recovery.policies import default
from raypp.control.recovery.policy import AttemptEnd, Decision, GiveUp, Policy, Restart, describe, root_cause
from raypp.job.job import RecoverySection


def build(recovery: RecoverySection) -> Policy:
    return OneLife(default.build(recovery))


@dataclass(frozen=True)
class OneLife:
    """Gives up, with its own exit code, at the first cause that counts: a preemption does not."""

    usual: Policy

    def decide(self, history: Sequence[AttemptEnd]) -> Decision:
        decision, cause = self.usual.decide(history), root_cause(history[-1].failures)
        if isinstance(decision, Restart) and cause.kind.traits.counts:
            return GiveUp(f"one life is enough: {describe(cause)}", exit_code=7)
        return decision
