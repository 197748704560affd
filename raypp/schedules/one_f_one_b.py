"""1F1B (PipeDream-flush, arXiv:2006.09503): after a warm-up, one forward, one backward."""

from __future__ import annotations

from raypp.schedules.action import Action, Program


def warmup(pp: int, rank: int, microbatches: int, lookahead: int = 0) -> int:
    """Forwards before the first backward, and microbatches in flight: min(m, P - r), and `lookahead` more per rank below."""
    return min(microbatches, pp - rank + lookahead * (pp - 1 - rank))


def build(pp: int, stages_per_rank: int, microbatches: int, lookahead: int = 0) -> Program:
    """The program of every rank; one stage each."""
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
