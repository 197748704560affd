"""Moments in 8 bits: the codes, and AdamW that keeps them."""

import pytest
import torch

from raypp.job.job import OptimizerOptions
from raypp.rank.optimizers.optimizer import begin_update, build_optimizer
from raypp.rank.optimizers.quantised_moments import BLOCK, blocks_of, code_values, dequantise, quantise

CPU = torch.device("cpu")


@pytest.mark.parametrize("signed", [True, False])
def test_there_are_256_codes_with_zero_and_one_among_them(signed: bool) -> None:
    values = code_values(signed, CPU)
    assert values.shape == (256,) and bool((values.diff() > 0).all())
    assert {0.0, 1.0} <= set(values.tolist())
    assert float(values[values > 0].min()) < 1e-6


@pytest.mark.parametrize("signed", [True, False])
def test_what_a_code_stands_for_keeps_its_code(signed: bool) -> None:
    values = code_values(signed, CPU)[0 if signed else 1 :].view(1, -1)
    codes, scales = quantise(values, signed=signed)
    assert torch.equal(dequantise(codes, scales, signed=signed), values)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("columns", [1, 45, 256, 300, 1024])
def test_a_value_is_off_by_at_most_half_a_gap(signed: bool, columns: int) -> None:
    torch.manual_seed(0)
    values = torch.randn(7, columns) * torch.logspace(-6, 3, 7).view(-1, 1)
    values = values if signed else values.abs()
    codes, scales = quantise(values, signed=signed)
    assert codes.dtype == torch.uint8 and codes.shape == values.shape
    assert scales.shape == (7, blocks_of(columns))
    largest = scales.repeat_interleave(min(BLOCK, columns), 1)[:, :columns]
    error = (dequantise(codes, scales, signed=signed) - values).abs() / largest
    assert float(error.max()) <= float(code_values(signed, CPU).diff().max()) / 2 + 1e-6


@pytest.mark.parametrize("signed", [True, False])
def test_the_code_is_that_of_the_nearest_number(signed: bool) -> None:
    torch.manual_seed(0)
    numbers = code_values(signed, CPU).double()
    middles = (numbers[1:] + numbers[:-1]) / 2
    near = torch.cat([middles.float().nextafter(torch.tensor(way)) for way in (-2.0, 2.0)])
    drawn = torch.randn(100_000) * torch.logspace(-8, 0, 100_000)
    values = torch.cat((torch.tensor([1.0, -1.0, 0.0, -0.0]), middles.float(), near, drawn.clamp(-1, 1)))
    values = values if signed else values.abs()
    searched = torch.bucketize(values, middles.float())
    # Each block's largest value must be one for its codes to be those of the values.
    blocks = [torch.cat((torch.ones(1), part)).view(1, -1) for part in values.split(BLOCK - 1)]
    ours = torch.cat([quantise(block, signed=signed)[0][0, 1:] for block in blocks])
    assert torch.equal(ours.long()[: len(values)], searched if signed else searched.clamp(min=1))


def test_rows_in_parts_have_the_codes_of_the_whole() -> None:
    torch.manual_seed(0)
    values = torch.randn(8, 300)
    whole = quantise(values, signed=True)
    parts = [quantise(part, signed=True) for part in values.split([1, 4, 3])]
    codes, scales = (torch.cat(found) for found in zip(*parts, strict=True))
    assert torch.equal(codes, whole[0]) and torch.equal(scales, whole[1])


def test_a_root_does_not_become_zero_beside_a_larger_one_and_zeros_stay() -> None:
    values = torch.tensor([[1.0, 1e-12, 0.0], [0.0, 0.0, 0.0]])
    found = dequantise(*quantise(values, signed=False), signed=False)
    assert found[0, 1] > 0 and not found[1].any()


def linear(dtype: torch.dtype = torch.float32, rows: int = 40, columns: int = 300) -> torch.nn.Module:
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.matrix = torch.nn.Parameter(torch.randn(rows, columns).to(dtype))
    module.vector = torch.nn.Parameter(torch.randn(columns).to(dtype))
    return module


def trained(
    module: torch.nn.Module, options: OptimizerOptions, precision: str, steps: int = 20
) -> torch.optim.Optimizer:
    optimizer = build_optimizer([module], options, precision)
    generator = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        begin_update(optimizer, [p.grad for p in module.parameters()], 0.5, options.lr, step)  # type: ignore[misc]
        optimizer.step()
    return optimizer


@torch.no_grad()
def error(ours: torch.nn.Module, theirs: torch.nn.Module, start: torch.nn.Module) -> float:
    """Returns the difference of two matrices relative to how far one of them moved."""
    return float((ours.matrix - theirs.matrix).norm() / (theirs.matrix - start.matrix).norm())


ADAMW = OptimizerOptions(kind="adamw", lr=1e-2)
IN_8_BITS = OptimizerOptions(kind="adamw", lr=1e-2, state="8bit")


def test_in_fp32_adamw_by_rows_is_torchs_adamw() -> None:
    """Vectors keep fp32 moments in either state, so their updates are those of torch's AdamW."""
    ours, theirs = linear(), linear()
    trained(ours, IN_8_BITS, "fp32")
    trained(theirs, ADAMW, "fp32")
    torch.testing.assert_close(ours.vector, theirs.vector, rtol=2e-6, atol=2e-7)


def test_8_bit_moments_change_updates_by_a_few_percent() -> None:
    start, ours, theirs = linear(), linear(), linear()
    optimizer = trained(ours, IN_8_BITS, "fp32")
    trained(theirs, ADAMW, "fp32")
    assert 0 < error(ours, theirs, start) < 0.05
    state = optimizer.state[ours.matrix]
    assert {key: value.dtype for key, value in state.items()} == {
        "step": torch.float32,
        "exp_avg": torch.uint8,
        "exp_avg_sq": torch.uint8,
        "exp_avg_scale": torch.float32,
        "exp_avg_sq_scale": torch.float32,
    }
    assert state["exp_avg_scale"].shape == (40, 2)
    assert set(optimizer.state[ours.vector]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("options", [ADAMW, IN_8_BITS], ids=["fp32", "8bit"])
def test_bf16_weights_stay_near_those_of_fp32(options: OptimizerOptions) -> None:
    start, ours, theirs = linear(torch.bfloat16), linear(torch.bfloat16), linear(torch.bfloat16).float()
    optimizer = trained(ours, options, "bf16_pure")
    trained(theirs, ADAMW, "fp32")
    assert error(ours, theirs, start) < 0.3
    assert ours.matrix.dtype == torch.bfloat16
    assert optimizer.state[ours.vector]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("kind", ["sgd", "muon"])
def test_other_optimizers_keep_their_momentum_in_fp32(kind: str) -> None:
    module, wide = linear(torch.bfloat16), linear(torch.bfloat16).float()
    optimizer = trained(module, OptimizerOptions(kind=kind, lr=1e-2), "bf16_pure", steps=3)
    trained(wide, OptimizerOptions(kind=kind, lr=1e-2), "fp32", steps=3)
    dtypes = {value.dtype for state in optimizer.state.values() for value in state.values()}
    assert dtypes == {torch.float32}
    torch.testing.assert_close(module.matrix.float(), wide.matrix, rtol=2**-6, atol=2**-9)


def test_the_same_steps_give_the_same_bits_and_another_seed_others() -> None:
    found = []
    for seed in (0, 0, 1):
        module = linear(torch.bfloat16)
        optimizer = build_optimizer([module], IN_8_BITS, "bf16_pure", seed)
        module.matrix.grad = torch.ones_like(module.matrix)
        begin_update(optimizer, [], 1.0, 1e-3, 1)
        optimizer.step()
        found.append(module.matrix.detach())
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
