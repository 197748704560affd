"""Dropout of adapters: the rate, independence of what it depends on, and what ranks share."""

import numpy as np
import pytest
import torch
from torch import Tensor

from raypp.stages.models.adapter_dropout import AdapterDropout, CurrentTokens, StepKeys

ROWS, LENGTH, WIDTH = 4, 512, 96
COLUMNS = np.arange(LENGTH)
NAME = "model.layers.0.mlp.up_proj"


def dropped(
    probability: float = 0.25, *, seed: int = 3, step: int = 1, name: str = NAME, first: int = 0, width: int = WIDTH
) -> Tensor:
    """Returns what becomes of ones, `[B * T, C]`."""
    tokens = CurrentTokens()
    tokens.keys_S = StepKeys(seed, step, 0).of(first, ROWS, COLUMNS)
    return AdapterDropout(probability, name, tokens)(torch.ones(ROWS * LENGTH, width))


@pytest.mark.parametrize("probability", [0.05, 0.25, 0.9])
def test_the_rate_and_the_mean_are_those_asked_for(probability: float) -> None:
    out = dropped(probability)
    rate, spread = (out == 0).double().mean(), (probability * (1 - probability) / out.numel()) ** 0.5
    assert abs(rate - probability) < 5 * spread
    assert out[out != 0].unique().tolist() == pytest.approx([1 / (1 - probability)], rel=1e-3)
    # Also of every feature and of every token.
    for dim, count in ((0, ROWS * LENGTH), (1, WIDTH)):
        rates = (out == 0).double().mean(dim)
        assert (rates - probability).abs().max() < 6 * (probability * (1 - probability) / count) ** 0.5
        assert rates.std() == pytest.approx((probability * (1 - probability) / count) ** 0.5, rel=0.5)


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 4},
        {"step": 2},
        {"name": "model.layers.1.mlp.up_proj"},
        {"name": NAME.replace("up", "gate")},
        {"first": ROWS},
    ],
    ids=["seed", "step", "layer", "matrix", "rows"],
)
def test_masks_of_other_seeds_steps_layers_matrices_and_rows_are_independent(other: dict[str, object]) -> None:
    one, two = (out == 0 for out in (dropped(0.5), dropped(0.5, **other)))
    together = (one & two).double().mean()
    assert abs(together - 0.25) < 5 * (0.25 * 0.75 / one.numel()) ** 0.5


def test_neighbouring_tokens_and_features_are_independent() -> None:
    mask = (dropped(0.5) == 0).double() - 0.5
    for shift in (1, 2, 3, 4, 8):
        for dim in (0, 1):
            correlation = (mask * mask.roll(shift, dim)).mean() / 0.25
            assert abs(correlation) < 5 / mask.numel() ** 0.5


def test_ranks_drop_what_one_process_drops_in_their_part_of_the_rows() -> None:
    whole = dropped().view(ROWS, LENGTH, WIDTH)
    columns = np.r_[0:128, 384:512]
    tokens = CurrentTokens()
    tokens.keys_S = StepKeys(3, 1, 2).of(0, 2, columns)  # a replica whose rows begin with the third
    own = AdapterDropout(0.25, NAME, tokens)(torch.ones(2, len(columns), WIDTH))
    assert torch.equal(own, whole[2:][:, columns])


def test_a_width_that_is_no_multiple_of_four_loses_only_its_last_features() -> None:
    assert torch.equal(dropped(width=93), dropped()[:, :93])


def test_nothing_is_dropped_without_keys_and_gradients_have_the_mask() -> None:
    x = torch.randn(ROWS * LENGTH, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    tokens = CurrentTokens()
    dropout = AdapterDropout(0.25, NAME, tokens)
    assert dropout(x) is x
    tokens.keys_S = StepKeys(3, 1, 0).of(0, ROWS, COLUMNS)
    out = dropout(x)
    out.sum().backward()
    assert out.dtype == torch.bfloat16 and x.grad is not None
    assert torch.equal(x.grad == 0, dropped() == 0)


def test_less_than_half_a_step_drops_and_scales_nothing_and_a_step_does() -> None:
    assert torch.equal(dropped(0.49 / 65536), torch.ones(ROWS * LENGTH, WIDTH))
    out = dropped(1 / 65536)
    assert 0 < (out == 0).sum() < 20 and out.max() > 1


@pytest.mark.parametrize("probability", [1e-9, 1 - 1e-9])
def test_extreme_probabilities_neither_drop_all_nor_divide_by_zero(probability: float) -> None:
    assert dropped(probability).isfinite().all()
