"""Scales the loss in fp16: else small gradients would be rounded to 0 in backwards.

The scale is that of the mean loss of a full microbatch, as in other trainers, where a microbatch is
the whole step. All ranks change it alike: whether a gradient overflowed is in the sums that they
read anyway (`optimizers.reduce`). It is a power of two, so gradients are unscaled without rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from raypp.job.job import Job
from raypp.rank.optimizers.reduce import GlobalSums
from raypp.state.checkpoint.commit import ScaleState

LEAST, MOST = 1.0, 2.0**32
"""Between them is a scale; the least that still overflows says that something else is wrong."""
GROWTH = 2.0


class LossScale:
    """The scale of a run's loss. `adapts`: whether it changes; not in other precisions, nor if the
    job wants it fixed. `state`: the scale, the steps since it changed, and all steps that
    overflowed."""

    def __init__(self, job: Job) -> None:
        options = job.train.loss_scale
        self._used, self._interval = job.train.dtypes.scales_loss, options.growth_interval
        self.adapts = self._used and self._interval is not None
        self._tokens = 1 << (job.train.micro_batch_size * job.data.seq_len - 1).bit_length()
        self.state = ScaleState(options.init)

    @property
    def factor(self) -> float:
        """By what the sum of a microbatch's token losses is multiplied: a power of two."""
        return self.state.scale / self._tokens if self._used else 1.0

    def restore(self, state: ScaleState | None) -> None:
        """Goes on with the scale of a checkpoint; None: it has none."""
        if state is not None and self._used:
            self.state = state if self.adapts else ScaleState(self.state.scale)

    def overflowed(self, sums: GlobalSums) -> bool:
        """Whether a step's gradients overflowed, so that a smaller scale may help: not where the
        loss itself is not finite."""
        return self.adapts and math.isfinite(sums.loss) and not math.isfinite(sums.grad_norm)

    def lower(self) -> bool:
        """Halves the scale after an overflow; False if it is the least."""
        if self.state.scale <= LEAST:
            return False
        self.state = ScaleState(self.state.scale / GROWTH, 0, self.state.overflows + 1)
        return True

    def good(self) -> None:
        """Counts a step without overflow."""
        if self.adapts and self._interval is not None:
            scale, steps = self.state.scale, self.state.steps + 1
            if steps >= self._interval:
                scale, steps = min(scale * GROWTH, MOST), 0
            self.state = ScaleState(scale, steps, self.state.overflows)

    def numbers(self) -> list[int]:
        """Returns the state as whole numbers, for other replicas that train apart."""
        return [int(self.state.scale), self.state.steps, self.state.overflows] if self.adapts else []

    def agree(self, of_all: Sequence[Sequence[int]]) -> None:
        """Takes the least scale of replicas, and the most overflows. `of_all`: their `numbers`."""
        if self.adapts and of_all:
            scales, steps, overflows = zip(*of_all, strict=True)
            self.state = ScaleState(float(min(scales)), min(steps), max(overflows))

    def report(self, scale: float) -> dict[str, float]:
        """Returns what the report of a step says: its scale, and the overflows so far."""
        return {"loss_scale": scale, "overflows": float(self.state.overflows)} if self._used else {}
