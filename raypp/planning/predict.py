"""Predicts a step's time: one forecast per kind of device, with its assumptions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from raypp.errors import JobError, Problem
from raypp.planning.activations import Kind
from raypp.planning.costs import DEVICES, Costs, Device, computed_costs
from raypp.planning.forecast import Forecast, forecast
from raypp.planning.machines import Machines
from raypp.planning.replica_sum_costs import hidden_exchanges
from raypp.planning.resolve import ResolvedPipeline, resolve_pipeline
from raypp.planning.search import advice
from raypp.schedules.simulate import StageTimes
from raypp.spec.job import Job

_FEWEST, _LONGER = 10, 0.05
"""The fewest steps between outer steps that `auto` chooses, and the share of a step that they may
add to it."""
_MOST_ADVISED = 16_384
"""Actions of a program beyond which its changes are not simulated: each takes long."""
_MOST_RANKS_ADVISED = 32_768
"""Ranks beyond which changes are not forecast either."""


@dataclass(frozen=True)
class Grounds:
    """Inputs of a prediction. What is not given is assumed.

    Attributes:
        machines: Nodes and links.
        costs: Measured costs.
        device: Kind of device (`DEVICES`).
        link_gbps: Rate between any two nodes, in Gbit/s.
        per_node: Devices per node; None: each pipeline rank has separate nodes.
    """

    machines: Machines | None = None
    costs: Costs | None = None
    device: str | None = None
    link_gbps: float | None = None
    per_node: int | None = None

    def machines_for(self, job: Job) -> Machines:
        """Returns the given machines, or as many as the job needs."""
        if self.machines is not None:
            return self.machines
        per_node = self.per_node or max(1, job.mesh.world // job.mesh.pp)
        return Machines.alike(job.mesh.world, per_node, self.link_gbps)

    def devices_for(self, job: Job) -> list[Device]:
        """Returns the kinds of device to predict for."""
        if self.device is not None:
            return [DEVICES[self.device]]
        if job.resources.device != "auto":
            return [DEVICES[job.resources.device]]
        kinds = ("cpu", "cuda") if self.costs is None else (self.costs.kind,)
        return [DEVICES[kind] for kind in kinds]


def kind_of(device: Device) -> Kind:
    """Returns the kind of device whose memory is planned."""
    return "cpu" if device.name == "cpu" else "cuda"


def stage_times(
    pipeline: ResolvedPipeline, layer_s: float = 1.0, backward: float = 2.0, link_s: float = 0.0
) -> StageTimes:
    """Returns the times of every stage, from the cost of its layers and of its end of the model.

    Args:
        pipeline: The pipeline with its stages.
        layer_s: Seconds of one layer's forward of one microbatch.
        backward: Time of a backward, in forwards.
        link_s: Seconds of one message.
    """
    forward = [weight * layer_s for weight in pipeline.stage_weights]
    return StageTimes(forward, [time * backward for time in forward], link=link_s)


def predict(job: Job, pipeline: ResolvedPipeline, grounds: Grounds) -> list[Forecast]:
    """Returns one forecast per device that the job may run on.

    These are both if resources.device is auto and costs are unknown. `pipeline` is that of the last
    one's job.

    Raises:
        ResourcesError: The given machines have fewer devices than the job has ranks.
    """
    devices, forecasts = grounds.devices_for(job), []
    last = job.for_device(kind_of(devices[-1]))
    for device in devices:
        own = job.for_device(kind_of(device))
        cut = pipeline if own.train.precision == last.train.precision else resolve_pipeline(own)
        forecasts.append(_predict(own, cut, grounds, device))
    return forecasts


def with_every_steps(job: Job, grounds: Grounds) -> tuple[Job, str]:
    """Decides `train.sync.every_steps: auto` for the last device of `predict`.

    Returns:
        The job, and the decision in words, "" if there was none, with the fragments and
        overlap_steps that would allow fewer steps.

    Raises:
        JobError: The rate between replicas is unknown.
    """
    if job.outer is None or job.outer.every_steps != "auto" or job.mesh.dp_replicate == 1:
        return job, ""
    if job.outer.link_gbps is None and grounds.machines is None and grounds.link_gbps is None:
        fault = "auto needs the rate of the link between replicas"
        fix = "set train.sync.link_gbps, or a number; `raypp plan` takes --links and --link-gbps, and proposes one"
        raise JobError(Problem("train.sync.every_steps", fault, fix))
    choices, device = job.outer_intervals(), grounds.devices_for(job)[-1]
    own = job.for_device(kind_of(device)).with_every_steps(choices[-1])
    costs, machines = grounds.costs or computed_costs(own, device), grounds.machines_for(own)
    cast = forecast(own, machines, costs, device.memory, resolve_pipeline(own), kind_of(device))
    sums = cast.replica_sums
    assert sums is not None
    waits, rest = sums.exposed_s * choices[-1], cast.step_s - sums.exposed_s
    enough = [steps for steps in choices if steps >= _FEWEST and waits <= _LONGER * rest * steps]
    decided = min(enough, default=choices[-1])
    remark = f"train.sync.every_steps: auto is {decided}"
    ways = [
        (steps, way.train.sync)
        for way in hidden_exchanges(own, sums, rest)
        for steps in way.outer_intervals()
        if _FEWEST <= steps < decided
    ]
    if ways:
        steps, sync = min(ways, key=lambda way: way[0])
        remark += f"; with fragments: {sync.fragments} and overlap_steps: {sync.overlap_steps}, which change"
        remark += f" the numbers, too, {steps}"
    return job.with_every_steps(decided), remark


def _is_small(job: Job, pipeline: ResolvedPipeline) -> bool:
    """Whether changes of a job can be forecast, too, without a long wait."""
    return job.mesh.world <= _MOST_RANKS_ADVISED and sum(map(len, pipeline.program.values())) <= _MOST_ADVISED


def _predict(job: Job, pipeline: ResolvedPipeline, grounds: Grounds, device: Device) -> Forecast:
    costs, machines = grounds.costs or computed_costs(job, device), grounds.machines_for(job)
    kind = kind_of(device)
    cast = forecast(job, machines, costs, device.memory, pipeline, kind)
    return replace(
        cast,
        device="measured" if costs.measured else device.name,
        advice=tuple(advice(job, machines, costs, cast, device.memory, kind)) if _is_small(job, pipeline) else (),
        assumptions=(*cast.assumptions, "every row is data.seq_len tokens long"),
    )
