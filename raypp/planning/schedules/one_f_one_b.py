"""1F1B: after a warm-up, alternates one forward and one backward."""

from raypp.kinds import ScheduleKind
from raypp.planning.schedules.action import Action, Program

KIND = ScheduleKind(
    "1f1b",
    "one forward, one backward: fewest activations in flight",
    position=2,
    microbatches_per_rank=1,
    reason="with fewer, some ranks never work at the same time, and gpipe does the same",
    source="PipeDream-Flush, arXiv:2006.09503",
)


def warmup(pp: int, rank: int, microbatches: int, lookahead: int = 0) -> int:
    """Returns the forwards before the first backward, which is also the microbatches in flight.
    Classic 1F1B uses min(m, P - r). Each later stage adds `lookahead` more, so an activation has
    the time of that many forwards to cross each link."""
    return min(microbatches, pp - rank + lookahead * (pp - 1 - rank))


def build(pp: int, stages_per_rank: int, microbatches: int, lookahead: int = 0) -> Program:
    """Builds the program of every rank, one stage each."""
    program: dict[int, list[Action]] = {}
    for rank in range(pp):
        ahead = warmup(pp, rank, microbatches, lookahead)
        actions = [Action(rank, "F", index) for index in range(ahead)]
        for index in range(microbatches):
            actions.append(Action(rank, "B", index))
            if ahead + index < microbatches:
                actions.append(Action(rank, "F", ahead + index))
        program[rank] = actions
    return program
