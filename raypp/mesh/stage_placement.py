"""Assigns stages to pipeline ranks."""

from __future__ import annotations

from typing import Literal

Placement = Literal["loop", "v"]


def place_stages(pp: int, num_stages: int, placement: Placement = "loop") -> list[list[int]]:
    """Returns the stages of each pipeline rank, ascending.

    "loop" assigns stages round-robin (4 ranks, 8 stages: [0,4][1,5][2,6][3,7]). "v" reverses the
    direction at the ends, so the last stage is on the rank of the first (4 ranks, 8 stages:
    [0,7][1,6][2,5][3,4]).
    """
    if num_stages % pp:
        raise ValueError(f"{num_stages} stages cannot be divided evenly among {pp} ranks")
    ranks: list[list[int]] = [[] for _ in range(pp)]
    for stage in range(num_stages):
        turn, index = divmod(stage, pp)
        ranks[pp - 1 - index if placement == "v" and turn % 2 else index].append(stage)
    return ranks
