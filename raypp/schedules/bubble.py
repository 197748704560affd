"""The textbook pipeline bubble: how long ranks are idle in a step.

P ranks, m microbatches, v stages per rank. Two definitions are in use; they differ in the
denominator. Both assume equal stages and free links (arXiv:2104.04473, section 2.2). The simulator
gives the bubble of a real program.
"""

from __future__ import annotations


def bubble_fraction(pp: int, microbatches: int, stages_per_rank: int = 1) -> float:
    """Returns idle time as a fraction of the whole step: (P - 1) / (v·m + P - 1)."""
    return (pp - 1) / (stages_per_rank * microbatches + pp - 1)


def bubble_overhead(pp: int, microbatches: int, stages_per_rank: int = 1) -> float:
    """Returns idle time relative to compute time: (P - 1) / (v·m)."""
    return (pp - 1) / (stages_per_rank * microbatches)
