"""Host time and operators of a block, compiled or not: forward and backward of a microbatch.

Sixteen layers of a tiny Llama in bf16 are trained by raypp's own runtime in one process, on one
thread. Its operators cost a CPU about what launches of kernels cost a GPU's host, so the CPU time
shows what Python and autograd take around them. The kinds take turns, and the least of the rounds
counts. So does the host's time of an update.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from benchmarks.surroundings import begin
from raypp.job.job import OptimizerOptions
from raypp.job.load import parse_job
from raypp.planning.resolve import resolve_pipeline
from raypp.ports import free_port
from raypp.rank.build import build_stages
from raypp.rank.optimizers.adamw import FusedAdamW
from raypp.rank.optimizers.optimizer import begin_update, build_optimizer
from raypp.records import Coordinates
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.parallel.rank_groups import make_groups
from raypp.stages.parallel.shard import local_part
from raypp.torch_private import DispatchMode

LAYERS, MICROBATCHES, TOKENS, VOCABULARY = 16, 4, 32, 320
MODEL = {"num_layers": LAYERS, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 128}
LORA = {"rank": 4, "base": "bf16"}
KINDS: dict[str, tuple[str, bool, str]] = {
    "none": ("none", False, "1f1b"),
    "full": ("full", False, "1f1b"),
    "selective": ("selective", False, "1f1b"),
    "LoRA": ("none", True, "1f1b"),
    "LoRA, full": ("full", True, "1f1b"),
    "zbv": ("none", False, "zbv"),
    "zbv, full": ("full", False, "zbv"),
    "compiled": ("none", False, "1f1b"),
    "LoRA, compiled": ("none", True, "1f1b"),
    "zbv, compiled": ("none", False, "zbv"),
}


class Operators(DispatchMode):
    """Counts operators that are kernels: no views and no allocations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        none = ("detach", "empty", "view", "promote", "prim::")
        self.count += not func.is_view and not any(word in func.name() for word in none)
        return func(*args, **(kwargs or {}))


def job_of(extent: str, adapters: bool, schedule: str, *, compiled: bool) -> dict[str, Any]:
    return {
        "name": "host", "data": {"kind": "synthetic", "seq_len": TOKENS},
        "model": {**MODEL, "vocab_size": VOCABULARY, **({"lora": LORA} if adapters else {})},
        "pipeline": {"microbatches": MICROBATCHES, "schedule": schedule, "stages_per_rank": 1 + (schedule == "zbv")},
        "train": {"activation_checkpointing": extent, "precision": "bf16", "compile": compiled},
    }  # fmt: skip


def step_of(document: dict[str, Any], groups: Any) -> Callable[[], None]:
    """Returns a step of raypp's runtime with random weights and rows, one to a microbatch."""
    job = parse_job(document).for_device("cpu")
    built = build_stages(job, resolve_pipeline(job), groups, torch.device("cpu"), lambda action: None)
    for parameter in (parameter for module in built.modules for parameter in module.parameters()):
        local_part(parameter.data).normal_(std=0.02)
    count, length = job.pipeline.microbatches, job.data.seq_len
    rows = [torch.randint(0, job.model.vocab_size, (1, length)) for _ in range(count)]
    arguments = {"positions_BT": torch.arange(length)[None], "documents": PackedDocuments.of_lengths((length,))}

    def step() -> None:
        built.runtime.run(1, [length] * count, rows, [arguments] * count, rows)
        for module in built.modules:
            module.zero_grad(set_to_none=True)

    return step


def update_ms(groups: Any, parameters: int = 291) -> tuple[float, float]:
    """Returns the CPU time between a step's sums and the end of the scaling of its gradients, and
    until AdamW's kernel has all of them; the least of twenty, of an 8B's number of parameters."""
    mesh, module = groups.mesh["fsdp"], torch.nn.Module()
    for index in range(parameters):
        part = DTensor.from_local(torch.randn(2, 16) if index % 9 < 7 else torch.randn(2), mesh, [Shard(0)])
        module.register_parameter(f"weight{index}", torch.nn.Parameter(part))
    optimizer = build_optimizer([module], OptimizerOptions(kind="adamw"), "bf16")
    assert isinstance(optimizer, FusedAdamW)
    scaled, updated = [], []
    for step in range(1, 22):
        for weight in module.parameters():
            weight.grad = torch.zeros_like(weight)
        gradients = [local_part(weight.grad) for weight in module.parameters()]  # type: ignore[arg-type]
        optimizer.prepare_fused()
        begun = time.thread_time()
        begin_update(optimizer, gradients, 0.5, 1e-4, step)
        scaled.append(time.thread_time() - begun)
        optimizer.step()
        updated.append(time.thread_time() - begun)
    return 1e3 * min(scaled), 1e3 * min(updated)


@contextmanager
def alone() -> Iterator[Any]:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield make_groups(Coordinates(1, 1, 1, 1, 1), "cpu", 1)
    torch.distributed.destroy_process_group()


def main() -> None:
    options = begin(__doc__, rounds=(10, "steps of each kind"))
    each = 1 / (LAYERS * MICROBATCHES)
    with alone() as groups:
        print("update of 291 parameters: scaled after {:.2f} ms, AdamW after {:.2f} ms".format(*update_ms(groups)))
        steps = {name: step_of(job_of(*kind, compiled="compiled" in name), groups) for name, kind in KINDS.items()}
        least = dict.fromkeys(steps, float("inf"))
        for _ in range(options.rounds + 1):
            for name, step in steps.items():
                begun = time.thread_time()
                step()
                least[name] = min(least[name], time.thread_time() - begun)
        for name, step in steps.items():
            with nullcontext(Operators()) if "compiled" in name else Operators() as operators:
                step()
            counted = f"{operators.count * each:6.0f} operators" if operators.count else ""
            print(f"{name:<14} {1e3 * least[name] * each:6.2f} ms {counted}", flush=True)


if __name__ == "__main__":
    main()
