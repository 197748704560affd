"""Products in fp8: what is rounded, which gradient is what, and the memory that is kept."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypp.errors import RayppError
from raypp.job.fp8 import experts_in_fp8, matrices_in_fp8, sizes_in_fp8
from raypp.job.load import parse_job
from raypp.stages.models.fp8 import Fp8Matrix, compute_in_fp8, kept_matrices, rows_in_fp8
from raypp.stages.models.products import Projection
from raypp.stages.models.quantised import Format, Quantised, QuantisedLinear
from raypp.stages.models.stage import build_stage


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def rounded(rows: Tensor) -> Tensor:
    values, scales = rows_in_fp8(rows)
    return values.float() * scales


def product(weight: Tensor, *, kept: bool) -> Fp8Matrix:
    matrix = Fp8Matrix(weight, kept=kept)
    matrix.take(weight)
    return matrix


def test_a_row_has_its_own_scale_whatever_is_beside_it() -> None:
    x = random(6, 64)
    x[1] *= 1e4  # an outlier among rows changes no other row
    x[2] = 0
    x[3] *= 1e-30
    assert all(torch.equal(rounded(x[i : i + 1]), rounded(x)[i : i + 1]) for i in range(6))
    assert torch.equal(rounded(x)[2], torch.zeros(64))
    errors = (rounded(x) - x.float()).norm(dim=1) / x.float().norm(dim=1).clamp(min=1e-38)
    assert float(errors.max()) < 0.04
    x[4, 7] = float("inf")
    assert rounded(x)[4].isnan().any() and rounded(x)[[0, 1, 2, 3, 5]].isfinite().all()


class Parts:
    """Stands for ranks: a maximum of what all have given, which passes over NaN, as gloo's may."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []

    def largest(self, values: Tensor) -> Tensor:
        self.given.append(values)
        return torch.stack(self.given).nan_to_num(nan=0, posinf=torch.inf).amax(0)


def test_parts_of_a_row_have_its_scale_and_a_number_that_is_not_finite_reaches_all() -> None:
    x, ranks = random(8, 64), Parts()
    x[1, 3], x[2, 40], x[3, 0] = torch.nan, torch.nan, torch.inf
    for _ in range(2):
        parts = [rows_in_fp8(half, ranks=ranks) for half in x.chunk(2, dim=1)]  # type: ignore[arg-type]
    whole, scales = rows_in_fp8(x)
    finite = [0, 4, 5, 6, 7]
    assert torch.equal(torch.cat([values.float() for values, _ in parts], dim=1)[finite], whole.float()[finite])
    for values, scale in parts:
        assert torch.equal(scale[finite], scales[finite])
        assert (values.float().sum(1, keepdim=True) * scale).isnan().squeeze(1).tolist() == [
            i not in finite for i in range(8)
        ]


@pytest.mark.parametrize("kept", [True, False])
def test_forward_and_gradient_of_the_input_are_rounded_and_that_of_the_matrix_is_not(kept: bool) -> None:
    x, weight, gradient = (
        random(10, 64).requires_grad_(),
        random(48, 64, seed=1).requires_grad_(),
        random(10, 48, seed=2),
    )
    out = product(weight, kept=kept)(x, weight)
    out.backward(gradient)
    values, scales = rows_in_fp8(weight.detach())
    expected = rounded(x.detach()) @ (values.float() * scales).t()
    torch.testing.assert_close(out.float(), expected, rtol=2**-8, atol=1e-3)
    x_grad = rounded(gradient.float() * scales.t()) @ values.float()
    torch.testing.assert_close(x.grad.float(), x_grad, rtol=2**-8, atol=1e-3)
    assert torch.equal(weight.grad, gradient.t() @ x.detach())


def test_a_step_keeps_one_form_of_a_matrix_and_the_next_makes_another() -> None:
    weight, x = random(32, 64), random(4, 64, seed=1)
    matrix = product(weight, kept=True)
    before, weight = matrix(x, weight), weight * 2
    matrix.take(weight)
    assert torch.equal(matrix(x, weight), before)
    matrix.due = True
    matrix.take(weight)
    assert torch.equal(matrix(x, weight), before * 2)
    assert sum(buffer.numel() * buffer.element_size() for buffer in matrix.buffers()) == 2 * 32 * 64 + 4 * 32


def test_the_compiler_sees_all_of_a_product_and_changes_no_bit() -> None:
    x, weight = random(10, 64).requires_grad_(), random(48, 64, seed=1).requires_grad_()
    matrix = product(weight, kept=True)

    def block(x: Tensor) -> Tensor:
        return matrix(F.silu(x), weight) + matrix(x, weight)

    results = []
    for function in (block, torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)):
        x.grad = weight.grad = None
        out = function(x)
        out.backward(torch.ones_like(out))
        results.append((out, x.grad, weight.grad))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("kept", [True, False])
def test_all_experts_at_once_give_the_bits_of_one_after_the_other(transposed: bool, kept: bool) -> None:
    counts, found = [5, 0, 4, 3], []
    for at_once in (True, False):
        x, weight = random(12, 64).requires_grad_(), random(4, 48, 64, seed=1)
        stored = (weight.mT.contiguous() if transposed else weight).requires_grad_()
        matrices = stored.mT if transposed else stored
        stack = Fp8Matrix(matrices, kept=kept).stack(matrices)
        if at_once:
            out = stack.product(x, torch.tensor(counts).cumsum(0).to(torch.int32))
        else:
            experts = zip(x.split(counts), stack.unbind(), strict=True)
            out = torch.cat([one.product(rows) for rows, one in experts])
        out.backward(random(12, 48, seed=2))
        found.append((out, x.grad, stored.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert not found[0][2][1].any() and not torch.equal(found[0][0][:5], random(12, 64)[:5] @ weight[0].t())


def test_experts_of_a_frozen_base_are_multiplied_as_they_are() -> None:
    counts, gradient = [5, 0, 4, 3], random(12, 48, seed=2)
    form, ends = Format("fp8", 64, cast=rows_in_fp8), torch.tensor(counts).cumsum(0).to(torch.int32)
    stored, found = form.quantise(random(4, 48, 64, seed=1)), []
    for way in (form, replace(form, cast=None)):
        stack, x = Quantised(stored, way), random(12, 64).requires_grad_()
        out = torch.cat([one.product(rows) for rows, one in zip(x.split(counts), stack.unbind(), strict=True)])
        out.backward(gradient)
        found.append((out, x.grad))
        if way.cast is not None:
            at_once, x.grad = stack.product(x, ends), None
            at_once.backward(gradient)
            assert torch.equal(at_once, out) and torch.equal(x.grad, found[0][1])
    for ours, theirs in zip(*found, strict=True):
        assert 1e-3 < float((ours - theirs).detach().float().norm() / theirs.detach().float().norm()) < 0.04


@pytest.mark.parametrize("kept", [True, False])
def test_the_operator_of_cards_takes_these_layouts(kept: bool) -> None:
    """torch checks shapes, strides and scales without a card."""
    x, weight = (torch.empty(*shape, 64, dtype=torch.bfloat16, device="meta") for shape in ((2, 5), (48,)))
    out = product(weight.requires_grad_(), kept=kept)(x.requires_grad_(), weight)
    out.sum().backward()
    assert out.shape == (2, 5, 48) and x.grad.shape == x.shape and weight.grad.shape == weight.shape
    stack = torch.empty(4, 48, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    ends = torch.empty(4, dtype=torch.int32, device="meta")
    out = Fp8Matrix(stack, kept=kept).stack(stack).product(x.flatten(0, 1), ends)
    out.sum().backward()
    assert out.shape == (10, 48) and stack.grad.shape == stack.shape
    base = QuantisedLinear(64, 48, "fp8")(x.float())
    base.sum().backward()
    assert base.shape == (2, 5, 48) and base.dtype == torch.float32


JOB = {"name": "eight", "data": {"kind": "synthetic", "seq_len": 16}, "mesh": {"pp": 1}, "train": {"precision": "fp8"}}
SIZES = {"num_layers": 4, "hidden_size": 32, "num_heads": 2, "ffn_size": 48, "vocab_size": 31}


@pytest.mark.parametrize("experts", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_5"])
def test_matrices_of_inner_layers_are_in_fp8_and_routers_and_ends_are_not(kind: str, experts: bool) -> None:
    moe = {"num_experts": 4, "expert_ffn_size": 16} if kind in ("qwen3_moe", "deepseek_v3", "gpt_oss") else {}
    train = {"precision": "fp8", "fp8": {"experts": experts}}
    job = parse_job({**JOB, "train": train, "model": {"kind": kind, **SIZES, **moe}})
    stage = build_stage(job.model, range(4), first=True, last=True)
    compute_in_fp8(stage, job, kept=True)
    forms = {name: part for name, part in stage.named_modules() if isinstance(part, Fp8Matrix)}
    found = {name.replace(".fp8", "") for name in forms}
    weights = [(i, one) for i in (1, 2) for one in matrices_in_fp8(job, i) + experts_in_fp8(job, i)]
    assert found == {f"model.layers.{i}.{one.name}".removesuffix(".weight") for i, one in weights}
    assert len(list(kept_matrices(stage))) == len(weights) > 0
    kept, sizes = sum(one.rows.numel() for one in forms.values()), sizes_in_fp8(job, range(4))
    assert kept == sizes.dense + sizes.experts and any(".experts." in name for name in found) == bool(experts and moe)
    elsewhere = ("lm_head", "embed", "layers.0", "layers.3", "in_proj_a", "in_proj_b", "router")
    assert not any(word in name for name in found for word in elsewhere)
    assert not any(name.endswith(".gate") for name in found)


def test_an_own_model_needs_linear_layers_of_fitting_widths() -> None:
    job = parse_job({**JOB, "model": {"kind": "own_models:tiny", **SIZES}})

    def stage(width: int) -> nn.Module:
        layers = nn.ModuleDict({str(i): nn.Sequential(Projection(32, width)) for i in range(4)})
        return nn.ModuleDict({"model": nn.ModuleDict({"layers": layers})})

    fits = stage(48)
    compute_in_fp8(fits, job, kept=False)
    assert sum(isinstance(part, Fp8Matrix) for part in fits.modules()) == 2
    with pytest.raises(RayppError, match=r"layer 1, a Sequential, has no nn.Linear"):
        compute_in_fp8(stage(40), job, kept=False)
