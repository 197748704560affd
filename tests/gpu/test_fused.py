"""Tests that the kernels of Triton give the bits of their references in torch.

On a GPU; and without one by Triton's interpreter and compiler, where Triton is installed: it comes
with torch for CUDA, and with `make test-torch211`.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raypp.rank.optimizers.adamw import AdamWByRows
from raypp.rank.optimizers.bf16_weights import Bf16Weights
from raypp.stages.models import experts, fused
from raypp.stages.models.experts import grouped
from raypp.stages.models.grouped_products import _product
from raypp.stages.models.quantised_rows import dequantise_rows, quantise_rows

DTYPES = torch.float32, torch.bfloat16
# Rows of each expert, and the widths of a matrix: none a multiple of a tile.
GROUPS = (([3, 0, 129, 40], 40, 72), ([0, 0, 0, 172], 64, 136), ([1, 70, 1, 0, 0], 16, 8))
# Tokens, their width, and experts of each: widths beyond a tile and below, powers of two and not.
WAYS = ((5, 2100, 2), (40, 72, 6), (3, 600, 8), (1, 16, 1))


def updated(device: str, quantised: bool, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((5,), (3, 7), (4, 256), (6, 600), (2, 3, 300))
    parameters = [nn.Parameter(torch.randn(shape, device=device).to(dtype)) for shape in shapes]
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


def dequantised(device: str, base: Any, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((3, 64), (5, 4096 + 64), (2, 3, 192))
    stored = [quantise_rows(torch.randn(shape, device=device), base) for shape in shapes]
    return [dequantise_rows(*one) for one in zip(stored, [base] * 3, [s[-1] for s in shapes], [dtype] * 3, strict=True)]


def assert_same_bits(compute: Callable[..., list[Tensor]], *arguments: Any, kernels: Any) -> None:
    kept, found = fused.kernels, []
    try:
        for fused.kernels in (lambda device: kernels, lambda device: None):  # type: ignore[assignment]
            found.append(compute(*arguments))
    finally:
        fused.kernels = kept
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other), arguments


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_on_a_gpu_give_the_bits_of_torch(dtype: torch.dtype) -> None:
    device = torch.device("cuda", 0)
    assert fused.reason_against(device) is None
    for way in (False, True):
        assert_same_bits(updated, "cuda", way, dtype, kernels=fused.kernels(device))
    for base in ("int8", "nf4"):
        assert_same_bits(dequantised, "cuda", base, dtype, kernels=fused.kernels(device))


@pytest.mark.gpu
def test_experts_without_rows_have_zero_gradients_in_memory_full_of_nan() -> None:
    counts = torch.tensor([100, 0, 300, 0, 624, 0], device="cuda")
    rows = torch.randn(1024, 256, device="cuda", dtype=torch.bfloat16)
    shapes = ((6, 512, 256), (6, 512, 256), (6, 256, 512))
    stacks = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    left = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(16)]
    del left  # the allocator hands these blocks out again
    out = grouped(rows, counts, *stacks)
    out.backward(torch.ones_like(out))
    for stack in stacks:
        assert stack.grad is not None
        assert bool(stack.grad.isfinite().all())
        assert not bool(stack.grad[counts == 0].any())


@pytest.mark.parametrize(
    ("function", "environment"), [("interpreted", {"TRITON_INTERPRET": "1"}), ("compiled", {})], ids=["bits", "cards"]
)
def test_the_kernels_without_a_gpu(tmp_path: Path, function: str, environment: dict[str, str]) -> None:
    pytest.importorskip("triton")
    # In a process of its own: Triton reads its settings when it is imported.
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path), **environment}
    subprocess.run([sys.executable, "-c", f"import test_fused; test_fused.{function}()"], check=True, env=environment)


def interpreted() -> None:
    from raypp.stages.models import triton_kernels

    # MKL's root of fp32 is not correctly rounded; CUDA's and the kernel's are.
    Tensor.sqrt = lambda values: values.double().pow(0.5).float()  # type: ignore[method-assign]
    Tensor.sqrt_ = lambda values: values.copy_(values.double().pow(0.5))  # type: ignore[method-assign]
    for dtype in DTYPES:
        for quantised in (False, True):
            assert_same_bits(updated, "cpu", quantised, dtype, kernels=triton_kernels)
    for counts, width, columns in GROUPS:
        check_groups(counts, width, columns)
    for tokens, width, chosen in WAYS:
        check_ways(tokens, width, chosen)
    for base in ("int8", "nf4"):  # not in bf16: the interpreter cuts bits off, where a card rounds
        assert_same_bits(dequantised, "cpu", base, torch.float32, kernels=triton_kernels)


def check_groups(counts: list[int], width: int, columns: int) -> None:
    """Compares products of rows with their experts' matrices, and their gradients, with a loop."""
    torch.manual_seed(0)
    rows = torch.randn(sum(counts), width).requires_grad_()
    for stack in (torch.randn(len(counts), columns, width), torch.randn(len(counts), width, columns).mT):
        leaves, gradient = (rows, stack.requires_grad_()), torch.randn(columns, sum(counts)).t()
        found = []
        for way in ("kernel", "loop"):
            if way == "kernel":
                out = _product(*leaves, torch.tensor(counts).cumsum(0).to(torch.int32))
            else:
                pairs = zip(rows.split(counts), stack.unbind(), strict=True)
                out = torch.cat([part @ matrix.t() for part, matrix in pairs])
            found.append([out, *torch.autograd.grad(out, leaves, gradient)])
        for one, other in zip(*found, strict=True):
            assert one.shape == other.shape and (one - other).norm() <= 1e-6 * other.norm()


def check_ways(tokens: int, width: int, chosen: int) -> None:
    """Compares rows' way to their experts and back, and its gradients, with torch's operators."""
    torch.manual_seed(0)
    order = torch.randperm(tokens * chosen)
    back, factors = experts.inverse(order), torch.randn(tokens * chosen, width)
    leaves = torch.randn(tokens, width).requires_grad_(), torch.randn(tokens, chosen).requires_grad_()
    kept, found = experts.can_fuse, []
    try:
        for fuse in (True, False):
            experts.can_fuse = lambda rows, fuse=fuse: fuse  # type: ignore[misc]
            rows = experts.repeated(leaves[0], chosen, order, back)
            out = experts.combined(rows * factors, leaves[1], order, back)
            found.append([rows, out, *torch.autograd.grad(out, leaves, out.detach().t().contiguous().t())])
    finally:
        experts.can_fuse = kept
    assert torch.equal(found[0][0], found[1][0])
    for one, other in zip(*found, strict=True):
        assert one.shape == other.shape and (one - other).norm() <= 1e-6 * other.norm()


def compiled() -> None:
    """Compiles every kernel for cards of four kinds; no product may be fused with a sum. But those
    of experts, where a card must use its matrix units for matrices, within its shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from raypp.stages.models import triton_kernels as kernels

    rows = {"source": "*u8", "out": "*bf16", "table": "*fp32", "width": "i32", "stride": "i32"}
    tile: dict[str, Any] = {"TILE": 4096}
    cases = [(kernel, rows, tile) for kernel in (kernels._from_int8, kernels._from_nf4)]
    for small in (False, True):
        types = dict.fromkeys(("average", "square"), "*u8" if small else "*fp32")
        types |= {f"{name}_{kind}": "*fp32" for name in types for kind in ("scale", "numbers", "borders")}
        types |= {"weight": "*bf16", "gradient": "*bf16", "rows": "*i64", "key": "i64"}
        types |= dict.fromkeys(("average_lowest", "square_lowest"), "*u8")
        types |= dict.fromkeys(("blocks", "per_row", "columns", "size", "words", "start"), "i32")
        cases.append((kernels._adamw, types, {"SMALL": small, "ROUND": True, "TOGETHER": 16, "SIDE": 256}))
    groups = [
        (kernels._by_expert, {"SIDE": 128, "ROWS": 64, "COLUMNS": 128, "DEPTH": 32}, 4),
        (kernels._of_matrices, {"SIDE": 128, "DEPTH": 32}, 8),
    ]
    ways = kernels._spread, kernels._summed
    for kernel in ways:
        types = dict.fromkeys(("source", "rows", "weights", "out", "products"), "*bf16") | {
            "places": "*i64",
            "width": "i32",
        }
        cases += [(kernel, types, {"K": 6, "SIDE": 8, "TILE": 512, "WEIGHTED": way}) for way in (False, True)]
    for capability in (80, 89, 90, 120):
        for kernel, constants, warps in groups:
            types = dict.fromkeys(("rows", "stack", "gradient", "out"), "*bf16") | {"ends": "*i32"}
            types |= dict.fromkeys(constants, "constexpr")
            signature = {name: types.get(name, "i32") for name in kernel.arg_names}
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
            assert "mma" in built.asm["ptx"], (kernel, capability)
            assert built.metadata.shared <= 99 * 1024, (kernel, capability)
        for kernel, types, constants in cases:
            types = types | dict.fromkeys(constants, "constexpr")
            signature = {name: types.get(name, "fp32") for name in kernel.arg_names}
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            options = {"num_warps": 8, **kernels._EXACT}
            built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            assert kernel in ways or "fma." not in built.asm["ptx"], (kernel, capability)
