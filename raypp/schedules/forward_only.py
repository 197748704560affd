"""Forward-only programs for evaluation and generation: training schedules need gradients."""

from __future__ import annotations

from typing import Literal

from raypp.schedules.action import Action, Program


def build_forward_only(
    pp: int, stages_per_rank: int, microbatches: int, placement: Literal["loop", "v"] = "loop"
) -> Program:
    """Builds the program of every rank, with the stage placement of a training schedule.

    Args:
        pp: Number of pipeline ranks.
        stages_per_rank: Stages on each rank; 2 in a V.
        microbatches: Number of microbatches.
        placement: "loop": stage s is on rank s mod pp; "v": rank r has the stages r and 2·pp - 1 -
            r.
    """
    return _v(pp, microbatches) if placement == "v" else _loop(pp, stages_per_rank, microbatches)


def _loop(pp: int, stages_per_rank: int, microbatches: int) -> Program:
    """Runs rounds of `pp` microbatches through all stages, so no rank waits for the way round."""
    rounds = [range(start, min(start + pp, microbatches)) for start in range(0, microbatches, pp)]
    turns = range(stages_per_rank)
    return {
        rank: [Action(rank + turn * pp, "F", index) for part in rounds for turn in turns for index in part]
        for rank in range(pp)
    }


def _v(pp: int, microbatches: int) -> Program:
    """Builds the program of the V placement.

    A microbatch returns to rank r after 2·(pp - r) - 1 forwards there. Then its two stages
    alternate.
    """
    program: dict[int, list[Action]] = {}
    for rank in range(pp):
        ahead = min(microbatches, 2 * (pp - rank) - 1)
        actions = [Action(rank, "F", index) for index in range(ahead)]
        for index in range(microbatches):
            actions.append(Action(2 * pp - 1 - rank, "F", index))
            if ahead + index < microbatches:
                actions.append(Action(rank, "F", ahead + index))
        program[rank] = actions
    return program
