"""Stochastic rounding: unbiased; its bits depend on seed, step, name and place only."""

import math

import pytest
import torch

from raypp.rank.optimizers.bf16_weights import Bf16Weights, random_bits, round_to_bf16, rounding_key

ROWS, COLUMNS = 512, 512


def bits(step: int = 1, name: str = "w", rows: int = ROWS, columns: int = COLUMNS) -> torch.Tensor:
    return random_bits(rounding_key(0, step, name), torch.arange(rows), columns, 0, columns)


@pytest.mark.parametrize("value", [1.0 + 2**-10, 1.001, -3.3e-3, 0.7071, 2.0**-126 * 1.001, 1e30])
def test_the_mean_is_the_value_and_the_variance_that_of_a_coin(value: float) -> None:
    exact = torch.tensor(value)
    rounded = round_to_bf16(torch.full((ROWS, COLUMNS), value), bits()).double()
    low, high = rounded.min(), rounded.max()
    assert high > low and rounded.unique().numel() == 2
    gap, share = float(high - low), float((exact.double() - low) / (high - low))
    assert 0 < share < 1
    deviation = gap * math.sqrt(share * (1 - share))
    count = rounded.numel()
    assert abs(float(rounded.mean() - exact.double())) < 4 * deviation / math.sqrt(count)
    assert float(rounded.std()) == pytest.approx(deviation, rel=0.02)


def test_what_bf16_can_hold_is_never_changed() -> None:
    torch.manual_seed(0)
    values = torch.randn(ROWS, COLUMNS).bfloat16()
    assert torch.equal(round_to_bf16(values.float(), bits()), values)


def test_nan_and_infinity_stay() -> None:
    # The last pattern is the NaN that CUDA makes; adding to it as an integer would give -0.
    patterns = torch.tensor([0x7F800000, -0x800000, 0x7FC00000, 0x7FFFFFFF], dtype=torch.int32)
    found = round_to_bf16(patterns.view(torch.float32), torch.full((4,), 65535, dtype=torch.int32))
    assert found[:2].tolist() == [math.inf, -math.inf] and bool(found[2:].isnan().all())


def test_the_bits_are_uniform_and_independent_of_neighbours_steps_and_names() -> None:
    base = bits().double()
    count, spread = base.numel(), math.sqrt((65536**2 - 1) / 12)
    assert abs(float(base.mean()) - 65535 / 2) < 4 * spread / math.sqrt(count)
    counts = torch.bincount((bits() >> 8).flatten(), minlength=256).double()
    chi = float(((counts - count / 256) ** 2 / (count / 256)).sum())
    assert abs(chi - 255) < 5 * math.sqrt(2 * 255)
    others = [base.roll(1, 1), base.roll(4, 1), base.roll(1, 0), bits(step=2).double(), bits(name="v").double()]
    for other in others:
        related = torch.corrcoef(torch.stack((base.flatten(), other.flatten())))[0, 1]
        assert abs(float(related)) < 5 / math.sqrt(count)


@pytest.mark.parametrize("width", [1, 3, 8, 45])
def test_a_part_draws_what_the_whole_draws_there(width: int) -> None:
    key, rows = rounding_key(3, 7, "model.norm.weight"), torch.arange(6)
    whole = random_bits(key, rows, width, 0, width)
    assert whole.shape == (6, width) and whole.min() >= 0 and whole.max() < 65536
    for start in range(width):
        part = random_bits(key, rows[2:5], width, start, width - start)
        assert torch.equal(part, whole[2:5, start:])


def in_python(key: int, row: int, column: int, width: int) -> int:
    """The same bits in Python's integers: SplitMix64, four columns to a number."""
    whole = 2**64 - 1
    z = ((row * -(-width // 4) + column // 4 + 1) * 0x9E3779B97F4A7C15 + key) & whole
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & whole
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & whole
    z ^= z >> 31
    return z >> (16 * (column % 4)) & 0xFFFF


def test_the_bits_are_those_of_splitmix64() -> None:
    key, rows, width = rounding_key(0, 1, "w"), [0, 1, 1_000_000_007], 6
    found = random_bits(key, torch.tensor(rows), width, 0, width)
    assert found.tolist() == [[in_python(key, row, column, width) for column in range(width)] for row in rows]
    assert found[0, :3].tolist() == [62226, 39336, 9193], "runs of older versions would resume with other numbers"


def test_a_small_update_survives_on_average_and_is_lost_by_rounding_to_nearest() -> None:
    weight = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    weights = Bf16Weights([("w", weight)])
    for step in range(1, 65):
        weights.step = step
        weights.write(weight, weights.values(weight) + 2**-12)
    assert float(weight.detach().double().mean()) == pytest.approx(1 + 64 * 2**-12, abs=3e-4)
    assert torch.equal((torch.ones(1) + 2**-12).bfloat16(), torch.ones(1).bfloat16())


def test_gradients_are_scaled_in_fp32() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    weight.grad = torch.full((2, 2), 3.0, dtype=torch.bfloat16)
    weights = Bf16Weights([("w", weight)])
    weights.factor = 1 / 3000
    assert torch.equal(weights.gradient(weight), torch.full((2, 2), 3.0) * (1 / 3000))
