"""A covering array: each valid pair of a family, a schedule, a mesh axis, a precision, an optimizer
and an extent of recomputation is trained by at least one job (a cell).

The reference of a cell without another axis than pp, and of an fp32 cell, is one process. In bf16
an axis that adds the same numbers in another order rounds differently, so the reference has that
axis and one stage: a cut into stages, a schedule, offload and recomputation may change no bit.
"""

from typing import Any, NamedTuple

import pytest
from allpairspy import AllPairs
from comparison import assert_identical, assert_same_sums
from late_copies import LateCopies
from small_models import small_options
from training import document, numbers, train_steps, trained

from raypp.job.known_families import FAMILIES
from raypp.planning import offload
from raypp.planning.schedules.catalogue import SCHEDULES, schedule_named
from raypp.rank.optimizers import optimizer_offload
from raypp.stages.pipeline import activation_offload

STEPS = 2
MICROBATCHES = 4
"""Of each replica: the fewest that every schedule takes."""
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"sliding_window": 9, "tie_embeddings": False, "score_soft_cap": 1.0},
    "stablelm": {},
    "qwen3_moe": {"num_experts": 4, "aux_loss_weight": 0.02, "z_loss_weight": 0.01},
    "qwen3_next": {"num_experts": 4, "aux_loss_weight": 0.02, "linear_key_head_dim": 8, "linear_value_head_dim": 6},
    "deepseek_v3": {"num_experts": 4, "router_bias_rate": 0.01, "q_lora_rank": 24},
    "gpt_oss": {"num_experts": 4, "sliding_window": 9},
}
"""A family for each kind of layer: plain; windows and soft caps; layer norms and
partial rotation; experts; the delta rule and a shared expert; sinks, and experts with biases."""
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

    def bitwise(self) -> bool:
        return self.axis == "pp" or self.precision != "fp32"


def valid(values: list[str]) -> bool:
    """Whether a job may have the features that these first values of a cell name."""
    cell = dict(zip(Cell._fields, values, strict=False))
    return cell.get("axis") != "ep" or "num_experts" in FAMILIES[cell["family"]].options.model_fields


EXTENTS = ["none", "selective", "full", "offload"]
PRECISIONS = ["fp32", "bf16", "bf16_pure", "fp16"]
VALUES = [list(MODELS), SCHEDULES.names(), list(AXES), PRECISIONS, list(OPTIMIZERS), EXTENTS]
CELLS = sorted((Cell(*values) for values in AllPairs(VALUES, filter_func=valid)), key=lambda cell: cell.axis)
"""Those of one mesh follow each other: they share processes."""


def job(cell: Cell, mesh: dict[str, Any], microbatches: int, **schedule: Any) -> dict[str, Any]:
    model = small_options(cell.family, num_layers=4, ffn_size=45, **MODELS[cell.family])
    train = {
        "precision": cell.precision,
        "optimizer": OPTIMIZERS[cell.optimizer],
        "activation_checkpointing": cell.extent,
    }
    found = document(microbatches=microbatches, train=train, **mesh, **schedule)
    return {**found, "model": model.model_dump(mode="json", exclude_none=True)}


def microbatches_of(cell: Cell) -> int:
    return MICROBATCHES * AXES[cell.axis].get("dp_replicate", 1) * AXES[cell.axis].get("fsdp", 1)


def pipelined(cell: Cell) -> dict[str, Any]:
    stages = schedule_named(cell.schedule).nearest_stages(2)
    schedule = {"schedule": cell.schedule, "pipeline": {"stages_per_rank": stages}}
    return job(cell, {"pp": 2, **AXES[cell.axis]}, microbatches_of(cell), **schedule)


def plain(cell: Cell) -> Cell:
    """Returns what cells that may differ in no bit have in common."""
    return cell._replace(schedule="", extent="none", optimizer=cell.optimizer.removesuffix(", offloaded"))


def in_small_blocks(*arguments: Any) -> dict[str, Any]:
    """Trains with copies to host memory in many blocks, each as late as it may be."""
    offload.BLOCK = 2000
    activation_offload.CopyStreams = optimizer_offload.CopyStreams = LateCopies  # type: ignore[misc]
    return train_steps(*arguments)


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
    one = job(plain(cell), AXES[cell.axis] if cell.bitwise() else {}, microbatches_of(cell))
    if cell.bitwise():
        assert_identical(trained(pipelined(cell), STEPS, train=in_small_blocks), trained(one, STEPS))
    else:
        assert_same_sums(numbers(pipelined(cell), STEPS, train=in_small_blocks), numbers(one, STEPS))
