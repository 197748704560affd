"""Choosing tokens: the most likely, or a draw that depends on nothing but its place."""

from collections import Counter

import numpy as np
import pytest
import torch

from raypp.stages.pipeline.decode import Choice, drawn, next_tokens

LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.3]))


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 1), (0.39, 1), (0.41, 3), (0.71, 2), (0.89, 2), (0.91, 0), (1 - 1e-16, 0)]
)
def test_the_most_likely_tokens_share_the_interval(uniform: float, token: int) -> None:
    assert drawn(LOGITS, Choice(1.0), uniform) == token


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1e-9, {1}), (0.39, {1}), (0.41, {1, 3}), (0.75, {1, 3, 2}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p: float, kept: set[int]) -> None:
    assert {drawn(LOGITS, Choice(1.0, top_p), uniform) for uniform in np.linspace(0, 1 - 1e-9, 500)} == kept


def test_draws_have_the_probabilities_of_the_temperature() -> None:
    rows = torch.tensor(LOGITS)[None].expand(2000, 4)
    found = Counter(next_tokens(rows, range(2000), [7] * 2000, Choice(0.5, seed=3)))
    weights = np.exp(LOGITS * 2)
    for token, share in enumerate(weights / weights.sum()):
        assert found[token] / 2000 == pytest.approx(share, abs=0.035)


def test_a_draw_depends_on_seed_prompt_and_position_only() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    choice = Choice(2.0, 0.95, seed=11)
    together = next_tokens(logits, range(6), [9] * 6, choice)
    alone = [next_tokens(logits[row : row + 1], [row], [9], choice)[0] for row in range(6)]
    assert together == alone
    same = logits[:1].expand(40, -1)
    assert len(set(next_tokens(same, range(40), [9] * 40, choice))) > 5
    assert len(set(next_tokens(same, [0] * 40, range(40), choice))) > 5


def test_without_temperature_it_is_the_most_likely() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 3.0, 2.0]], dtype=torch.bfloat16)
    assert next_tokens(logits, [0, 1], [0, 0], Choice(seed=5)) == [1, 0]
