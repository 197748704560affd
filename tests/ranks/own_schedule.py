"""A user-defined schedule, referenced as `own_schedule:backwards_in_pairs`."""


def backwards_in_pairs(pp: int, stages_per_rank: int, microbatches: int, lookahead: int = 0) -> dict[int, list[str]]:
    """Returns two forwards, two backwards, and so on, for every rank. One stage per rank."""
    program: dict[int, list[str]] = {}
    for rank in range(pp):
        program[rank] = [
            f"{rank}{kind}{index}"
            for pair in range(0, microbatches, 2)
            for kind in "FB"
            for index in range(pair, min(pair + 2, microbatches))
        ]
    return program
