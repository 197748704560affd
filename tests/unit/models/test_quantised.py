"""Quantised modules compute what plain modules with the dequantised matrix compute."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raypp.job.lora import BASES
from raypp.stages.models.products import LaterGradients, Projection, weights_later
from raypp.stages.models.quantised import Format, Quantised, QuantisedLinear

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def filled(base: str, *, bias: bool = False) -> QuantisedLinear:
    layer = QuantisedLinear(128, 96, base, bias=bias).to_empty(device="cpu")
    with torch.no_grad():
        layer.weight.copy_(layer.format.quantise(random(96, 128)))
        if layer.bias is not None:
            layer.bias.copy_(random(96))
    return layer


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_a_linear_layer_computes_with_the_dequantised_matrix(base: str, dtype: torch.dtype) -> None:
    layer = filled(base)
    matrix = layer.format.dequantise(layer.weight, dtype)
    assert not torch.equal(matrix.float(), random(96, 128))
    results = []
    for function in (layer, lambda x: F.linear(x, matrix)):
        x = random(2, 7, 128, seed=1, dtype=dtype).requires_grad_()
        out = function(x)
        out.backward(random(2, 7, 96, seed=2, dtype=dtype))
        results.append((out, x.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert layer.weight.grad is None


def test_a_bias_is_added_and_frozen() -> None:
    layer = filled("nf4", bias=True)
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    x = random(5, 128, seed=1)
    out = layer(x)
    assert torch.equal(out, F.linear(x, layer.format.dequantise(layer.weight, x.dtype)) + layer.bias)


@pytest.mark.parametrize("base", BASES)
def test_the_backward_keeps_the_bytes_only(base: str) -> None:
    layer = filled(base)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(random(3, 128).requires_grad_())
    scales = 96 if base == "fp8" else 0
    assert [tensor.data_ptr() for tensor in kept if tensor.numel() != scales] == [layer.weight.data_ptr()]


@pytest.mark.parametrize("base", BASES)
def test_recomputation_and_split_backwards_give_the_same_gradients(base: str) -> None:
    """A layer over an adapter: zero-bubble schedules compute the adapter's gradient later."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = filled(base)
            self.adapter = Projection(128, 96, bias=False)
            nn.init.constant_(self.adapter.weight, 0.01)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.adapter(x).tanh()

    def plain(model: Adapted, x: Tensor) -> None:
        model(x).backward(random(3, 96, seed=2))

    def recomputed(model: Adapted, x: Tensor) -> None:
        checkpoint(model, x, use_reentrant=False).backward(random(3, 96, seed=2))

    def split(model: Adapted, x: Tensor) -> None:
        later = LaterGradients()
        with weights_later(later):
            model(x).backward(random(3, 96, seed=2))
        later.compute()

    results = []
    for way in (plain, recomputed, split):
        model, x = Adapted(), random(3, 128, seed=1).requires_grad_()
        way(model, x)
        results.append((x.grad, model.adapter.weight.grad))
    for found in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found, results[0], strict=True))


def test_the_operators_keep_the_rules_of_torch() -> None:
    """Compilers and fake tensors rely on them: shapes of fakes, no hidden aliases, gradients."""
    stored = Format("nf4", 128).quantise(random(96, 128))
    operator = torch.ops.raypp.quantised_product.default
    torch.library.opcheck(operator, (random(3, 128).requires_grad_(), stored, None, "nf4", 128, False, 0))
    torch.library.opcheck(operator, (random(3, 32).requires_grad_(), stored, None, "nf4", 128, False, 64))
    stack = Format("int8", 64).quantise(random(4, 32, 64))
    rows, ends = random(16, 64, dtype=torch.bfloat16).requires_grad_(), torch.tensor([3, 3, 12, 16], dtype=torch.int32)
    torch.library.opcheck(operator, (rows, stack, ends, "int8", 64, False, 0))


@pytest.mark.parametrize("base", BASES)
def test_grouped_experts_are_the_experts_one_by_one(base: str) -> None:
    stack = Quantised((form := Format(base, 64)).quantise(random(4, 32, 64)), form)
    assert stack.shape == (4, 32, 64)
    counts, ends = [3, 0, 9, 4], torch.tensor([3, 3, 12, 16], dtype=torch.int32)
    results = []
    for together in (True, False):
        rows = random(16, 64, seed=1, dtype=torch.bfloat16).requires_grad_()
        if together:
            out = stack.product(rows, ends)
        else:
            parts = zip(rows.split(counts), stack.unbind(), strict=True)
            out = torch.cat([matrix.product(part) for part, matrix in parts])
        out.backward(random(16, 32, seed=2, dtype=torch.bfloat16))
        results.append((out, rows.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
