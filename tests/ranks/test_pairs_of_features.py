"""A covering array: each valid pair of a family, a schedule, a mesh axis, a precision, an optimizer
and an extent of recomputation is trained by at least one job (a cell).

The reference of a cell without another axis than pp, and of an fp32 cell, is one process. In bf16
an axis that adds the same numbers in another order rounds differently, so the reference has that
axis and one stage: a cut into stages, a schedule, offload and recomputation may change no bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from allpairspy import AllPairs
from comparison import assert_identical, assert_same_sums
from late_copies import LateCopies
from small_models import small_options
from training import Batch, InBothTypes, train_steps

from raypp.pipeline import activation_offload
from raypp.planning import offload
from raypp.schedules.catalogue import SCHEDULES, schedule_named
from raypp.spec.families import FAMILIES
from raypp.train import optimizer_offload

pytestmark = pytest.mark.ranks

STEPS = 2
MICROBATCHES = 4
"""Of each replica: the fewest that every schedule takes."""
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"sliding_window": 9, "tie_embeddings": False, "score_soft_cap": 1.0},
    "stablelm": {},
    "qwen3_moe": {"num_experts": 4, "aux_loss_weight": 0.02, "z_loss_weight": 0.01},
    "qwen2_moe": {"num_experts": 4, "aux_loss_weight": 0.02},
    "gpt_oss": {"num_experts": 4, "sliding_window": 9},
}
"""A family for each kind of layer: plain; windows and soft caps; layer norms and
partial rotation; experts; a shared expert; sinks, and experts with biases."""
AXES: dict[str, dict[str, Any]] = {
    "pp": {},
    "dp_replicate": {"dp_replicate": 2},
    "fsdp": {"fsdp": 2, "reshard_after_forward": True},
    "ring": {"cp": 2, "cp_style": "ring"},
    "ulysses": {"cp": 2, "cp_style": "ulysses"},
    "ep": {"fsdp": 2, "ep": 2},
}
"""What the ranks of each stage share."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"kind": "adamw", "lr": 3e-3},
    "adamw in 8 bits": {"kind": "adamw", "lr": 3e-3, "state": "8bit"},
    "adamw, offloaded": {"kind": "adamw", "lr": 3e-3, "offload": True},
    "sgd": {"kind": "sgd", "lr": 0.1, "momentum": 0.9},
    "muon": {"kind": "muon", "lr": 3e-3, "momentum": 0.95},
}


class Cell(NamedTuple):
    family: str
    schedule: str
    axis: str
    precision: str
    optimizer: str
    extent: str

    @property
    def replicas(self) -> int:
        return AXES[self.axis].get("dp_replicate", 1) * AXES[self.axis].get("fsdp", 1)

    def bitwise(self) -> bool:
        return self.axis == "pp" or self.precision != "fp32"


def valid(values: list[str]) -> bool:
    """Whether a job may have the features that these first values of a cell name."""
    cell = dict(zip(Cell._fields, values, strict=False))
    if cell.get("axis") == "ep" and "num_experts" not in FAMILIES[cell["family"]].options.model_fields:
        return False
    return cell.get("extent") != "selective" or not SCHEDULES.get(cell["schedule"]).splits_backward


EXTENTS = ["none", "selective", "full", "offload"]
PRECISIONS = ["fp32", "bf16", "bf16_pure"]
VALUES = [list(MODELS), SCHEDULES.names(), list(AXES), PRECISIONS, list(OPTIMIZERS), EXTENTS]
CELLS = sorted((Cell(*values) for values in AllPairs(VALUES, filter_func=valid)), key=lambda cell: cell.axis)
"""Those of one mesh follow each other: they share processes."""


def job(cell: Cell, mesh: dict[str, Any], microbatches: int, pipeline: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns a job whose gradients are clipped."""
    model = small_options(cell.family, num_layers=4, ffn_size=45, **MODELS[cell.family])
    return {
        "name": "pairs",
        "model": model.model_dump(mode="json", exclude_none=True),
        "data": {"kind": "synthetic", "num_documents": 400, "document_len": [3, 50], "seq_len": 64},
        "mesh": mesh,
        "pipeline": {"microbatches": microbatches, "pad_to_multiple_of": 8, **(pipeline or {})},
        "train": {
            "steps": STEPS, "micro_batch_size": 2, "seed": 3, "clip_norm": 0.05, "precision": cell.precision,
            "optimizer": OPTIMIZERS[cell.optimizer], "activation_checkpointing": cell.extent,
            "lr_schedule": {"kind": "cosine", "warmup_steps": 1},
        },
    }  # fmt: skip


def pipelined(cell: Cell) -> dict[str, Any]:
    stages = schedule_named(cell.schedule).nearest_stages(2)
    pipeline = {"schedule": cell.schedule, "stages_per_rank": stages}
    return job(cell, {"pp": 2, **AXES[cell.axis]}, MICROBATCHES, pipeline)


def plain(cell: Cell) -> Cell:
    """Returns what cells that may differ in no bit have in common."""
    return cell._replace(schedule="", extent="none", optimizer=cell.optimizer.removesuffix(", offloaded"))


def in_small_blocks(*arguments: Any) -> dict[str, Any]:
    """Trains with copies to host memory in many blocks, each as late as it may be."""
    offload.BLOCK = 2000
    activation_offload.CopyStreams = optimizer_offload.CopyStreams = LateCopies  # type: ignore[misc]
    return train_steps(*arguments)


EXACT = [cell for cell in CELLS if cell.bitwise()]
SUMS = [cell for cell in CELLS if not cell.bitwise()]


def on(axis: str, cells: list[Cell], batch: type[Batch]) -> Batch:
    """The cells of an axis: the processes of one mesh."""
    jobs = {cell: pipelined(cell) for cell in cells if cell.axis == axis}
    return batch(2 if axis == "pp" else 4, jobs, STEPS, train=in_small_blocks)


FOUND = {axis: on(axis, EXACT, Batch) for axis in AXES}
FOUND_SUMS = {axis: on(axis, SUMS, InBothTypes) for axis in AXES}
REFERENCES = {
    axis: Batch(
        1 if axis == "pp" else 2,
        {plain(cell): job(plain(cell), AXES[axis], MICROBATCHES) for cell in EXACT if cell.axis == axis},
        STEPS,
    )
    for axis in AXES
}
REFERENCE_SUMS = InBothTypes(
    1,
    {(cell.family, cell.optimizer, cell.replicas): job(plain(cell), {}, MICROBATCHES * cell.replicas) for cell in SUMS},
    STEPS,
)


def each_value() -> list[Any]:
    """Returns the cells; `make test` runs few of them, which have each value."""
    missing, quick = {value for values in VALUES for value in values}, set[Cell]()
    while missing:
        # Of equally many new values, those without experts, which compute least.
        best = max(CELLS, key=lambda cell: (len(missing & {*cell}), "num_experts" not in MODELS[cell.family]))
        quick.add(best)
        missing -= {*best}
    slow = (pytest.mark.slow, pytest.mark.gate)
    return [pytest.param(cell, marks=() if cell in quick else slow) for cell in CELLS]


@pytest.mark.parametrize("cell", each_value(), ids=" - ".join)
def test_every_pair_of_features_trains_as_one_stage_or_one_process_does(cell: Cell) -> None:
    if cell.bitwise():
        assert_identical(FOUND[cell.axis][cell], REFERENCES[cell.axis][plain(cell)])
    else:
        reference = REFERENCE_SUMS.numbers((cell.family, cell.optimizer, cell.replicas))
        assert_same_sums(FOUND_SUMS[cell.axis].numbers(cell), reference)
