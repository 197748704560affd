"""ZBV: two stages per rank in a V, split backwards. Almost no bubble, with the memory of 1F1B."""

from math import ceil

from raypp.kinds import ScheduleKind
from raypp.planning.schedules.action import Program
from raypp.planning.schedules.greedy import greedy_program

KIND = ScheduleKind(
    "zbv",
    "zero bubble, two stages per rank placed in a V",
    position=6,
    placement="v",
    stages_per_rank=(2, 2),
    splits_backward=True,
    source="arXiv:2401.10241, section 6",
)


def build(pp: int, stages_per_rank: int, microbatches: int, lookahead: int = 0) -> Program:
    """Builds the program of every rank. Rank r holds the stages r and 2·pp - 1 - r. A rank holds
    the activations of at most 2·pp half-size stages, as much as the first rank of 1F1B. With
    `lookahead`, the order is that for messages that take so many forwards of a stage. A microbatch
    crosses 4·(pp - 1) links on its way through the two stages of a rank and back, and a rank takes
    six forwards' time for one. So it holds 2/3·(pp - 1) more for each unit."""
    placement = [[rank, 2 * pp - 1 - rank] for rank in range(pp)]
    room = 2 * pp + ceil(2 * lookahead * (pp - 1) / 3)
    # The second half of the V is first: it leads to the backwards that other ranks wait for.
    return greedy_program(placement, microbatches, [room] * pp, lambda one: (one.stage < pp, one.microbatch), lookahead)
