"""Interleaved 1F1B: several stages per rank, depth first, alternating forward and backward."""

from raypp.kinds import ScheduleKind
from raypp.planning.schedules.action import Action, Program

KIND = ScheduleKind(
    "interleaved_1f1b",
    "1f1b over several stages per rank: a smaller bubble, more on the links",
    position=3,
    stages_per_rank=(1, 64),
    microbatches_per_rank=1,
    reason="a round takes at least one microbatch per rank through all of a rank's stages",
    searched_from=2,
    source="arXiv:2104.04473",
)


def rounds_of(least: int, microbatches: int) -> list[range]:
    """Splits microbatches into rounds that pass through all stages of a rank together. A round has
    at least `least` microbatches, if there are so many; rounds are as equal as possible. Longer
    rounds come first: the first sets the length of the warm-up, enough for all."""
    count = max(1, microbatches // least)
    each, longer = divmod(microbatches, count)
    rounds, start = [], 0
    for index in range(count):
        size = each + (index < longer)
        rounds.append(range(start, start + size))
        start += size
    return rounds


def build(pp: int, stages_per_rank: int, microbatches: int, lookahead: int = 0) -> Program:
    """Builds the program of every rank. Stage s is on rank s mod pp. The warm-up of rank r is a
    round through all stages but the last, plus two forwards for each later pipeline rank.
    `lookahead` adds that many more for each later rank, and half as many microbatches per rank to a
    round: while a microbatch crosses the links between the ranks, a rank has others of the same
    round to compute. The warm-up is capped: a longer one would need forwards that the last rank can
    only run after rank 0's first backward."""
    rounds = rounds_of(pp + (pp * lookahead + 1) // 2, microbatches)
    most = (stages_per_rank + (len(rounds) > 1)) * len(rounds[-1])
    program: dict[int, list[Action]] = {}
    for rank in range(pp):
        turns = [rank + turn * pp for turn in range(stages_per_rank)]
        forwards = [Action(s, "F", i) for part in rounds for s in turns for i in part]
        backwards = [Action(s, "B", i) for part in rounds for s in reversed(turns) for i in part]
        below = pp - 1 - rank
        classic = min((stages_per_rank - 1) * len(rounds[0]) + 2 * below + 1, len(forwards))
        ahead = max(classic, min(classic + lookahead * below, most))
        actions = forwards[:ahead]
        for index, backward in enumerate(backwards):
            actions.append(backward)
            actions += forwards[ahead + index : ahead + index + 1]
        program[rank] = actions
    return program
