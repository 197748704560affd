"""Ranks that were told to go, and nodes that Ray drains: a last save, then a new attempt without them."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from raypp.control.seats import Rank
from raypp.failure_kinds import FailureKind
from raypp.records import RankFailure

LAST_SAVE_S = 25.0
"""How long a last save may take when nobody says how long there is; clouds give 30 s and more."""
_LOOK_EVERY_S = 2.0
_SPARE_S = 5.0


@dataclass
class Notices:
    """What was heard of in the present attempt."""

    _rank: Rank | None = None
    _why: str = ""
    _until: float = 0.0
    _committed: int | None = None
    _drained: bool = False
    _looked: float = field(default_factory=time.monotonic)

    def drained(self, ranks: Sequence[Rank], now: float) -> list[tuple[Rank, str, float]]:
        """The first rank on a node that Ray drains, why, and how many seconds it has; asks every two seconds."""
        if self._rank is not None or now - self._looked < _LOOK_EVERY_S:
            return []
        self._looked = now
        draining = draining_nodes()
        for rank in ranks:
            if rank.node_id in draining:
                self._drained = True
                left = draining[rank.node_id] / 1e3 - time.time() if draining[rank.node_id] else LAST_SAVE_S
                return [(rank, f"Ray drains its node {rank.node}", max(1.0, min(left - _SPARE_S, 600.0)))]
        return []

    def heard(self, rank: Rank, why: str, until: float, committed: int | None) -> None:
        """A rank is to go; the first notice of an attempt counts.

        Args:
            until: When it must have left.
            committed: The newest commit now.
        """
        if self._rank is None:
            self._rank, self._why, self._until, self._committed = rank, why, until, committed

    def due(self, now: float, committed: int | None) -> RankFailure | None:
        """The failure that ends the attempt, once the last save is there or nobody can wait for it any longer."""
        if self._rank is None or self._rank.ended:
            return None
        saved = committed is not None and committed != self._committed
        if not saved and now < self._until:
            return None
        how = f"after a save at step {committed}" if saved else "without a new save, in the time there was"
        return self._rank.failure(FailureKind.PREEMPTED, f"{self._why}; left {how}")

    def over(self) -> bool:
        """The attempt is gone; returns whether a node of it is drained, so that its bundles must move."""
        moved, self._rank, self._drained = self._drained, None, False
        return moved


def draining_nodes() -> dict[str, int]:
    """Nodes that Ray drains, with the deadline in milliseconds since 1970 (0: none)."""
    with contextlib.suppress(Exception):  # Ray has no public way to ask
        state: Any = importlib.import_module("ray._private.state").state
        return dict(state.get_draining_nodes())
    return {}
