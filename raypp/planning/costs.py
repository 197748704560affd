"""Costs of a model's parts on one device, measured or computed from FLOPs and a rate."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le, MaxLen
from typing_extensions import TypedDict

from raypp.errors import JobError
from raypp.planning.activations import Kind
from raypp.planning.flops import backward_factor, end_weights, layer_flops, recompute_factor, weight_share
from raypp.planning.sizes import sizes_of
from raypp.spec.families import family_of
from raypp.spec.job import Job
from raypp.spec.load import job_document
from raypp.spec.lora import is_quantised, quantised_base
from raypp.untrusted.documents import Bounds, parse_as
from raypp.untrusted.files import read_file
from raypp.untrusted.text import shell_word, visible

GIB = 1024**3


@dataclass(frozen=True)
class Device:
    """A kind of device, by its vendor's data sheet.

    Attributes:
        name: As given to `--device`.
        tflops: Dense matrix products in 10^12 FLOP/s by precision, from the data sheet.
        memory: Bytes.
        share: Fraction of `tflops` that training sustains; an assumption.
    """

    name: str
    tflops: Mapping[str, float]
    memory: int
    share: float

    @property
    def kind(self) -> Kind:
        """The kind of device whose memory is planned."""
        return "cpu" if self.name == "cpu" else "cuda"


_DEQUANTISE_S = {"nf4": {"cpu": 2.8e-9, "cuda": 4e-12}, "int8": {"cpu": 1.6e-9, "cuda": 3e-12}}
"""Seconds per weight to dequantise a matrix. On a CPU as measured (docs/benchmarks/records.md).
On a GPU 15 and 3 bytes that `models.quantised_rows` reads and writes, at 1 TB/s; not measured."""

# Rates are from the vendors' data sheets. fp32 is the rate of a GPU's fp32 pipelines, tf32 that of
# its tensor cores. Memory is what the driver leaves to processes: the total capacity in torch's
# out-of-memory messages, 1 to 2 % less than the sheet's, 7 % less with ECC on an L40S
# (docs/planning.md has sources; none for the H200, which is taken to lose as much as the H100).
DEVICES = {
    device.name: device
    for device in (
        Device("cpu", {"fp32": 0.08, "bf16": 0.04}, 0, 0.5),
        Device("cuda", {"fp32": 40.0, "tf32": 200.0, "bf16": 400.0}, 0, 0.5),
        Device("rtx3090", {"fp32": 35.6, "tf32": 35.6, "bf16": 71.0}, int(23.7 * GIB), 0.45),
        Device("rtx4090", {"fp32": 82.6, "tf32": 82.6, "bf16": 165.0}, int(23.64 * GIB), 0.45),
        Device("rtx5090", {"fp32": 104.8, "tf32": 104.8, "bf16": 209.5}, int(31.36 * GIB), 0.45),
        Device("l40s", {"fp32": 91.6, "tf32": 183.0, "bf16": 362.0}, int(44.42 * GIB), 0.4),
        Device("a100-40", {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0}, int(39.5 * GIB), 0.5),
        Device("a100-80", {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0}, int(79.25 * GIB), 0.5),
        Device("h100", {"fp32": 67.0, "tf32": 494.0, "bf16": 989.0}, int(79.11 * GIB), 0.4),
        Device("h200", {"fp32": 67.0, "tf32": 494.0, "bf16": 989.0}, int(139.4 * GIB), 0.4),
    )
}


def device_named(name: str) -> Device:
    """Returns a kind of device by the name that a user gave.

    Ignores case, spaces and the vendor's words (`RTX 4090`, `4090`); `a100` is the one with 80 GB.

    Raises:
        JobError: There is no such device; names the closest.
    """
    plain = re.sub("nvidia|geforce|[ _]", "", name.lower())
    for known in (plain, f"rtx{plain}", f"{plain}-80"):
        if known in DEVICES:
            return DEVICES[known]
    close = difflib.get_close_matches(plain, DEVICES, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    raise JobError(f"--device {name}: unknown", f"{meant}use one of {', '.join(DEVICES)}, or measure: --measure FILE")


_SHOWN = 8
_BOUNDS = Bounds(size=4 << 20, values=100_000)
_Seconds = Annotated[float, Ge(0), Le(1e9)]
_Share = Annotated[float, Ge(0), Le(1e3)]
_Label = Annotated[str, MaxLen(200)]


@dataclass(frozen=True)
class Part:
    """Seconds that one microbatch takes in one part of the model."""

    forward: _Seconds
    backward: _Seconds


@dataclass(frozen=True)
class Costs:
    """Costs of one microbatch of a job on one device (whole rows, no cp), and of a step as such.

    Attributes:
        layer: One decoder layer.
        first: The embedding.
        last: The final norm, the projection and the loss.
        optimizer_s: Seconds per parameter for gradient norm, scaling and update.
        step_s: Seconds per step that do not depend on its size: reading data, agreeing on lengths.
        input_share: Fraction of a layer's backward that its input half takes, if a schedule splits
            the backward.
        weight_share: Fraction that its weight half takes. Both halves together may take longer than
            the whole.
        copy_s: Seconds per byte of a message that gloo takes from the compute on either side; CPUs
            only.
        gather_s: Seconds of copies per weight that FSDP gathers, without those of messages; CPUs
            only.
        sum_s: Seconds of copies and additions per weight whose gradient FSDP reduces; likewise.
        kind: The kind of device.
        measured: True if these are measured times.
        source: Where the numbers come from, for people.
    """

    layer: Part
    first: Part
    last: Part
    optimizer_s: _Seconds = 0.0
    step_s: _Seconds = 0.0
    copy_s: _Seconds = 0.0
    gather_s: _Seconds = 0.0
    sum_s: _Seconds = 0.0
    input_share: _Share = 0.5
    weight_share: _Share = 0.5
    kind: Kind = "cpu"
    measured: bool = False
    source: str = ""


class _File(TypedDict):
    measured: _Label
    device: _Label
    identity: dict[str, Any]
    costs: Costs


def computed_costs(job: Job, device: Device) -> Costs:
    """Computes costs from the job's FLOPs and the device's data sheet."""
    products: str = job.train.dtypes.compute.name
    if products == "fp32" and job.train.tf32 and "tf32" in device.tflops:
        products = "tf32"
    rate = device.tflops[products] * device.share * 1e12
    forward = layer_flops(job.model, sizes_of(job.model), job.data.seq_len)
    layer = forward * job.train.micro_batch_size * job.data.seq_len / rate
    factor = recompute_factor(job)
    whole = layer * (1 + factor)
    first, last = end_weights(job)
    unpacked = dequantise_seconds(job, device)
    again = 2 if factor > backward_factor(job) else 1  # a recomputed forward dequantises, too
    # Seven reads and writes of fp32 per parameter: at 10 GB/s on a CPU core, at 1 TB/s on a GPU.
    optimizer = 3e-9 if device.kind == "cpu" else 3e-11
    return Costs(
        layer=Part(layer + unpacked, layer * factor + again * unpacked),
        first=Part(first * whole / 3, first * whole * 2 / 3),
        last=Part(last * whole / 3, last * whole * 2 / 3),
        optimizer_s=optimizer,
        kind=device.kind,
        input_share=1 - weight_share(job),
        weight_share=weight_share(job),
        source=f"a {device.name} does {device.share:.0%} of {device.tflops[products]:g} TFLOP/s in "
        f"{products}: assumed, not measured",
    )


def dequantise_seconds(job: Job, device: Device) -> float:
    """Returns the seconds in which the matrices of an average layer are dequantised once.

    0 without a quantised base. All experts count: a microbatch has tokens for each of them.
    """
    base, family = quantised_base(job.model), family_of(job.model)
    if base is None or family is None:
        return 0.0
    layers = range(job.model.num_layers)
    weights = sum(w.parameters for index in layers for w in family.weights(job.model, index) if is_quantised(w))
    return _DEQUANTISE_S[base][device.kind] * weights / len(layers)


def cost_identity(job: Job, kind: Kind) -> dict[str, Any]:
    """Returns what a job's measured costs depend on.

    That excludes the number of layers and the mesh. `kind`: of the device that is measured.
    """
    document = job_document(job.for_device(kind))
    without = ("num_layers", "from_hf", "original", "max_context")
    model = {key: value for key, value in document["model"].items() if key not in without}
    if model["lora"] is None:
        del model["lora"]
    train = {key: document["train"][key] for key in ("micro_batch_size", "precision", "activation_checkpointing")}
    train["compile"] = document["train"]["compile"]
    if not job.train.tf32:
        train["tf32"] = False
    return {"model": model, "seq_len": job.data.seq_len, "train": train}


def read_costs(path: Path, job: Job) -> Costs:
    """Reads costs that `raypp plan --measure` wrote.

    Raises:
        JobError: The file cannot be read, or was measured for another model or for other
            microbatches.
    """
    fix = f"measure again: raypp plan JOB --measure {shell_word(path)}"
    document = parse_as(
        _File, read_file(path, _BOUNDS.size, JobError, fix=fix), str(path), _BOUNDS, JobError, fix, unknown="ignore"
    )
    costs, identity = document["costs"], document["identity"]
    wanted = cost_identity(job, costs.kind)
    if identity != wanted:
        differs = sorted(_differences(identity, wanted))
        shown = visible(", ".join(differs[:_SHOWN])) + (" and others" if len(differs) > _SHOWN else "")
        raise JobError(f"{path} was measured for another job: {shown} differ", fix)
    source = f"costs measured {visible(document['measured'])} on {visible(document['device'])}"
    return replace(costs, measured=True, source=source)


def write_costs(path: Path, costs: Costs, job: Job, device: str, measured: str) -> None:
    """Writes measured costs and what they are valid for.

    Args:
        device: The device on which they were measured.
        measured: Time of the measurement, for people.
    """
    numbers = {name: value for name, value in asdict(costs).items() if name not in ("measured", "source")}
    document = {"measured": measured, "device": device, "identity": cost_identity(job, costs.kind), "costs": numbers}
    path.write_text(json.dumps(document, indent=2) + "\n")


def _differences(measured: Any, wanted: Any, prefix: str = "") -> list[str]:
    """Returns the keys that differ, as deep as the wanted ones go."""
    if not isinstance(measured, dict) or not isinstance(wanted, dict):
        return [] if measured == wanted else [prefix]
    names = measured.keys() | wanted.keys()
    return [
        key
        for name in names
        for key in _differences(measured.get(name), wanted.get(name), f"{prefix}.{name}" if prefix else name)
    ]
