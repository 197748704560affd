"""The random numbers of a step depend only on seed, step and replica."""

import torch

from raypp.job import limits
from raypp.rank.step.step import step_seed


def test_the_seed_of_a_step_never_changes() -> None:
    # A run resumed by another version of raypp draws the same numbers.
    assert step_seed(0, 1, 0) == 65_537
    assert step_seed(7, 12, 3) == (7 * 1_000_003 + 12) * 65_537 + 3


def test_no_two_steps_or_replicas_draw_alike() -> None:
    seeds = [step_seed(seed, step, replica) for seed in range(3) for step in range(1, 30) for replica in range(20)]
    assert len(set(seeds)) == len(seeds)


def test_torch_takes_the_seeds_of_every_job() -> None:
    found = [step_seed(seed, 10**9, replica) for seed in (281_469_838, limits.SEED) for replica in (0, 1)]
    assert len({torch.Generator().manual_seed(seed).initial_seed() for seed in found}) == 4
