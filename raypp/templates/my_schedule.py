"""A schedule in waves: as many forwards as there are ranks, then their backwards, and again.

Its activations are those of as many microbatches as there are ranks; gpipe keeps all of a step.
"""


def in_waves(pp: int, stages_per_rank: int, microbatches: int, lookahead: int) -> dict[int, list[str]]:
    """Returns the actions of every rank: `1F3` is the forward of microbatch 3 in stage 1.

    Args:
        pp: Pipeline ranks. With one stage each, rank and stage have the same number.
        stages_per_rank: 1; this schedule knows no more.
        microbatches: Microbatches of a step.
        lookahead: Extra warm-up forwards; not used here.
    """
    program: dict[int, list[str]] = {}
    for rank in range(pp):
        program[rank] = [
            f"{rank}{kind}{microbatch}"
            for start in range(0, microbatches, pp)
            for kind in "FB"
            for microbatch in range(start, min(start + pp, microbatches))
        ]
    return program
