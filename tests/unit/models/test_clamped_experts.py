"""Experts with a clamped SwiGLU: its own backward, and all experts at once against one by one."""

import torch

from raypp.stages.models.experts import ALPHA, LIMIT, ClampedExperts, clamped_swiglu, grouped_clamped


def test_the_gradient_is_that_of_plain_operators() -> None:
    torch.manual_seed(0)
    x = (torch.randn(9, 12, dtype=torch.float64) * 8).requires_grad_()
    assert (x.abs() > LIMIT).any()
    gate, up = x[:, ::2].clamp(max=LIMIT), x[:, 1::2].clamp(min=-LIMIT, max=LIMIT)
    expected = (up + 1) * gate * torch.sigmoid(ALPHA * gate)
    found = clamped_swiglu(x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradient = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, x, gradient), torch.autograd.grad(expected, x, gradient), rtol=1e-12, atol=1e-12
    )


def test_all_experts_at_once_compute_what_they_do_one_by_one() -> None:
    torch.manual_seed(0)
    experts = ClampedExperts(4, 16, 24).to(torch.bfloat16)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    rows, counts = torch.randn(10, 16, dtype=torch.bfloat16), torch.tensor([3, 0, 6, 1])
    biases = [getattr(experts, name) for name in experts.biases]
    at_once = grouped_clamped(rows, counts, *map(experts.stack, experts.names), *biases)
    torch.testing.assert_close(at_once, experts(rows, counts), rtol=2e-2, atol=2e-2)
