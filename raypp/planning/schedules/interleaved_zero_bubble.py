"""Interleaved zero bubble: several stages per rank in a loop; weight gradients fill the gaps."""

from math import ceil

from raypp.kinds import ScheduleKind
from raypp.planning.schedules.action import Action, Program
from raypp.planning.schedules.greedy import greedy_program
from raypp.planning.schedules.interleaved_1f1b import rounds_of

KIND = ScheduleKind(
    "interleaved_zero_bubble",
    "backward split in two: weight gradients fill the bubble",
    position=5,
    stages_per_rank=(1, 64),
    microbatches_per_rank=1,
    reason="a round takes at least one microbatch per rank through all of a rank's stages",
    splits_backward=True,
    searched_from=2,
    source="arXiv:2401.10241",
)


def build(pp: int, stages_per_rank: int, microbatches: int, lookahead: int = 0) -> Program:
    """Builds the program of every rank. Stage s is on rank s mod pp.

    Each rank may hold as many microbatches as the first rank of interleaved 1F1B: a round through
    all stages but the last, plus two forwards for each rank after the first. With `lookahead`, the
    order is that for messages that take so many forwards of a stage. From stage s of the first rank
    to the last stage and back, a microbatch crosses 2·(S - 1 - s) links. The sum over the rank's
    stages, divided by the time that the rank takes for one microbatch (three forwards of each
    stage), is the room that messages need: (pp·(stages per rank + 1) - 2) / 3 for each unit.
    """
    rounds = rounds_of(pp, microbatches)
    round_of = {index: number for number, part in enumerate(rounds) for index in part}
    placement = [[rank + turn * pp for turn in range(stages_per_rank)] for rank in range(pp)]
    most = (stages_per_rank - 1) * len(rounds[0]) + 2 * (pp - 1) + 1
    room = max(stages_per_rank, most) + ceil(lookahead * (pp * (stages_per_rank + 1) - 2) / 3)

    def urgency(action: Action) -> tuple[int, ...]:
        """Orders depth first: a round passes all stages of a rank before the next one starts."""
        turn = action.stage if action.kind == "F" else -action.stage
        return (round_of[action.microbatch], turn, action.microbatch)

    return greedy_program(placement, microbatches, [room] * pp, urgency, lookahead)
