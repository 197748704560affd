"""Tests experts with the grouped kernel on CUDA."""

from __future__ import annotations

import pytest
import torch

from raypp.models.experts import grouped, one_by_one

pytestmark = pytest.mark.gpu


def test_the_grouped_kernel_gives_what_the_loop_gives_in_bf16() -> None:
    counts = torch.tensor([3, 0, 129, 40], device="cuda")
    generator = torch.Generator().manual_seed(0)
    shapes = ((172, 64), (4, 128, 64), (4, 128, 64), (4, 64, 128))
    sources = [torch.randn(shape, generator=generator).mul(0.3).to("cuda", torch.bfloat16) for shape in shapes]
    results = []
    for way, numbers in ((one_by_one, counts.tolist()), (grouped, counts)):
        inputs = [source.clone().requires_grad_() for source in sources]
        out = way(inputs[0], numbers, *inputs[1:])
        out.square().sum().backward()
        results.append([out, *(t.grad for t in inputs)])
    for looped, together in zip(*results, strict=True):
        # bf16 has 8 bits: sums in another order differ by a few roundings.
        error = (looped.float() - together.float()).norm() / looped.float().norm()
        assert error <= 2e-2
