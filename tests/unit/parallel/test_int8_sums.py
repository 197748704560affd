"""Int8 sums with error feedback: their precision and size, and that nothing is lost for good."""

import pytest
import torch

from raypp.stages.parallel.replica_sums import BLOCK, add_up, decoded, encode, message_size

NUMBERS = 3 * BLOCK + 17


def gradient(seed: int, numbers: int = NUMBERS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    drawn = torch.randn(numbers, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (drawn * torch.logspace(-6, 3, numbers, dtype=torch.float64)).to(dtype)


def delivered(message: torch.Tensor, numbers: int = NUMBERS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    found = torch.empty(numbers, dtype=dtype)
    add_up([message], found)
    return found


@pytest.mark.parametrize("numbers", [1, BLOCK - 1, BLOCK, BLOCK + 1, NUMBERS])
def test_a_message_has_a_byte_per_number_and_a_scale_per_block(numbers: int) -> None:
    message, left = encode(gradient(1, numbers), torch.zeros(numbers))
    blocks = -(-numbers // BLOCK)
    assert message.dtype == torch.uint8 and message.numel() == message_size(numbers) == blocks * (BLOCK + 4)
    assert left.shape == (numbers,)


def test_each_number_is_within_half_a_step_of_its_blocks_scale() -> None:
    own = gradient(1)
    message, left = encode(own, torch.zeros(NUMBERS))
    found = delivered(message)
    for begin in range(0, NUMBERS, BLOCK):
        block = slice(begin, begin + BLOCK)
        step = own[block].abs().max() / 127
        assert bool(((found[block] - own[block]).abs() <= step * 0.501).all())
    assert torch.equal(left, own - found)


def test_four_bits_are_within_half_a_step_and_take_half_the_bytes() -> None:
    own = gradient(1)
    message, left = encode(own, torch.zeros(NUMBERS), 4)
    assert message.numel() == message_size(NUMBERS, 4) == 4 * (BLOCK // 2 + 4)
    found = decoded(message, torch.float32, 4).view(-1)[:NUMBERS]
    for begin in range(0, NUMBERS, BLOCK):
        block = slice(begin, begin + BLOCK)
        assert bool(((found[block] - own[block]).abs() <= own[block].abs().max() / 7 * 0.501).all())
    assert torch.equal(left, own - found) and bool((found < 0).any()) and bool((found > 0).any())


def test_the_residual_is_added_to_the_next_gradient() -> None:
    first, second = gradient(1), gradient(2)
    message, left = encode(first, torch.zeros(NUMBERS))
    again, _ = encode(second, left)
    together, _ = encode(second + left, torch.zeros(NUMBERS))
    assert torch.equal(again, together) and not torch.equal(message, again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_of_many_sums_is_exact_to_rounding(dtype: torch.dtype) -> None:
    steps, replicas = 64, 3
    residuals = [torch.zeros(NUMBERS, dtype=dtype) for _ in range(replicas)]
    wanted, found = torch.zeros(NUMBERS, dtype=torch.float64), torch.zeros(NUMBERS, dtype=torch.float64)
    for step in range(steps):
        messages = []
        for replica in range(replicas):
            own = gradient(100 * step + replica, dtype=dtype)
            message, residuals[replica] = encode(own, residuals[replica])
            messages.append(message)
            wanted += own.double()
        total = torch.empty(NUMBERS, dtype=dtype)
        add_up(messages, total)
        found += total.double()
    left = sum(one.double() for one in residuals)
    bound = 1e-5 if dtype == torch.float32 else 1e-6  # the scales are fp32
    assert (found + left - wanted).norm() <= bound * wanted.norm()
    # Without the feedback, 64 steps of rounding add up.
    assert (found - wanted).norm() < 3 * replicas * gradient(0).abs().max() / 127 * BLOCK**0.5
    largest = max(float(one.abs().max()) for one in residuals)
    assert 0 < largest <= 1.1 * max(float(gradient(s).abs().max()) for s in range(8)) / 127


def test_the_sum_is_taken_in_the_replicas_order() -> None:
    own = [gradient(seed) for seed in range(3)]
    messages = [encode(one, torch.zeros(NUMBERS))[0] for one in own]
    total = torch.empty(NUMBERS)
    add_up(messages, total)
    parts = [delivered(message) for message in messages]
    assert torch.equal(total, (parts[0] + parts[1]) + parts[2])


def test_zeros_stay_zeros_and_a_non_finite_number_is_not_hidden() -> None:
    own = torch.zeros(2 * BLOCK)
    message, left = encode(own, torch.zeros(2 * BLOCK))
    assert not delivered(message, 2 * BLOCK).any() and not left.any()
    for bad in (float("nan"), float("inf"), float("-inf")):
        own[3] = bad
        message, _ = encode(own, torch.zeros(2 * BLOCK))
        found = delivered(message, 2 * BLOCK)
        assert not found[:BLOCK].isfinite().all() and not found[BLOCK:].any()


def test_the_same_numbers_give_the_same_message() -> None:
    assert torch.equal(encode(gradient(1), gradient(2))[0], encode(gradient(1), gradient(2))[0])
