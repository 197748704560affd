"""How long a step may take: a forecast per kind of device, and what it rests on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raypp.planning.costs import DEVICES, Costs, Device, computed_costs
from raypp.planning.forecast import Forecast, forecast
from raypp.planning.machines import Machines
from raypp.planning.resolve import ResolvedPipeline
from raypp.planning.search import advice
from raypp.planning.traffic import LinkUse
from raypp.schedules.simulate import StageTimes
from raypp.spec.job import Job


@dataclass(frozen=True)
class Prediction:
    """A step's time under assumptions.

    Attributes:
        device: cpu, cuda, or the kind that was given.
        step_s: Seconds of a step.
        tokens_per_s: All replicas.
        bubble: Idle share of the ranks' time within the schedule, waiting for links included.
        parts: Seconds by part: other, unshard, pipeline, reduce, optimizer.
        lookahead: Extra warm-up forwards it rests on.
        links: The cables that pipelines cross.
        bottleneck: What a step waits for most, in words.
        advice: Single changes that would help, and the share of the step's time each saves.
        peak_memory: Bytes of the rank that needs most.
        device_memory: Bytes of a device; 0: not known.
        measured: Which of its grounds are measured: costs, links.
        assumptions: What the numbers rest on, in words.
    """

    device: str
    step_s: float
    tokens_per_s: float
    bubble: float
    parts: Mapping[str, float]
    lookahead: int
    links: tuple[LinkUse, ...]
    bottleneck: str
    advice: tuple[tuple[str, float], ...]
    peak_memory: int
    device_memory: int
    measured: tuple[str, ...]
    assumptions: tuple[str, ...]


@dataclass(frozen=True)
class Grounds:
    """What a prediction may rest on; what is not given is assumed.

    Attributes:
        machines: Nodes and links.
        costs: Measured costs.
        device: Kind of device (`DEVICES`).
        link_gbps: Rate between any two nodes.
        per_node: Devices of a node; None: each pipeline rank has nodes of its own.
    """

    machines: Machines | None = None
    costs: Costs | None = None
    device: str | None = None
    link_gbps: float | None = None
    per_node: int | None = None

    def machines_for(self, job: Job) -> Machines:
        """The machines given, or as many as the job needs."""
        if self.machines is not None:
            return self.machines
        per_node = self.per_node or max(1, job.mesh.world // job.mesh.pp)
        return Machines.alike(job.mesh.world, per_node, self.link_gbps)

    def devices_for(self, job: Job) -> list[Device]:
        """The kinds in question."""
        if self.device is not None:
            return [DEVICES[self.device]]
        kinds = ("cpu", "cuda") if job.resources.device == "auto" and self.costs is None else (job.resources.device,)
        return [DEVICES["cpu" if kind == "auto" else kind] for kind in kinds]


def stage_times(
    pipeline: ResolvedPipeline, layer_s: float = 1.0, backward: float = 2.0, link_s: float = 0.0
) -> StageTimes:
    """Times of every stage, by what its layers and its end of the model cost.

    Args:
        pipeline: Has the stages.
        layer_s: Seconds of one layer's forward of one microbatch.
        backward: Time of a backward, in forwards.
        link_s: Seconds of one message.
    """
    forward = [weight * layer_s for weight in pipeline.stage_weights]
    return StageTimes(forward, [time * backward for time in forward], link=link_s)


def predict(job: Job, pipeline: ResolvedPipeline, grounds: Grounds) -> list[Prediction]:
    """One prediction per device the job may run on (both where resources.device is auto and nothing else is known).

    Raises:
        ResourcesError: The machines given have fewer devices than the job has ranks.
    """
    return [_predict(job, pipeline, grounds, device) for device in grounds.devices_for(job)]


def _predict(job: Job, pipeline: ResolvedPipeline, grounds: Grounds, device: Device) -> Prediction:
    costs = grounds.costs or computed_costs(job, device)
    machines = grounds.machines_for(job)
    found: Forecast = forecast(job, machines, costs, device.memory, pipeline)
    return Prediction(
        device="measured" if costs.measured else device.name,
        step_s=found.step_s,
        tokens_per_s=found.tokens_per_s,
        bubble=found.idle,
        parts=found.parts,
        lookahead=found.lookahead,
        links=found.links,
        bottleneck=found.bottleneck,
        advice=tuple(advice(job, machines, costs, found, device.memory)),
        peak_memory=found.peak_memory,
        device_memory=device.memory,
        measured=found.measured,
        assumptions=(*found.sources, "every row is data.seq_len tokens long"),
    )
