"""Preempted ranks and draining nodes: a last checkpoint, then a new attempt without them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from raypp.control.ray_nodes import draining_nodes
from raypp.control.seats import Rank
from raypp.failure_kinds import FailureKind
from raypp.records import RankFailure

LAST_SAVE_S = 25.0
"""Time for the last checkpoint when the notice names no deadline; clouds give 30 s and more."""
_CHECK_EVERY_S = 2.0
_MARGIN_S = 5.0


@dataclass
class PreemptionNotices:
    """The preemption notices of the current attempt; the first one counts."""

    _rank: Rank | None = None
    _why: str = ""
    _deadline: float = 0.0
    _committed: int | None = None
    _node_drained: bool = False
    _checked_at: float = field(default_factory=time.monotonic)

    def check_nodes(self, ranks: Sequence[Rank], now: float) -> tuple[Rank, str, float] | None:
        """Returns the first rank on a node that Ray drains, the reason, and the seconds it has
        left.

        Asks Ray every two seconds, until there is a notice.
        """
        if self._rank is not None or now - self._checked_at < _CHECK_EVERY_S:
            return None
        self._checked_at = now
        draining = draining_nodes()
        for rank in ranks:
            if rank.node_id in draining:
                self._node_drained = True
                left = draining[rank.node_id] / 1e3 - time.time() if draining[rank.node_id] else LAST_SAVE_S
                return rank, f"Ray drains its node {rank.node}", max(1.0, min(left - _MARGIN_S, 600.0))
        return None

    def add(self, rank: Rank, why: str, deadline: float, committed: int | None) -> None:
        """Records a notice, unless there is one.

        Args:
            deadline: When the rank must have left.
            committed: The newest committed step now.
        """
        if self._rank is None:
            self._rank, self._why, self._deadline, self._committed = rank, why, deadline, committed

    def due_failure(self, now: float, committed: int | None) -> RankFailure | None:
        """Returns the failure that ends the attempt, once the last checkpoint exists or the
        deadline has passed."""
        if self._rank is None or self._rank.ended:
            return None
        saved = committed is not None and committed != self._committed
        if not saved and now < self._deadline:
            return None
        how = f"after a checkpoint at step {committed}" if saved else "without a new checkpoint; there was no time"
        return self._rank.failure(FailureKind.PREEMPTED, f"{self._why}; left {how}")

    def reset(self) -> bool:
        """Forgets the notice at the end of the attempt; returns whether a node of it drains and its
        bundles must move."""
        drained, self._rank, self._node_drained = self._node_drained, None, False
        return drained
