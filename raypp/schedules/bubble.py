"""How much of a step a pipeline stands idle, by the textbook.

P ranks, m microbatches, v stages per rank. The two numbers in use differ by what they are divided by; both count
equal stages and free links (arXiv:2104.04473, section 2.2). A real program's bubble comes from the simulator.
"""

from __future__ import annotations


def bubble_fraction(pp: int, microbatches: int, stages_per_rank: int = 1) -> float:
    """Idle time as a share of the whole step: (P - 1) / (v·m + P - 1)."""
    return (pp - 1) / (stages_per_rank * microbatches + pp - 1)


def bubble_overhead(pp: int, microbatches: int, stages_per_rank: int = 1) -> float:
    """Idle time relative to the time of the work itself: (P - 1) / (v·m)."""
    return (pp - 1) / (stages_per_rank * microbatches)
