"""A backward in two halves computes the gradients of a whole one."""

from __future__ import annotations

import copy

import torch
from torch import nn

from raypp.measure.model_costs import backward_for_input


def test_both_halves_together_give_the_bits_of_a_whole_backward() -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.RMSNorm(16), nn.Linear(16, 8))
    halves = copy.deepcopy(whole)
    given, gradient = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    other = given.detach().clone().requires_grad_()
    whole(given).backward(gradient)
    for_weights = backward_for_input(halves, halves(other), gradient, other)
    assert given.grad is not None and other.grad is not None and torch.equal(given.grad, other.grad)
    assert all(parameter.grad is None for parameter in halves.parameters())
    for_weights()
    for one, two in zip(whole.parameters(), halves.parameters(), strict=True):
        assert one.grad is not None and two.grad is not None and torch.equal(one.grad, two.grad)
