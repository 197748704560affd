"""What is known of a schedule besides its program: where stages lie, and which sizes it can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from raypp.schedules.action import Program

Build = Callable[..., Program]
"""`build(pp, stages_per_rank, microbatches, lookahead=0) -> Program`."""


@dataclass(frozen=True)
class ScheduleInfo:
    """One schedule.

    Attributes:
        name: Its name in the job file.
        summary: One line for people.
        build: Makes the program; the sizes must pass `problems`.
        placement: How stages are dealt to ranks: "loop" round and round, "v" there and back.
        stages_per_rank: Smallest and largest number of stages of a rank.
        microbatches_per_rank: At least this many microbatches per pipeline rank (0: any number will do).
        reason: Why fewer microbatches are refused.
        splits_backward: It has I and W actions.
        source: Where it is described.
    """

    name: str
    summary: str
    build: Build
    placement: Literal["loop", "v"] = "loop"
    stages_per_rank: tuple[int, int] = (1, 1)
    microbatches_per_rank: int = 0
    reason: str = ""
    splits_backward: bool = False
    source: str = ""

    def __call__(self, pp: int, stages_per_rank: int, microbatches: int, lookahead: int = 0) -> Program:
        """The program, without communication."""
        return self.build(pp, stages_per_rank, microbatches, lookahead)

    def least_microbatches(self, pp: int) -> int:
        """The fewest microbatches it runs with on `pp` ranks; one rank has nothing to fill."""
        return max(1, self.microbatches_per_rank * pp) if pp > 1 else 1

    def allows_stages(self, stages_per_rank: int) -> bool:
        least, most = self.stages_per_rank
        return least <= stages_per_rank <= most
