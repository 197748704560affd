"""What a layer costs the ranks of a tp group, beside torch's own tensor parallelism.

Two ranks on a core each train a Llama with `mesh.tp: 2`; then plain layers of the same sizes, which
`parallelize_module` divides as torchtitan does, with `SequenceParallel` norms. Forward and backward
of a microbatch of four layers and of twelve: the difference, by eight, is a layer. Both take turns,
and the median of the rounds counts. The first size shows the host's work, the second that of the
products.
"""

import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.multiprocessing.spawn import start_processes

from benchmarks.block_host import step_of
from benchmarks.surroundings import begin
from raypp.ports import free_port
from raypp.records import Coordinates
from raypp.stages.parallel.rank_groups import make_groups

TP, FEW, MORE, VOCABULARY = 2, 4, 12, 320
SIZES = {"small": (64, 4, 2, 128, 32), "large": (512, 8, 4, 1408, 512)}
"""Width, heads, key heads, inner width, tokens of a row."""
Size = tuple[int, int, int, int, int]


class Attention(nn.Module):
    """Attention with a rotary encoding, of the heads that the products give."""

    def __init__(self, width: int, heads: int, keys: int, tokens: int) -> None:
        super().__init__()
        self.head = width // heads
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, keys * self.head, bias=False) for _ in range(2))
        angles = torch.outer(torch.arange(tokens), 1e4 ** -(torch.arange(0, self.head, 2) / self.head)).repeat(1, 2)
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for one in (self.q, self.k, self.v))
        q, k = (
            one * self.cos + torch.cat((-one[..., self.head // 2 :], one[..., : self.head // 2]), -1) * self.sin
            for one in (q, k)
        )
        out: Tensor = self.o(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        )
        return out


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, keys: int, inner: int, tokens: int) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.mlp = Attention(width, heads, keys, tokens), FeedForward(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        out: Tensor = x + self.mlp(self.norm_2(x))
        return out


def of_torch(size: Size, layers: int, mesh: Any) -> Callable[[], None]:
    """Returns a step of plain layers that torch divides."""
    model = nn.Sequential(*(Layer(*size) for _ in range(layers)))
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    rows, columns = {name: ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}, ("o", "down")
    for layer in model:
        plan: dict[str, Any] = {"norm": SequenceParallel(), "norm_2": SequenceParallel()}
        for block in ("attention", "mlp"):
            plan[block] = whole
            for name, _ in layer.get_submodule(block).named_children():
                plan[f"{block}.{name}"] = RowwiseParallel(output_layouts=Shard(1)) if name in columns else rows[name]
        parallelize_module(layer, mesh, plan)
    x = torch.randn(1, size[-1] // TP, size[0], requires_grad=True)

    def step() -> None:
        out = model(x)
        (out.to_local() if hasattr(out, "to_local") else out).sum().backward()
        model.zero_grad(set_to_none=True)

    return step


def of_raypp(size: Size, layers: int, groups: Any) -> Callable[[], None]:
    """Returns a step of raypp's runtime."""
    names = ("hidden_size", "num_heads", "num_kv_heads", "ffn_size")
    model = {**dict(zip(names, size[:-1], strict=True)), "num_layers": layers, "vocab_size": VOCABULARY}
    document = {
        "name": "tp", "data": {"kind": "synthetic", "seq_len": size[-1]}, "model": model, "mesh": {"tp": TP},
        "pipeline": {"microbatches": 1}, "train": {"precision": "fp32", "compile": False},
    }  # fmt: skip
    return step_of(document, groups)


def seconds(step: Callable[[], None]) -> tuple[float, float]:
    """Returns wall and CPU seconds of a step."""
    torch.distributed.barrier()
    begun, cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - begun, time.process_time() - cpu


def kept_and_sent(step: Callable[[], None]) -> tuple[float, dict[str, int]]:
    """Returns the MB that autograd keeps of activations, and how often collectives were called."""
    storages: dict[int, Any] = {}
    at_most = [0]

    def pack(tensor: Tensor) -> Tensor:
        storages[id(tensor.untyped_storage())] = tensor
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        if not at_most[0]:
            at_most[0] = sum(one.untyped_storage().nbytes() for one in storages.values() if not one.is_leaf)
        return tensor

    with CommDebugMode() as mode, saved_tensors_hooks(pack, unpack):
        step()
    return at_most[0] / 1e6, {str(name): count for name, count in mode.get_comm_counts().items()}


def rank(index: int, port: int, rounds: int) -> None:
    """Measures on one rank; the first prints."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[index]})
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=index, world_size=TP)
    groups, mesh = make_groups(Coordinates(1, 1, 1, 1, TP), "cpu"), init_device_mesh("cpu", (TP,))
    for name, size in SIZES.items():
        makers = {"raypp": lambda layers, size=size: of_raypp(size, layers, groups)}
        makers["torch"] = lambda layers, size=size: of_torch(size, layers, mesh)
        steps = {(kind, layers): make(layers) for kind, make in makers.items() for layers in (FEW, MORE)}
        times: dict[Any, list[tuple[float, float]]] = {key: [] for key in steps}
        for _ in range(rounds + 2):
            for key, step in steps.items():
                times[key].append(seconds(step))
        found = {key: kept_and_sent(step) for key, step in steps.items()}
        ratios = []
        for kind in makers if index == 0 else ():
            wall, cpu = (
                [more[at] - few[at] for more, few in zip(times[kind, MORE][2:], times[kind, FEW][2:], strict=True)]
                for at in (0, 1)
            )
            (few_mb, few_sent), (more_mb, more_sent) = found[kind, FEW], found[kind, MORE]
            sent = {name.split(".")[-1]: (more_sent[name] - few_sent[name]) / (MORE - FEW) for name in more_sent}
            each = 1e3 / (MORE - FEW)
            ratios.append((median(wall), median(cpu), more_mb - few_mb))
            print(
                f"{name:6} {kind:6} {median(wall) * each:7.2f} ms, CPU {median(cpu) * each:7.2f} ms; "
                f"kept {(more_mb - few_mb) / (MORE - FEW):6.3f} MB; {sent}",
                flush=True,
            )
        if ratios:
            time_, cpu_, kept = (one / other for one, other in zip(*ratios, strict=True))
            print(f"{name:6} raypp ÷ torch: time {time_:.2f}, CPU {cpu_:.2f}, kept {kept:.2f}")
    torch.distributed.destroy_process_group()


def main() -> None:
    options = begin(__doc__, rounds=(20, "steps of each kind"))
    start_processes(rank, (free_port(), options.rounds), nprocs=TP)


if __name__ == "__main__":
    main()
