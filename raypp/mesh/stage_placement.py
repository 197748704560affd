"""Which stages a pipeline rank holds."""

from __future__ import annotations

from typing import Literal

Placement = Literal["loop", "v"]


def place_stages(pp: int, num_stages: int, placement: Placement = "loop") -> list[list[int]]:
    """Stages of each pipeline rank, ascending.

    "loop" deals them out round and round (P4, S8: [0,4][1,5][2,6][3,7]); "v" turns at the ends, so that the
    last stage is where the first is (P4, S8: [0,7][1,6][2,5][3,4]).
    """
    if num_stages % pp:
        raise ValueError(f"{num_stages} stages do not divide over {pp} ranks")
    ranks: list[list[int]] = [[] for _ in range(pp)]
    for stage in range(num_stages):
        turn, index = divmod(stage, pp)
        ranks[pp - 1 - index if placement == "v" and turn % 2 else index].append(stage)
    return ranks
