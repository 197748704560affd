"""The changes that save device memory, each declared once.

`planning.fit_search` combines them on every mesh and tries which combinations fit. A new one is an
entry in `LEVERS`; nothing else lists them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from raypp.errors import JobError
from raypp.job.availability import value_at
from raypp.job.job import Job
from raypp.job.known_families import family_of
from raypp.job.lora import BASES, width_problems
from raypp.job.models import with_experts
from raypp.planning.geometry import Mesh, divisors, shapes
from raypp.planning.memory import peak_memory
from raypp.planning.resolve import schedule_of
from raypp.records import Coordinates

Changes = Mapping[str, Any]
"""Keys of the job file and their new values."""

MOST_ACTIONS = 40_000
"""Programs with more actions (ranks · stages · microbatches · 2) are not tried: each takes long."""
_MOST_SHAPES = 50_000
"""More than a search of several minutes can try."""
_MOST_HALVINGS = 4
_SHORTEST = 512
"""Shorter sequences than this are not proposed."""


@dataclass(frozen=True)
class Lever:
    """One kind of change that saves device memory.

    Attributes:
        name: What it is, for people.
        levels: Returns the changes for a job, the one that saves least first; empty where the lever
            does not apply or is already used.
        costs: What it costs besides time, for people; empty if the training stays the same.
        apart: True if something else is trained then. Such changes are never combined with others
            of this kind, and are listed separately.
    """

    name: str
    levels: Callable[[Job], Sequence[Changes]]
    costs: str = ""
    apart: bool = False


def in_host_memory(changes: Changes) -> bool:
    """Whether changes move bytes to host memory, which saves nothing on a CPU."""
    return changes.get("train.activation_checkpointing") == "offload" or "train.optimizer.offload" in changes


def _after(job: Job, key: str, *values: str | bool) -> Sequence[Changes]:
    """Returns the changes to the values that follow the current one."""
    now = value_at(job, key)
    return [{key: value} for value in values[values.index(now) + 1 :]] if now in values else []


def _recomputation(job: Job) -> Sequence[Changes]:
    """Leaves offload out where what passes through the device is more than what leaves it."""
    levels = _after(job, "train.activation_checkpointing", "none", "selective", "full", "offload")
    return levels[:-1] if levels and not _offload_saves(job) else levels


def _offload_saves(job: Job) -> bool:
    full, offload = (
        job.model_copy(update={"train": job.train.model_copy(update={"activation_checkpointing": extent})})
        for extent in ("full", "offload")
    )
    try:
        return peak_memory(offload, "cuda") < peak_memory(full, "cuda")
    except JobError:
        return False


def _to_bf16(job: Job, *precisions: str) -> Sequence[Changes]:
    """Returns changes of precision, with frozen weights of fp32 in bf16, too."""
    fp32 = job.model.lora is not None and job.model.lora.base == "fp32"
    base = {"model.lora.base": "bf16"} if fp32 else {}
    return [{**changes, **base} for changes in _after(job, "train.precision", *precisions)]


def _shorter(job: Job) -> Sequence[Changes]:
    """Halves the sequences; as many more microbatches keep the tokens of a step."""
    changes = []
    for factor in (2**power for power in range(1, _MOST_HALVINGS + 1)):
        if job.data.seq_len % factor or job.data.seq_len // factor < _SHORTEST:
            break
        more = job.pipeline.microbatches * factor
        changes.append({"data.seq_len": job.data.seq_len // factor, "pipeline.microbatches": more})
    return changes


def _adapters(job: Job) -> Sequence[Changes]:
    if job.model.lora is not None or family_of(job.model) is None:
        return []
    return [{"model.lora.rank": 16, "model.lora.base": job.train.dtypes.compute.name}]


def _quantised(job: Job) -> Sequence[Changes]:
    model, lora = job.model, job.model.lora
    if lora is None or lora.base in BASES:
        return []
    bases = {base: model.model_copy(update={"lora": lora.model_copy(update={"base": base})}) for base in BASES}
    return [{"model.lora.base": base} for base, other in bases.items() if not list(width_problems(other))]


def _schedule(job: Job) -> Sequence[Changes]:
    late = schedule_of(job) == "gpipe" and job.pipeline.microbatches >= job.mesh.pp > 1
    return [{"pipeline.schedule": "1f1b"}] if late else []


LEVERS = (
    Lever("lookahead", lambda job: [{"pipeline.lookahead": 0}] if job.pipeline.lookahead not in ("auto", 0) else []),
    Lever("schedule", _schedule),
    Lever("recomputation", _recomputation),
    # Applies to one shard, too: in bf16 it frees the weights in the compute dtype.
    Lever("sharded weights", lambda job: _after(job, "mesh.reshard_after_forward", False, True)),
    Lever("precision", lambda job: _to_bf16(job, "fp32", "bf16"), "computes in bf16"),
    Lever(
        "bf16 weights",
        lambda job: _to_bf16(job, job.train.precision, "bf16_pure") if job.train.precision in ("fp32", "bf16") else [],
        "keeps the weights in bf16 only and rounds their updates stochastically",
    ),
    Lever(
        "8-bit state",
        lambda job: _after(job, "train.optimizer.state", "fp32", "8bit"),
        "quantises the optimizer's state",
    ),
    Lever("state in host memory", lambda job: _after(job, "train.optimizer.offload", False, True)),
    Lever("quantised base", _quantised, "quantises the frozen weights"),
    Lever("adapters", _adapters, "trains adapters only (model.lora), with a learning rate of their own", apart=True),
    Lever("shorter sequences", _shorter, "cuts longer documents into pieces that do not see each other", apart=True),
)


def meshes(job: Job, devices: int, late: Callable[[], bool] = lambda: False) -> list[Changes]:
    """Returns the meshes and microbatches of the same batch on this many devices. Those that change
    few keys come first. Leaves out programs with more than `MOST_ACTIONS`, and what follows the
    first `_MOST_SHAPES`, or comes once the time is over (`late`)."""
    return sorted(islice(_meshes(job, devices, late), _MOST_SHAPES), key=len)


def _meshes(job: Job, devices: int, late: Callable[[], bool]) -> Iterator[Changes]:
    train, mesh = job.train, job.mesh
    batch = job.rows_per_step
    now = _keys(Mesh.of(mesh).sizes, mesh.ep)
    now |= {"pipeline.microbatches": job.pipeline.microbatches, "train.micro_batch_size": train.micro_batch_size}
    for one in shapes(devices, rows=batch, tp=[mesh.tp]):
        each = batch // (one.replicas)
        own_cut = job.pipeline.layers_per_stage is not None and one.pp != mesh.pp
        for rows in divisors(each):
            if late():
                return
            if rows > train.micro_batch_size:
                break
            if 2 * one.pp * job.pipeline.stages_per_rank * (each // rows) > MOST_ACTIONS:
                continue
            sizes = {"pipeline.microbatches": each // rows, "train.micro_batch_size": rows}
            for ep in _expert_ranks(job, one.shards):
                shape = _keys(one, ep) | sizes
                changed: dict[str, Any] = {key: value for key, value in shape.items() if value != now[key]}
                yield changed | ({"pipeline.layers_per_stage": None} if own_cut else {})


def _keys(sizes: Coordinates, ep: int) -> dict[str, int]:
    return {f"mesh.{axis}": size for axis, size in {**sizes.as_dict(), "ep": ep}.items()}


def _expert_ranks(job: Job, shard: int) -> list[int]:
    if (model := with_experts(job.model)) is None:
        return [1]
    return [ep for ep in divisors(shard) if model.num_experts % ep == 0]
