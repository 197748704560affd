"""How long a step may take: a guess, and what it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raypp.planning.flops import layer_flops, recompute_factor
from raypp.planning.memory import microbatch_tokens
from raypp.planning.weights import end_weights
from raypp.schedules.action import Program
from raypp.schedules.simulate import StageTimes, simulate
from raypp.spec.job import Job

# Sustained rates of one rank, in TFLOP/s, by device and precision: small models stay below, tuned large ones above.
_RATES = {
    ("cpu", "fp32"): 0.04,
    ("cpu", "bf16"): 0.02,
    ("cuda", "fp32"): 20.0,
    ("cuda", "bf16"): 200.0,
}


@dataclass(frozen=True)
class Prediction:
    """A step's time under assumptions.

    Attributes:
        device: cpu or cuda.
        step_s: Seconds of a step; data, optimizer and reductions over fsdp and dp_replicate not counted.
        tokens_per_s: All replicas.
        bubble: Idle share of the ranks' time, waiting for links included.
        assumptions: What the numbers rest on, in words.
    """

    device: str
    step_s: float
    tokens_per_s: float
    bubble: float
    assumptions: tuple[str, ...]


def stage_times(
    cut: Sequence[int], first: float, last: float, layer_s: float = 1.0, backward: float = 2.0, link_s: float = 0.0
) -> StageTimes:
    """Times of every stage of a cut.

    Args:
        cut: Layers of every stage.
        first: What the embedding costs, in layers.
        last: What norm, projection and loss cost, in layers.
        layer_s: Seconds of one layer's forward of one microbatch.
        backward: Time of a backward, in forwards.
        link_s: Seconds of one message.
    """
    weights = [float(count) for count in cut]
    weights[0] += first
    weights[-1] += last
    forward = [weight * layer_s for weight in weights]
    return StageTimes(forward, [time * backward for time in forward], link=link_s)


def predict(
    job: Job, cut: Sequence[int], program: Program, bytes_per_message: int, link_gbps: float | None
) -> list[Prediction]:
    """One prediction per device the job may run on (both where resources.device is auto)."""
    devices = ("cpu", "cuda") if job.resources.device == "auto" else (job.resources.device,)
    return [_predict(job, cut, program, bytes_per_message, link_gbps, device) for device in devices]


def _predict(
    job: Job, cut: Sequence[int], program: Program, bytes_per_message: int, link_gbps: float | None, device: str
) -> Prediction:
    rate = _RATES[device, job.train.precision]
    link_s = bytes_per_message * 8 / (link_gbps * 1e9) if link_gbps else 0.0
    layer_s = layer_flops(job.model, job.data.seq_len) * microbatch_tokens(job) / (rate * 1e12)
    timeline = simulate(program, stage_times(cut, *end_weights(job), layer_s, recompute_factor(job), link_s))
    tokens = job.mesh.replicas * job.pipeline.microbatches * job.train.micro_batch_size * job.data.seq_len
    link = f"links carry {link_gbps:g} Gbit/s each way" if link_gbps else "links cost nothing (give --link-gbps)"
    assumptions = (
        f"one {device} rank sustains {rate:g} TFLOP/s in {job.train.precision}: assumed, not measured",
        link,
        "every row is data.seq_len tokens long",
        "data, optimizer and reductions between replicas cost nothing",
    )
    return Prediction(device, timeline.makespan, tokens / timeline.makespan, timeline.bubble, assumptions)
