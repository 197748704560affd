"""Costs of a model's parts on one device, measured or computed from FLOPs and a rate."""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from raypp.errors import JobError
from raypp.job.fp8 import sizes_in_fp8
from raypp.job.job import Job
from raypp.job.known_families import family_of
from raypp.job.lora import is_quantised, quantised_base
from raypp.job.models import with_experts
from raypp.job.precision import FP32, PRECISIONS, SINCE_FP8, auto_on
from raypp.planning.decision import Facts, Kind
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
from raypp.planning.resolve import schedule_of, splits_compiled
from raypp.planning.schedules.catalogue import SCHEDULES
from raypp.planning.sizes import mixers, sizes_of

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
        capability: Compute capability, of which bf16 needs 8.0; for other vendors, that of NVIDIA's
            cards with the same dtypes and kernels.
        groups: Whether torch's own kernel multiplies by all experts (9.0 and 10.x); on other cards
            one of Triton does.
    """

    name: str
    tflops: Mapping[str, float]
    memory: int
    share: float
    attention: float = 0.3
    bandwidth: float = 1.0
    inside_gbps: float = INSIDE_GBPS
    capability: tuple[int, int] = (8, 0)
    groups: bool = False

    @property
    def kind(self) -> Kind:
        """The kind of device whose memory is planned."""
        return "cpu" if self.name == "cpu" else "cuda"

    @property
    def facts(self) -> Facts:
        """What decisions take into account of ranks on such devices."""
        return Facts(self.kind, cards=(self.name,), memory=self.memory, precision=auto_on(self.capability))

    def computes(self, precision: str) -> bool:
        """Whether it has kernels for products in a precision."""
        return self.kind == "cpu" or self.capability >= PRECISIONS[precision].since


_DEQUANTISE_CPU_S = {"nf4": 2.8e-9, "int8": 1.6e-9, "fp8": 1.6e-9}
"""Seconds per weight to dequantise a matrix on a CPU, as measured (docs/benchmarks/records.md)."""
_DEQUANTISE_BYTES = {"nf4": 4.6, "int8": 4.5, "fp8": 4.5}
"""Bytes per weight that a GPU could read meanwhile: 0.95 ps at 4.8 TB/s, as measured."""
_UPDATE_BYTES = {"fp32": 60.0, "8bit": 96.0}
"""The same for gradient norm, scaling and an update (7.3 and 17.4 ps measured) of each value."""
_LAUNCH_S = 9.5e-6
"""Seconds of the host to launch a kernel, with Python and autograd around it: a GPU computes no
faster. Half of what a slow core takes (benchmarks/block_host), whatever is recomputed. A compiled
block has fewer kernels, but takes the host 1.03 to 1.15 times as long."""
_WATCHED_S = 2 * _LAUNCH_S
"""The same if torch's selective checkpointing watches every operator, as in an own model."""
_HOST_WAIT_S = 3e-5
"""Seconds that a GPU stands still when the host reads a value: experts spread over ranks."""
_STEP_S = 0.01
"""Seconds of a step in which a GPU waits: for the agreement, the sums, the optimizer's launch."""
_KERNELS = {False: (28, 61), True: (62, 92)}
"""Kernels of a layer's forward and backward that is not compiled, by whether it has adapters,
counted (benchmarks/kernel_counts)."""
_EXPERT_KERNELS = 48
"""Kernels of a block of experts, in a forward as in a backward, counted
(benchmarks/kernel_counts)."""
_TENSOR_KERNELS = 8
"""More kernels of a layer whose ranks exchange tokens (mesh.tp): four collectives and their copies.
"""
_THINNER = 0.015
"""Share by which products slow down for each further rank that has a part of their matrices.
Assumed: 10 % with 8."""
_TRITON_GROUPS = 0.8
"""Rate of Triton's product of all experts by that of torch's. Assumed."""
_HALF_TILE = 64
"""Rows by which each expert's last tile is not full, on average."""
_FP8_CAST = 3
"""Bytes that are read and written to make a number in fp8 of one in bf16."""
_FP8_SHARE = 0.86
"""Share of their peak that products in fp8 sustain, by that of others: 1,100 of 1,979 TFLOP/s on an
H100, beside 640 of 989. Assumed."""
_MOVED = 0.85
"""Share of the memory's bandwidth that elementwise kernels sustain."""

# Rates are from the vendors' data sheets. fp32 is the rate of a GPU's fp32 pipelines, tf32 that of
# its tensor cores. Memory is what the driver leaves to processes: the total capacity in torch's
# out-of-memory messages, 1 to 2 % less than the sheet's, 7 % less with ECC on an L40S
# (docs/planning.md has sources; where there is none, the sheet less 1.5 %). Inside a node: what
# NCCL's collectives reach over NVLink (375 GB/s of 450 on Hopper), or over PCIe. V100's rates
# are the SXM2's (PCIe: 112 TFLOP/s, 80 Gbit/s); those of an RTX 2080 Ti are with sums in fp32.
_TABLE = """
cpu           0.04   0.08   0.08    0      0.5   0.5   0.02   100   0.0
cuda          400    200    40      0      0.5   0.3   2.0    100   9.0
rtx3090       71     35.6   35.6    23.7   0.62  0.5   0.936  100   8.6
rtx4090       165    82.6   82.6    23.64  0.62  0.5   1.008  120   8.9
rtx5090       209.5  104.8  104.8   31.36  0.62  0.5   1.792  120   12.0
rtxpro6000    503.8  251.9  125     94.97  0.5   0.3   1.792  120   12.0
a6000         154.8  77.4   38.7    47.4   0.6   0.45  0.768  100   8.6
a10           125    62.5   31.2    22.06  0.5   0.4   0.6    100   8.6
a10g          70     35     31.5    22.06  0.6   0.5   0.6    100   8.6
l4            121    60     30.3    22.05  0.4   0.35  0.3    100   8.9
l40s          362    183    91.6    44.42  0.5   0.35  0.864  120   8.9
a100-40       312    156    19.5    39.5   0.62  0.42  1.555  1900  8.0
a100-80       312    156    19.5    79.25  0.62  0.42  2.039  1900  8.0
h100          989    494    67      79.11  0.46  0.3   3.35   3000  9.0
h200          989    494    67      139.4  0.46  0.3   4.8    3000  9.0
b200          2250   1125   75      178.3  0.42  0.15  8.0    6000  10.0
gb200         2500   1250   80      184.5  0.42  0.15  8.0    6000  10.0
b300          2250   1125   75      267.0  0.42  0.15  8.0    6000  10.3
v100-16       125    15.7   15.7    15.78  0.5   0.25  0.9    950   7.0
v100-32       125    15.7   15.7    31.74  0.5   0.25  0.9    950   7.0
t4            65     8.1    8.1     14.56  0.4   0.25  0.32   80    7.5
rtx2080ti     53.8   13.4   13.4    10.76  0.5   0.25  0.616  80    7.5
mi300x        1307   654    163     191.5  0.35  0.2   5.3    2400  8.0
"""
"""Name, TFLOP/s in bf16 as in fp16, in tf32 and in fp32, GiB, shares of products and of attention,
TB/s, Gbit/s inside a node, compute capability. Cards below 8.0 have neither bf16 nor tf32. On a
CPU, one core; half precision is emulated there (0.04 measured)."""


def _device(row: str) -> Device:
    name, half, tf32, fp32, gib, share, attention, bandwidth, inside, version = row.split()
    tflops = {"fp32": float(fp32), "tf32": float(tf32), "bf16": float(half), "fp16": float(half)}
    major, minor = map(int, version.split("."))
    if (major, minor) >= SINCE_FP8:
        tflops["fp8"] = 2 * float(half)  # with sums in fp32
    rates, groups = (float(share), float(attention), float(bandwidth), float(inside)), major in (9, 10)
    return Device(name, tflops, int(float(gib) * GIB), *rates, (major, minor), groups)


DEVICES = {device.name: device for device in map(_device, _TABLE.strip().splitlines())}
_OTHER_NAMES = {
    "a100": "a100-80", "mi300": "mi300x", "rtxa6000": "a6000", "rtx6000pro": "rtxpro6000",
    "v100": "v100-16", "v100s": "v100-32", "v100s-32": "v100-32",
}  # fmt: skip
_COUNT = re.compile(r"^\d+ ?[x×] ?| ?[x×] ?\d{1,2}$")
_SIZE = re.compile(r"(\d+)(g|gb|gib)")
_NOT_KIND = re.compile(
    r"nvidia|geforce|amd|instinct|tesla|blackwell|server|workstation|edition|max|q|sxm\d?|pcie|nvl|hbm\d?e?|oam"
)


def device_named(name: str) -> Device:
    """Returns a kind of device by the name that a user or a driver gives. Ignores case, spaces, a
    count and the vendor's words (`RTX 4090`, `8x H100`, `NVIDIA A100-SXM4-80GB`); `a100` is the one
    with 80 GB, `v100` that with 16. Raises JobError: there is no such device; names the closest."""
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


_Seconds = Annotated[float, Ge(0), Le(1e9)]
_Share = Annotated[float, Ge(0), Le(1e3)]


@dataclass(frozen=True)
class Part:
    """Seconds that one microbatch takes in one part of the model."""

    forward: _Seconds
    backward: _Seconds


@dataclass(frozen=True)
class Costs:
    """Costs of one microbatch of a job on one device (whole rows, no cp, no tp), and of a step.

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


def _products(job: Job) -> str:
    """Returns in what matrix products on a GPU are computed."""
    compute = job.train.dtypes.compute.name
    return "tf32" if compute == "fp32" and job.train.tf32 else compute


def peak_tflops(job: Job, cards: Iterable[str]) -> float:
    """Returns the peak of the slowest of these cards for the job's products; 0 if one is not
    known."""
    try:
        return min((device_named(card).tflops[_products(job)] for card in cards), default=0.0)
    except JobError:
        return 0.0


def computed_costs(job: Job, device: Device) -> Costs:
    """Computes costs from the job's FLOPs, the bytes that it moves, and the device's data sheet."""
    products = _products(job)
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
        rate /= _grouped_slower(job, device, per_token) * (1 + _THINNER * (job.mesh.tp - 1))
        # The forward does 36 % of elementwise work (counted), and 1 of 3.5 parts of attention.
        less = _less_by_fp8(job, device)
        forward = (per_token - attended) * tokens / rate + attention + 0.36 * moved - less
        products_again = backward_factor(job) * per_token - BACKWARD_PER_FORWARD * attended
        recomputed = {"selective": 0.36 * moved}.get(job.train.activation_checkpointing, forward if again else 0.0)
        backward = products_again * tokens / rate + 2.5 * attention + 0.64 * moved + recomputed
        backward -= less
        if less:
            words += f", {device.tflops['fp8']:g} in fp8"
        whole, layer = forward + backward, Part(forward + unpacked, backward + (1 + again) * unpacked)
        layer = _no_faster_than_launched(job, device, layer, again)
        optimizer = _UPDATE_BYTES[job.train.optimizer.state] / (device.bandwidth * 1e12)
        launch = f"{1e6 * _launch_seconds(job):g} µs to launch a kernel"
        if with_experts(job.model) is not None and job.mesh.ep > 1:
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
    `splits`: whether its program splits backwards."""
    against = {
        f"{schedule_of(job)} splits backwards": splits and not splits_compiled(job),
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
    return _WATCHED_S if watched and not _compiled(job) else _LAUNCH_S


def host_remark(job: Job, device: Device, splits: bool) -> str:
    """Returns what blocks take a GPU's host, if they are not compiled, or if the GPU waits for it;
    "" otherwise, and on a CPU."""
    if device.kind == "cpu":
        return ""
    again = recompute_factor(job) > backward_factor(job)
    layer, least = (computed_costs(job, device).layer, _no_faster_than_launched(job, device, Part(0.0, 0.0), again))
    waits = layer.forward <= least.forward or layer.backward <= least.backward
    compiled = _compiled(job)
    if compiled and not waits:
        return ""
    why = "" if compiled else f"blocks are not compiled ({against_compiling(job, splits) or 'train.compile'}): "
    host_ms, gpu_ms = (1e3 * (one.forward + one.backward) / job.mesh.tp for one in (least, layer))
    if not waits:
        return f"{why}the host needs {host_ms:.1f} of {gpu_ms:.1f} ms per layer and microbatch"
    hint = "and the GPU waits for it, unless a microbatch has more tokens (train.micro_batch_size)"
    return f"{why}the host needs {host_ms:.1f} ms per layer and microbatch, {hint}"


def _no_faster_than_launched(job: Job, device: Device, layer: Part, again: bool) -> Part:
    """Returns a layer's times, as long as the host needs at least for its kernels and its waits.
    Ranks of a tp group divide what a layer computes; the host of each launches all kernels."""
    forward, backward = _KERNELS[job.model.lora is not None]
    wait = 0.0
    if (model := with_experts(job.model)) is not None:
        forward, backward = forward + _EXPERT_KERNELS, backward + _EXPERT_KERNELS
        if job.mesh.ep > 1:  # the host reads row counts, while the device permutes rows
            tokens = job.train.micro_batch_size * job.data.seq_len / job.mesh.cp / job.mesh.tp
            moved = 2 * tokens * model.experts_per_token * model.hidden_size
            permuted = moved * job.train.dtypes.compute.bytes / (device.bandwidth * _MOVED * 1e12)
            wait = max(0.0, _HOST_WAIT_S - permuted) * job.mesh.cp * job.mesh.tp  # `forecast` divides
    if job.mesh.tp > 1:
        forward, backward = forward + _TENSOR_KERNELS, backward + _TENSOR_KERNELS
    each_s = _launch_seconds(job) * job.mesh.tp
    least = forward * each_s, (backward + again * forward) * each_s
    return Part(max(layer.forward, least[0]) + wait, max(layer.backward, least[1]))


def _grouped_slower(job: Job, device: Device, per_token: float) -> float:
    """Returns how many times as long a layer's products take as if those of experts were plain."""
    model = with_experts(job.model)
    if model is None:
        return 1.0
    tokens = job.train.micro_batch_size * job.data.seq_len / job.mesh.cp / job.mesh.tp
    rows = tokens * job.mesh.ep * model.experts_per_token / model.num_experts
    grouped = (1 + _HALF_TILE / rows) / (1.0 if device.groups else _TRITON_GROUPS)
    own = 6.0 * model.hidden_size * model.expert_ffn_size * model.experts_per_token
    return 1 + min(1.0, own * model.expert_layers / model.num_layers / per_token) * (grouped - 1)


def _less_by_fp8(job: Job, device: Device) -> float:
    """Returns the seconds that products in fp8 save in an average layer's forward of a microbatch,
    and again in its backward, whose gradients of inputs are such products, too. Matrices that are
    gathered for each microbatch become fp8 for each."""
    layers = job.model.num_layers
    sizes = sizes_in_fp8(job, range(layers))
    if not sizes.active or "fp8" not in device.tflops:
        return 0.0
    tokens = job.train.micro_batch_size * job.data.seq_len
    product_s = 2 * sizes.active / layers * tokens / (device.share * 1e12)
    half, fp8 = product_s / device.tflops["bf16"], product_s / device.tflops["fp8"] / _FP8_SHARE
    each = job.mesh.reshard_after_forward or quantised_base(job.model) == "fp8"
    here = sizes_in_fp8(job, range(layers), job.mesh.tp)
    weights = (here.dense + here.experts / job.mesh.ep) * each
    cast = job.mesh.tp * _FP8_CAST * (here.widths / 2 * tokens + weights) / layers / (device.bandwidth * _MOVED * 1e12)
    return half - fp8 - cast


def dequantise_seconds(job: Job, device: Device) -> float:
    """Returns the seconds in which the matrices of an average layer are dequantised once. 0 without
    a quantised base. All experts count: a microbatch has tokens for each of them."""
    base, family = quantised_base(job.model), family_of(job.model)
    if base is None or family is None:
        return 0.0
    layers = range(job.model.num_layers)
    weights = sum(w.parameters for index in layers for w in family.weights(job.model, index) if is_quantised(w))
    weights -= sum(sizes_in_fp8(job, layers)[:2]) if base == "fp8" else 0  # are multiplied as they are
    gpu = _DEQUANTISE_BYTES[base] / (device.bandwidth * 1e12)
    return (_DEQUANTISE_CPU_S[base] if device.kind == "cpu" else gpu) * weights / len(layers)


def context_bytes(job: Job) -> float:
    """Returns the bytes that a cp rank sends in an average layer's forward of one microbatch. Ring:
    keys and values circulate, (cp - 1) / cp of them past every rank. Ulysses: queries, keys, values
    and the result are exchanged. Without attention every rank gets of every part what it does to a
    state, in fp32, and its last tokens before the convolution."""
    cp, rows, number = job.mesh.cp, job.train.micro_batch_size, job.train.dtypes.compute.bytes
    ring, moved = job.mesh.cp_style == "ring", 0.0
    for rule, queries, keys in mixers(job.model):
        if rule is not None:
            state = rule.change * FP32.bytes
            last = (rule.kernel - 1) * rule.channels * number
            moved += (cp - 1) * rows * (2 if ring else 1) * (state + last)
        else:
            widths = 2 * keys * (cp - 1) if ring else 2 * (queries + keys) * (1 - 1 / cp)
            moved += rows * job.data.seq_len / cp * widths * number
    return moved / job.model.num_layers
