"""A backward in two halves computes the gradients of a whole one."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raypp.job.models import DecoderOptions
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.products import LaterGradients, Projection, grouped_linear, linear, weights_later
from raypp.stages.models.recomputed import recomputed
from raypp.stages.models.stage import build_stage
from raypp.stages.parallel.apply import recompute_blocks

Run = Callable[[nn.Module, Tensor], Tensor]


class Experts(nn.Module):
    """Two matrices in a stack, used one by one or by a grouped kernel."""

    def __init__(self, *, grouped: bool, transposed: bool) -> None:
        super().__init__()
        self.grouped, self.transposed = grouped, transposed
        self.stack = nn.Parameter(torch.randn(2, 16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        stack = self.stack.mT if self.transposed else self.stack
        if self.grouped:
            return grouped_linear(x, stack, torch.tensor([24, 32], dtype=torch.int32))
        parts = zip(torch.split(x, [24, 8]), (one.mT for one in self.stack.unbind()), strict=True)
        return torch.cat([linear(rows, one if self.transposed else one.mT) for rows, one in parts])


def plain() -> nn.Module:
    return nn.Sequential(Projection(16, 16), nn.SiLU(), nn.RMSNorm(16), Projection(16, 16, bias=False))


def experts(grouped: bool, transposed: bool) -> nn.Module:
    return nn.Sequential(plain(), Experts(grouped=grouped, transposed=transposed))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "matrices": plain,
    "a frozen matrix": lambda: nn.Sequential(Projection(16, 16).requires_grad_(False), plain()),
    **{
        f"experts, {'grouped' if grouped else 'one by one'}{', transposed' * transposed}": partial(
            experts, grouped, transposed
        )
        for grouped in (False, True)
        for transposed in (False, True)
    },
}


def halves(run: Run, model: nn.Module, given: Tensor, gradient: Tensor) -> None:
    later = LaterGradients()
    matrices = [one for one in model.parameters() if one.dim() > 1]
    before = [torch.empty(0) if one.grad is None else one.grad.clone() for one in matrices]
    with weights_later(later):
        torch.autograd.backward(run(model, given), gradient)
    for one, grad in zip(matrices, before, strict=True):
        assert one.grad is None or torch.equal(one.grad, grad), "I computes the gradient of a matrix"
    later.compute()


@pytest.mark.parametrize("trained", [True, False], ids=["", "input not trained"])
@pytest.mark.parametrize("name", MODELS)
def test_both_halves_together_give_the_bits_of_a_whole_backward(name: str, trained: bool) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if "grouped" in name else torch.float32
    whole = MODELS[name]().to(dtype)
    given, gradient = torch.randn(32, 16, dtype=dtype), torch.randn(32, 16, dtype=dtype)
    wanted = given.clone().requires_grad_(trained)
    for _ in range(2):  # gradients are added
        whole(wanted).backward(gradient)
    runs: dict[str, Run] = {
        "plain": lambda model, x: model(x),
        "recomputed": lambda model, x: recomputed(model)(x),
        "kept": lambda model, x: recomputed(model, keeps=True)(x),
        "by torch": lambda model, x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False),
    }
    for run in runs.values():
        model, x = copy.deepcopy(whole), given.clone().requires_grad_(trained)
        model.zero_grad()
        for _ in range(2):
            halves(run, model, x, gradient)
        pairs = [(x, wanted), *zip(model.parameters(), whole.parameters(), strict=True)]
        for one, two in pairs:
            assert (one.grad is None) == (two.grad is None)
            assert one.grad is None or two.grad is None or torch.equal(one.grad, two.grad)


@pytest.mark.parametrize("extent", ["selective", "full"])
def test_a_split_backward_recomputes_a_block_once(extent: str) -> None:
    options = DecoderOptions(kind="llama", num_layers=2, hidden_size=16, num_heads=2, ffn_size=24, vocab_size=31)
    stage: Any = build_stage(options, range(2), first=False, last=False).to_empty(device="cpu")
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    recompute_blocks(stage, extent)
    runs = []
    for layer in stage.model.layers.values():
        layer.input_layernorm.register_forward_pre_hook(lambda module, _: runs.append(module))
    later = LaterGradients()
    with weights_later(later):
        out = stage(torch.randn(1, 8, 16, requires_grad=True), torch.arange(8)[None], PackedDocuments.of_lengths((8,)))
        out.backward(torch.ones_like(out))
    assert {id(module) for module in runs[:2]} == {id(module) for module in runs[2:]}
    later.compute()
    assert len(runs) == 4
    assert all(parameter.grad is not None for parameter in stage.parameters())
