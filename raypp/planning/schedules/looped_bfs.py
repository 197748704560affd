"""Looped breadth-first: runs all microbatches through a rank's first stage, then through its next.

The backwards go the opposite way, stage by stage.
"""

from raypp.kinds import ScheduleKind
from raypp.planning.schedules.action import Action, Program

KIND = ScheduleKind(
    "looped_bfs",
    "gpipe over several stages per rank, stage by stage",
    position=4,
    stages_per_rank=(1, 64),
    searched_from=2,
    source="arXiv:2211.05953",
)


def build(pp: int, stages_per_rank: int, microbatches: int, lookahead: int = 0) -> Program:
    """Builds the program of every rank. Backwards run in microbatch order, as in every schedule
    here, so gradients are added in the same order as in a single process."""
    program: dict[int, list[Action]] = {}
    for rank in range(pp):
        stages = [rank + turn * pp for turn in range(stages_per_rank)]
        forwards = [Action(stage, "F", index) for stage in stages for index in range(microbatches)]
        backwards = [Action(stage, "B", index) for stage in reversed(stages) for index in range(microbatches)]
        program[rank] = [*forwards, *backwards]
    return program
