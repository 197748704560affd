"""What snapshots in memory cost a step, and how many steps apart they may therefore be."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from raypp.checkpoint.snapshot import Snapshot

_SHARE = 0.02
"""Of a step's time that snapshots may cost when checkpoint.memory_every_steps is auto."""


@dataclass
class Costs:
    """What a snapshot costs and a step takes, in seconds, from the last few."""

    snapshots: deque[float] = field(default_factory=lambda: deque(maxlen=5))
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=9))
    last: Snapshot | None = None
    last_s: float = 0.0
    begun: float | None = None

    def every(self) -> int:
        """How many steps apart snapshots cost at most `_SHARE` of the time."""
        if len(self.snapshots) < 2 or len(self.steps) < 2:
            return 1
        return max(1, math.ceil(median(self.snapshots) / (_SHARE * median(self.steps))))
