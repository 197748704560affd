"""GPipe: runs all forwards, then all backwards, both in microbatch order."""

from raypp.kinds import ScheduleKind
from raypp.planning.schedules.action import Action, Program

KIND = ScheduleKind("gpipe", "all forwards, then all backwards", position=1, searched_from=0, source="arXiv:1811.06965")


def build(pp: int, stages_per_rank: int, microbatches: int, lookahead: int = 0) -> Program:
    """Builds the program of every rank, one stage each. All microbatches are in flight at once."""
    forwards = {rank: [Action(rank, "F", index) for index in range(microbatches)] for rank in range(pp)}
    return {
        rank: [*ahead, *(Action(rank, "B", index) for index in range(microbatches))] for rank, ahead in forwards.items()
    }
