"""GPipe (arXiv:1811.06965): all forwards, then all backwards, both in microbatch order."""

from __future__ import annotations

from raypp.schedules.action import Action, Program


def build(pp: int, stages_per_rank: int, microbatches: int, lookahead: int = 0) -> Program:
    """The program of every rank; one stage each. All microbatches are in flight at once."""
    return {
        rank: [Action(rank, kind, index) for kind in ("F", "B") for index in range(microbatches)]  # type: ignore[arg-type]
        for rank in range(pp)
    }
