"""Tests that the kernels of Triton give the bits of their references in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raypp.models import fused
from raypp.models.experts import grouped
from raypp.models.quantised_rows import dequantise_rows, quantise_rows
from raypp.train.adamw_by_rows import AdamWByRows
from raypp.train.bf16_weights import Bf16Weights

pytestmark = pytest.mark.gpu
SHAPES = ((5,), (3, 7), (4, 256), (6, 600), (2, 3, 300), (64, 8192))


def both_ways(monkeypatch: pytest.MonkeyPatch, compute: Any) -> tuple[Any, Any]:
    """Returns what `compute` returns with the kernels, and with torch."""
    assert fused.reason_against(torch.device("cuda", 0)) is None
    found = compute()
    monkeypatch.setattr(fused, "kernels", lambda device: None)
    return found, compute()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_rows_are_dequantised_to_the_same_bits(monkeypatch: pytest.MonkeyPatch, base: Any, dtype: torch.dtype) -> None:
    for shape in ((3, 64), (5, 4096 + 64), (2, 3, 192)):
        stored = quantise_rows(torch.randn(shape, device="cuda"), base)
        kernel, reference = both_ways(monkeypatch, lambda s=stored, w=shape[-1]: dequantise_rows(s, base, w, dtype))
        monkeypatch.undo()
        assert torch.equal(kernel, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quantised", [False, True], ids=["fp32 moments", "8 bit"])
def test_updates_have_the_same_bits(monkeypatch: pytest.MonkeyPatch, quantised: bool, dtype: torch.dtype) -> None:
    kernel, reference = both_ways(monkeypatch, lambda: updated(quantised, dtype))
    for found, expected in zip(kernel, reference, strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def updated(quantised: bool, dtype: torch.dtype) -> list[Tensor]:
    """Returns weights and moments after four updates."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, device="cuda").to(dtype)) for shape in SHAPES]
    weights = Bf16Weights([(str(index), parameter) for index, parameter in enumerate(parameters)])
    weights.factor, weights.seed = 0.37, 3
    groups = [{"params": parameters, "weight_decay": 0.1}]
    optimizer = AdamWByRows(groups, weights, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, quantised=quantised)
    for step in range(4):
        weights.step = step + 1
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter) * 10 ** (step - 2)
            parameter.grad.view(-1)[0] = 0
        optimizer.step()
    return [tensor.detach() for one in parameters for tensor in (one, *optimizer.state[one].values())]


def test_experts_without_rows_have_zero_gradients_in_memory_full_of_nan() -> None:
    counts = torch.tensor([100, 0, 300, 0, 624, 0], device="cuda")
    rows = torch.randn(1024, 256, device="cuda", dtype=torch.bfloat16)
    shapes = ((6, 512, 256), (6, 512, 256), (6, 256, 512))
    stacks = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    left = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(16)]
    del left  # the allocator hands these blocks out again
    grouped(rows, counts, *stacks).sum().backward()
    for stack in stacks:
        assert stack.grad is not None
        assert bool(stack.grad.isfinite().all())
        assert not bool(stack.grad[counts == 0].any())
