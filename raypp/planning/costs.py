"""What the parts of a model cost on one device: measured there, or computed from FLOPs and a rate."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypp.errors import JobError, in_words
from raypp.planning.flops import layer_flops, recompute_factor
from raypp.planning.sizes import sizes_of
from raypp.planning.weights import end_weights
from raypp.spec.job import Job
from raypp.spec.load import job_document

GIB = 1024**3


@dataclass(frozen=True)
class Device:
    """A kind of device as its maker describes it.

    Attributes:
        name: As given to `--device`.
        tflops: Dense matrix products per second, in 10^12, by precision, by the maker's sheet.
        memory: Bytes.
        share: Part of `tflops` that training sustains; an assumption.
    """

    name: str
    tflops: Mapping[str, float]
    memory: int
    share: float


# Sheets of the makers; fp32 is what a GPU's fp32 pipelines do (TF32 is off by default).
DEVICES = {
    device.name: device
    for device in (
        Device("cpu", {"fp32": 0.08, "bf16": 0.04}, 0, 0.5),
        Device("cuda", {"fp32": 40.0, "bf16": 400.0}, 0, 0.5),
        Device("rtx3090", {"fp32": 35.6, "bf16": 71.0}, 24 * GIB, 0.45),
        Device("rtx4090", {"fp32": 82.6, "bf16": 165.0}, 24 * GIB, 0.45),
        Device("rtx5090", {"fp32": 104.8, "bf16": 209.5}, 32 * GIB, 0.45),
        Device("l40s", {"fp32": 91.6, "bf16": 362.0}, 48 * GIB, 0.4),
        Device("a100", {"fp32": 19.5, "bf16": 312.0}, 80 * GIB, 0.5),
        Device("h100", {"fp32": 67.0, "bf16": 989.0}, 80 * GIB, 0.4),
        Device("h200", {"fp32": 67.0, "bf16": 989.0}, 141 * GIB, 0.4),
    )
}


@dataclass(frozen=True)
class Part:
    """Seconds of one microbatch in one part of the model."""

    forward: float
    backward: float


NUMBERS = ("optimizer_s", "step_s", "copy_s", "gather_s", "sum_s", "input_share", "weight_share")
"""The costs that are plain numbers; the others are parts."""
_ADDED = {
    "input_share": "; the halves of a backward, which it lacks, assumed to make a whole",
    "gather_s": "; FSDP's copies on CPUs, which it lacks, left out",
}
"""What to say of a file that was measured before these were."""


@dataclass(frozen=True)
class Costs:
    """What one device needs for one microbatch of a job (whole rows, no cp), and for a step besides.

    Attributes:
        layer: One decoder layer.
        first: The embedding.
        last: The last norm, the projection and the loss.
        optimizer_s: Of one parameter: gradient norm, scaling, update.
        step_s: Of a step, whatever its size: reading, agreeing.
        input_share: Of a layer's backward, what its half for the input takes where a schedule does the halves apart.
        weight_share: What the half for the weights takes; together they may take longer than the whole.
        copy_s: Of one byte of a message, taken from the compute of either side; on CPUs only, where gloo does it.
        gather_s: Of one weight that FSDP gathers, its copies; on CPUs only, without those of messages.
        sum_s: Of one weight whose gradient FSDP sums, copies and additions; likewise.
        measured: True when these are times of a clock.
        source: Where they come from, for people.
    """

    layer: Part
    first: Part
    last: Part
    optimizer_s: float = 0.0
    step_s: float = 0.0
    copy_s: float = 0.0
    gather_s: float = 0.0
    sum_s: float = 0.0
    input_share: float = 0.5
    weight_share: float = 0.5
    measured: bool = False
    source: str = ""


def computed_costs(job: Job, device: Device) -> Costs:
    """Costs from the job's FLOPs and the device's sheet."""
    rate = device.tflops[job.train.precision] * device.share * 1e12
    forward = layer_flops(job.model, sizes_of(job.model), job.data.seq_len)
    layer = forward * job.train.micro_batch_size * job.data.seq_len / rate
    factor = recompute_factor(job)
    whole = layer * (1 + factor)
    first, last = end_weights(job)
    # Seven reads and writes of fp32 per parameter at 10 GB/s on a core, at 1 TB/s on a GPU.
    optimizer = 3e-9 if device.name == "cpu" else 3e-11
    return Costs(
        layer=Part(layer, layer * factor),
        first=Part(first * whole / 3, first * whole * 2 / 3),
        last=Part(last * whole / 3, last * whole * 2 / 3),
        optimizer_s=optimizer,
        source=f"a {device.name} does {device.share:.0%} of {device.tflops[job.train.precision]:g} TFLOP/s in "
        f"{job.train.precision}: assumed, not measured",
    )


def cost_identity(job: Job) -> dict[str, Any]:
    """What of a job its measured costs depend on, the number of layers and the mesh left out."""
    document = job_document(job)
    model = {key: value for key, value in document["model"].items() if key not in ("num_layers", "from_hf")}
    train = {key: document["train"][key] for key in ("micro_batch_size", "precision", "activation_checkpointing")}
    train["compile"] = document["train"]["compile"]
    return {"model": model, "seq_len": job.data.seq_len, "train": train}


def read_costs(path: Path, job: Job) -> Costs:
    """Costs that `raypp plan --measure` wrote.

    Raises:
        JobError: The file cannot be read, or was measured for another model or other microbatches.
    """
    fix = f"measure again: raypp plan JOB --measure {path}"
    try:
        found = json.loads(path.read_text())
        parts: dict[str, Any] = {name: Part(**found[name]) for name in ("layer", "first", "last")}
        identity = found["identity"]
    except FileNotFoundError:
        raise JobError(f"{path} does not exist", f"measure: raypp plan JOB --measure {path}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JobError(f"{path} holds no measured costs: {in_words(error)}", fix) from error
    wanted = cost_identity(job)
    if identity != wanted:
        differs = ", ".join(sorted(_differences(identity, wanted)))
        raise JobError(f"{path} was measured for another job: {differs} differ", fix)
    lacks = [said for name, said in _ADDED.items() if name not in found]
    numbers: dict[str, Any] = {name: float(found[name]) for name in NUMBERS if name in found}
    return Costs(
        **parts,
        **numbers,
        measured=True,
        source=f"costs measured {found.get('measured', '')} on {found.get('device', 'a device')}{''.join(lacks)}",
    )


def write_costs(path: Path, costs: Costs, job: Job, device: str, measured: str) -> None:
    """Writes measured costs, with what they hold for.

    Args:
        device: What they were measured on.
        measured: When, for people.
    """
    document = {
        "measured": measured,
        "device": device,
        "identity": cost_identity(job),
        **{name: vars(getattr(costs, name)) for name in ("layer", "first", "last")},
        **{name: getattr(costs, name) for name in NUMBERS},
    }
    path.write_text(json.dumps(document, indent=2) + "\n")


def _differences(found: Any, wanted: Any, prefix: str = "") -> list[str]:
    if not isinstance(found, dict) or not isinstance(wanted, dict):
        return [] if found == wanted else [prefix]
    names = found.keys() | wanted.keys()
    return [
        key
        for name in names
        for key in _differences(found.get(name), wanted.get(name), f"{prefix}.{name}" if prefix else name)
    ]
