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
from raypp.planning.flops import (
    BACKWARD_PER_FORWARD,
    attention_flops,
    backward_factor,
    elementwise_bytes,
    end_weights,
    layer_flops,
    recompute_factor,
    weight_share,
)
from raypp.planning.machines import INSIDE_GBPS
from raypp.planning.resolve import schedule_of
from raypp.planning.sizes import sizes_of
from raypp.schedules.catalogue import SCHEDULES
from raypp.spec.families import family_of
from raypp.spec.job import Job
from raypp.spec.load import job_document
from raypp.spec.lora import is_quantised, quantised_base
from raypp.spec.models import MoeOptions
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
        share: Fraction of `tflops` that matrix products sustain in training; an assumption.
        attention: The same for attention kernels.
        bandwidth: Of its memory, in 10^12 bytes/s, from the data sheet.
        inside_gbps: Gbit/s per direction between two devices of a node, in collectives of all of
            them; an assumption.
        groups: Whether torch's own kernel multiplies by all experts (compute capability 9.0 and
            10.x); on other cards one of Triton does.
    """

    name: str
    tflops: Mapping[str, float]
    memory: int
    share: float
    attention: float = 0.3
    bandwidth: float = 1.0
    inside_gbps: float = INSIDE_GBPS
    groups: bool = False

    @property
    def kind(self) -> Kind:
        """The kind of device whose memory is planned."""
        return "cpu" if self.name == "cpu" else "cuda"


_DEQUANTISE_CPU_S = {"nf4": 2.8e-9, "int8": 1.6e-9}
"""Seconds per weight to dequantise a matrix on a CPU, as measured (docs/benchmarks/records.md)."""
_DEQUANTISE_BYTES = {"nf4": 4.6, "int8": 4.5}
"""Bytes per weight that a GPU could read meanwhile: 0.95 ps at 4.8 TB/s, as measured."""
_UPDATE_BYTES = {"fp32": 60.0, "8bit": 96.0}
"""The same for gradient norm, scaling and an update (7.3 and 17.4 ps measured) of each value."""
_LAUNCH_S = 5e-6
"""Seconds of the host to launch a kernel of a compiled block: a GPU computes no faster."""
_EAGER_S = 9.5e-6
"""The same where a block is not compiled, with Python and autograd around it: half of what a slow
core takes (benchmarks/block_host), whatever is recomputed."""
_WATCHED_S = 2 * _EAGER_S
"""The same if torch's selective checkpointing watches every operator, as in an own model."""
_HOST_WAIT_S = 3e-5
"""Seconds that a GPU stands still when the host reads a value: experts spread over ranks."""
_STEP_S = 0.01
"""Seconds of a step in which a GPU waits: for the agreement, the sums, the optimizer's launch."""
_KERNELS = {(False, False): (28, 61), (False, True): (62, 92), (True, False): (14, 25), (True, True): (15, 60)}
"""Kernels of a layer's forward and backward, by whether it is compiled and has adapters, counted
(benchmarks/kernel_counts)."""
_EXPERT_KERNELS = 50
"""Kernels of a block of experts, in a forward as in a backward, counted
(benchmarks/kernel_counts)."""
_TRITON_GROUPS = 0.8
"""Rate of Triton's product of all experts by that of torch's. Assumed."""
_HALF_TILE = 64
"""Rows by which each expert's last tile is not full, on average."""
_MOVED = 0.85
"""Share of the memory's bandwidth that elementwise kernels sustain."""

# Rates are from the vendors' data sheets. fp32 is the rate of a GPU's fp32 pipelines, tf32 that of
# its tensor cores. Memory is what the driver leaves to processes: the total capacity in torch's
# out-of-memory messages, 1 to 2 % less than the sheet's, 7 % less with ECC on an L40S
# (docs/planning.md has sources; where there is none, the sheet less 1.5 %). Inside a node: what
# NCCL's collectives reach over NVLink (375 GB/s of 450 on Hopper), or over PCIe.
_TABLE = """
cpu           0.04   0.08   0.08    0      0.5   0.5   0.02   100
cuda          400    200    40      0      0.5   0.3   2.0    100
rtx3090       71     35.6   35.6    23.7   0.62  0.5   0.936  100
rtx4090       165    82.6   82.6    23.64  0.62  0.5   1.008  120
rtx5090       209.5  104.8  104.8   31.36  0.62  0.5   1.792  120
rtxpro6000    503.8  251.9  125     94.97  0.5   0.3   1.792  120
a6000         154.8  77.4   38.7    47.4   0.6   0.45  0.768  100
a10           125    62.5   31.2    22.06  0.5   0.4   0.6    100
a10g          70     35     31.5    22.06  0.6   0.5   0.6    100
l4            121    60     30.3    22.05  0.4   0.35  0.3    100
l40s          362    183    91.6    44.42  0.5   0.35  0.864  120
a100-40       312    156    19.5    39.5   0.62  0.42  1.555  1900
a100-80       312    156    19.5    79.25  0.62  0.42  2.039  1900
h100          989    494    67      79.11  0.46  0.3   3.35   3000
h200          989    494    67      139.4  0.46  0.3   4.8    3000
b200          2250   1125   75      178.3  0.42  0.15  8.0    6000
gb200         2500   1250   80      184.5  0.42  0.15  8.0    6000
b300          2250   1125   75      267.0  0.42  0.15  8.0    6000
mi300x        1307   654    163     191.5  0.35  0.2   5.3    2400
"""
"""Name, TFLOP/s in bf16, tf32 and fp32, GiB, shares of products and of attention, TB/s, Gbit/s
inside a node. On a CPU, one core; bf16 is emulated there, and 0.04 what was measured."""


def _device(row: str) -> Device:
    name, bf16, tf32, fp32, gib, share, attention, bandwidth, inside = row.split()
    tflops = {"fp32": float(fp32), "tf32": float(tf32), "bf16": float(bf16)}
    grouped = name in ("cuda", "h100", "h200", "b200", "gb200", "b300")
    memory = int(float(gib) * GIB)
    return Device(name, tflops, memory, float(share), float(attention), float(bandwidth), float(inside), grouped)


DEVICES = {device.name: device for device in map(_device, _TABLE.strip().splitlines())}
_OTHER_NAMES = {"a100": "a100-80", "mi300": "mi300x", "rtxa6000": "a6000", "rtx6000pro": "rtxpro6000"}
_COUNT = re.compile(r"^\d+ ?[x×] ?| ?[x×] ?\d{1,2}$")
_SIZE = re.compile(r"(\d+)(g|gb|gib)")
_NOT_KIND = re.compile(
    r"nvidia|geforce|amd|instinct|tesla|blackwell|server|workstation|edition|max|q|sxm\d?|pcie|nvl|hbm\d?e?|oam"
)


def device_named(name: str) -> Device:
    """Returns a kind of device by the name that a user or a driver gives.

    Ignores case, spaces, a count and the vendor's words (`RTX 4090`, `8x H100`, `NVIDIA
    A100-SXM4-80GB`); `a100` is the one with 80 GB.

    Raises:
        JobError: There is no such device; names the closest.
    """
    words = re.split(r"[-_ /]+", _COUNT.sub("", name.strip().lower()))
    sizes = [match[1] for word in words if (match := _SIZE.fullmatch(word))]
    kept = [word for word in words if not _NOT_KIND.fullmatch(word) and not _SIZE.fullmatch(word)]
    plain = "".join(kept)
    for known in (*(f"{plain}-{size}" for size in sizes), "-".join(kept), plain, f"rtx{plain}"):
        if (known := _OTHER_NAMES.get(known, known)) in DEVICES:
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
        kind: The kind of device.
        measured: True if these are measured times.
        source: Where the numbers come from, for people.
    """

    layer: Part
    first: Part
    last: Part
    optimizer_s: _Seconds = 0.0
    step_s: _Seconds = 0.0
    input_share: _Share = 0.5
    weight_share: _Share = 0.5
    kind: Kind = "cpu"
    measured: bool = False
    source: str = ""


CostsOf = Costs | Device
"""Given costs, or a kind of device for which those of each job are computed."""


class _File(TypedDict):
    measured: _Label
    device: _Label
    identity: dict[str, Any]
    costs: Costs


def computed_costs(job: Job, device: Device) -> Costs:
    """Computes costs from the job's FLOPs, the bytes that it moves, and the device's data sheet."""
    products: str = job.train.dtypes.compute.name
    if products == "fp32" and job.train.tf32:
        products = "tf32"
    rate, sizes = device.tflops[products] * device.share * 1e12, sizes_of(job.model)
    per_token, attended = layer_flops(job.model, sizes, job.data.seq_len), attention_flops(job.model, job.data.seq_len)
    tokens = job.train.micro_batch_size * job.data.seq_len
    factor = recompute_factor(job)
    unpacked = dequantise_seconds(job, device)
    again = factor > backward_factor(job)  # a recomputed forward dequantises, too
    words = f"does {device.share:.0%} of {device.tflops[products]:g} TFLOP/s in {products}"
    if device.kind == "cpu":
        forward = per_token * tokens / rate
        layer = Part(forward + unpacked, forward * factor + (1 + again) * unpacked)
        whole, optimizer = forward * (1 + factor), 3e-9  # seven reads and writes of fp32 at 10 GB/s
    else:
        attention = attended * tokens / (device.tflops[products] * device.attention * 1e12)
        moved = elementwise_bytes(job, compiled=_compiled(job)) * tokens / (device.bandwidth * _MOVED * 1e12)
        rate /= _grouped_slower(job, device, per_token)
        # The forward does 36 % of elementwise work (counted), and 1 of 3.5 parts of attention.
        forward = (per_token - attended) * tokens / rate + attention + 0.36 * moved
        products_again = backward_factor(job) * per_token - BACKWARD_PER_FORWARD * attended
        recomputed = {"selective": 0.36 * moved}.get(job.train.activation_checkpointing, forward if again else 0.0)
        backward = products_again * tokens / rate + 2.5 * attention + 0.64 * moved + recomputed
        whole, layer = forward + backward, Part(forward + unpacked, backward + (1 + again) * unpacked)
        layer = _no_faster_than_launched(job, device, layer, again)
        optimizer = _UPDATE_BYTES[job.train.optimizer.state] / (device.bandwidth * 1e12)
        launch = f"{1e6 * _launch_seconds(job):g} µs to launch a kernel"
        if isinstance(job.model, MoeOptions) and job.mesh.ep > 1:
            launch += f", {1e6 * _HOST_WAIT_S:g} µs until the host has read row counts"
        words += f" ({device.attention:.0%} in attention), {device.bandwidth:g} TB/s, {launch}"
    first, last = end_weights(job)
    return Costs(
        layer=layer,
        first=Part(first * whole / 3, first * whole * 2 / 3),
        last=Part(last * whole / 3, last * whole * 2 / 3),
        optimizer_s=optimizer,
        step_s=0.0 if device.kind == "cpu" else _STEP_S,
        kind=device.kind,
        input_share=1 - weight_share(job),
        weight_share=weight_share(job),
        source=f"a {device.name} {words}: assumed, not measured",
    )


def against_compiling(job: Job, splits: bool) -> str:
    """Returns why `train.compile: auto` does not compile blocks, as far as the job tells, or "".

    `splits`: whether its program splits backwards.
    """
    against = {
        f"{schedule_of(job)} splits backwards": splits,
        "train.sample decodes with the same blocks": job.train.sample is not None,
        "the model is your own": ":" in job.model.kind,
    }
    return ", ".join(reason for reason, holds in against.items() if holds)


def _compiled(job: Job) -> bool:
    """Whether blocks of a job on a GPU are compiled, as far as the job tells (`decide`)."""
    name, asked = schedule_of(job), job.train.compile
    splits = name in SCHEDULES and SCHEDULES.get(name).splits_backward
    return asked is True or (asked == "auto" and not against_compiling(job, splits))


def _launch_seconds(job: Job) -> float:
    """Returns the seconds of the host for a kernel of a block."""
    watched = ":" in job.model.kind and job.train.activation_checkpointing == "selective"
    return _LAUNCH_S if _compiled(job) else _WATCHED_S if watched else _EAGER_S


def host_remark(job: Job, device: Device, splits: bool) -> str:
    """Returns what blocks that are not compiled take a GPU's host; "" if they are, or on a CPU."""
    if device.kind == "cpu" or _compiled(job):
        return ""
    again = recompute_factor(job) > backward_factor(job)
    layer, least = (computed_costs(job, device).layer, _no_faster_than_launched(job, device, Part(0.0, 0.0), again))
    waits = layer.forward <= least.forward or layer.backward <= least.backward
    hint = ": the GPU waits for it, unless a microbatch has more tokens (train.micro_batch_size)" if waits else ""
    return (
        f"blocks are not compiled ({against_compiling(job, splits) or 'train.compile'}): of "
        f"{1e3 * (layer.forward + layer.backward):.1f} ms per layer and microbatch the host needs "
        f"{1e3 * (least.forward + least.backward):.1f} ms{hint}"
    )


def _no_faster_than_launched(job: Job, device: Device, layer: Part, again: bool) -> Part:
    """Returns a layer's times, as long as the host needs at least for its kernels and its waits."""
    forward, backward = _KERNELS[_compiled(job), job.model.lora is not None]
    wait = 0.0
    if isinstance(job.model, MoeOptions):
        forward, backward = forward + _EXPERT_KERNELS, backward + _EXPERT_KERNELS
        if job.mesh.ep > 1:  # the host reads row counts, while the device permutes rows
            tokens = job.train.micro_batch_size * job.data.seq_len / job.mesh.cp
            moved = 2 * tokens * job.model.experts_per_token * job.model.hidden_size
            permuted = moved * job.train.dtypes.compute.bytes / (device.bandwidth * _MOVED * 1e12)
            wait = max(0.0, _HOST_WAIT_S - permuted) * job.mesh.cp  # `forecast` divides by cp
    each_s = _launch_seconds(job)
    least = forward * each_s, (backward + again * forward) * each_s
    return Part(max(layer.forward, least[0]) + wait, max(layer.backward, least[1]))


def _grouped_slower(job: Job, device: Device, per_token: float) -> float:
    """Returns how many times as long a layer's products take as if those of experts were plain."""
    model = job.model
    if not isinstance(model, MoeOptions):
        return 1.0
    tokens = job.train.micro_batch_size * job.data.seq_len / job.mesh.cp
    rows = tokens * job.mesh.ep * model.experts_per_token / model.num_experts
    grouped = (1 + _HALF_TILE / rows) / (1.0 if device.groups else _TRITON_GROUPS)
    own = 6.0 * model.hidden_size * model.expert_ffn_size * model.experts_per_token
    return 1 + min(1.0, own * model.expert_layers / model.num_layers / per_token) * (grouped - 1)


def dequantise_seconds(job: Job, device: Device) -> float:
    """Returns the seconds in which the matrices of an average layer are dequantised once.

    0 without a quantised base. All experts count: a microbatch has tokens for each of them.
    """
    base, family = quantised_base(job.model), family_of(job.model)
    if base is None or family is None:
        return 0.0
    layers = range(job.model.num_layers)
    weights = sum(w.parameters for index in layers for w in family.weights(job.model, index) if is_quantised(w))
    gpu = _DEQUANTISE_BYTES[base] / (device.bandwidth * 1e12)
    return (_DEQUANTISE_CPU_S[base] if device.kind == "cpu" else gpu) * weights / len(layers)


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
