"""Kernels and bytes of elementwise work in a step, one by one and compiled for CUDA. Needs no GPU.

Llama-3.1-8B, 4,096 tokens, bf16, on tensors without memory. *One by one* are the operators that
pass over memory, RMSNorm as one, as on CUDA. *Compiled* are the kernels that torch.compile plans
for an H100, by torch's own scheduler. Matrix products and attention are neither. GB are read and
written, each tensor once a kernel. For a block of 128 experts all operators count, products too:
for a loop over them, for one product of all, and with kernels for the ways of rows.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.block_host import Operators
from benchmarks.surroundings import begin
from benchmarks.torch_private import kernels_on_cuda
from raypp.job.decoder_layer import Layer
from raypp.job.load import parse_job
from raypp.planning.loss_memory import chunk_size
from raypp.stages.models import experts as experts_module
from raypp.stages.models.attention import AttentionKernel
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.layers import RMSNorm
from raypp.stages.models.loss import losses_and_errors
from raypp.stages.models.moe import MixtureOfExperts
from raypp.stages.models.rotary import rotated
from raypp.stages.models.stage import build_stage
from raypp.torch_private import DispatchMode, fake_tensors

SIZES = {"hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "ffn_size": 14336, "vocab_size": 128256}
TOKENS, HEAD, VOCABULARY = 4096, 128, SIZES["vocab_size"]
NO_PASS = ("empty", "detach", "ones_like", "unsafe_view", "zeros")


class Passes(DispatchMode):
    """Counts operators that pass over memory, their bytes, and the matrix products beside them."""

    passes = products = bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, name = func(*args, **(kwargs or {})), func.name()
        if name.startswith("aten::mm"):
            self.products += 1
        elif name.startswith("aten::") and not func.is_view and not name[6:].lstrip("_").startswith(NO_PASS):
            self.passes += 1
            given = [one for some in (*args, found) for one in (some if isinstance(some, list | tuple) else [some])]
            self.bytes += sum(one.nbytes for one in {id(one): one for one in given if isinstance(one, Tensor)}.values())
        return found


class Norm(torch.autograd.Function):
    """Allocates what CUDA's RMSNorm does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def like(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(one) for one in tensors[:3]]  # queries, keys and values


operator = torch.library.custom_op("counted::attention", like, mutates_args=())
operator.register_fake(like)
operator.register_autograd(
    lambda ctx, gradients: operator([*ctx.saved_tensors, gradients[0]]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[0]),
)


def count(name: str, function: Any, inputs: list[Tensor], fake: Any) -> None:
    """Prints a row of the table: forward and backward of a function, both ways."""
    compiled, passes = kernels_on_cuda(function, inputs, fake), Passes()
    norm, RMSNorm.forward = RMSNorm.forward, lambda self, x: Norm.apply(x, self.weight)  # type: ignore[method-assign]
    with passes:
        outputs = found if isinstance(found := function(*inputs), tuple) else (found,)
        if wanted := [one for one in inputs if one.requires_grad]:
            torch.autograd.grad(outputs, wanted, [torch.ones_like(one) for one in outputs])
    RMSNorm.forward = norm  # type: ignore[method-assign]
    kernels = [size for part in compiled for size in part]
    row = (passes.passes, passes.bytes / 1e9, len(kernels), sum(kernels) / 1e9, passes.products)
    print(name.ljust(32) + "{:>9} {:>7.2f} {:>9} {:>7.2f} {:>9}".format(*row), flush=True)


def tensor(*shape: int, trained: bool = True) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, requires_grad=trained)


def table() -> list[Tensor]:
    return [tensor(TOKENS, 1, HEAD, trained=False) for _ in range(2)]


def block(lora: dict[str, Any] | None) -> tuple[Any, list[Tensor]]:
    """Returns a decoder layer as a function, and its inputs: activations, rotary table, weights."""
    options = parse_job({"name": "a", "model": {**SIZES, "lora": lora}, "data": {"kind": "synthetic"}}).model
    layer = build_stage(options, range(1), first=False, last=False).get_submodule("model.layers.0")
    kernel = AttentionKernel("counted", lambda q, k, v, *_: operator([q, k, v])[0], None)
    documents = PackedDocuments((TOKENS,), torch.empty(2), torch.empty(TOKENS), kernel)
    weights = {name: tensor(*one.shape, trained=one.requires_grad) for name, one in layer.named_parameters()}

    def forward(x: Tensor, cos: Tensor, sin: Tensor, *given: Tensor) -> Any:
        return torch.func.functional_call(layer, dict(zip(weights, given, strict=True)), (x, (cos, sin), documents))

    return forward, [tensor(1, TOKENS, SIZES["hidden_size"]), *table(), *weights.values()]


def experts(way: str) -> None:
    """Prints the kernels of a block of experts, forward and backward."""
    model = {"kind": "qwen3_moe", "num_layers": 1, "hidden_size": 64, "num_experts": 128, "expert_ffn_size": 48}
    options = parse_job({"name": "a", "model": {**model, "experts_per_token": 8}, "data": {"kind": "synthetic"}}).model
    torch.set_default_dtype(torch.bfloat16)
    block, x = MixtureOfExperts(options, Layer(mlp="experts")), tensor(2, 512, 64)  # type: ignore[arg-type]
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for one in (x, *block.parameters()):
            one.normal_()  # so every expert gets rows
    kept = experts_module.can_group, experts_module.can_fuse
    experts_module.can_group = lambda rows_NC, stack: way != "a loop"
    experts_module.can_fuse = lambda rows: "ways" in way
    parts = Operators(), Operators()
    with parts[0]:
        out = block(x, torch.ones(2, 512, dtype=torch.bool))
    gradient = torch.ones_like(out)
    with parts[1]:
        out.backward(gradient)
    experts_module.can_group, experts_module.can_fuse = kept
    print(f"128 experts, {way}: {parts[0].count} kernels forward, {parts[1].count} backward", flush=True)


def main() -> None:
    begin(__doc__)
    print(f"\n{'forward and backward':32}{'passes':>9} {'GB':>7} {'kernels':>9} {'GB':>7} {'products':>9}")
    with fake_tensors() as fake:
        count("SwiGLU", lambda gate, up: F.silu(gate) * up, [tensor(TOKENS, SIZES["ffn_size"]) for _ in "gu"], fake)
        turned = [tensor(TOKENS, SIZES[heads], HEAD) for heads in ("num_heads", "num_kv_heads")]
        count("RoPE", lambda q, k, *t: (rotated(q, t), rotated(k, t)), [*turned, *table()], fake)
        count("layer", *block(None), fake)
        count("layer, LoRA of all matrices", *block({"rank": 16, "alpha": 32, "base": "bf16"}), fake)
        rows = chunk_size(TOKENS, VOCABULARY, "cuda")
        logits, labels = tensor(rows, VOCABULARY, trained=False), torch.empty(rows, dtype=torch.int64)
        for way in ("one product", "one product, kernels for the ways"):
            experts(way)
        count(f"loss, a chunk of {rows}", partial(losses_and_errors, cap=None), [logits, labels], fake)
    experts("a loop")


if __name__ == "__main__":
    main()
