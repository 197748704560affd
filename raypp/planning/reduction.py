"""Decides `mesh.reduce_gradients: auto`: when the ranks that share weights sum their gradients.

Sums in every backward keep no whole gradients between microbatches, but send as much again for each
of them (docs/design/0065).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from raypp.errors import JobError, size_text
from raypp.job.job import Job
from raypp.planning.costs import device_named
from raypp.planning.decision import Kind, ResolvedPipeline
from raypp.planning.geometry import Mesh
from raypp.planning.machines import INSIDE_GBPS, Machines, Node
from raypp.planning.memory import peak_memory

EACH, LAST = "each_microbatch", "last_microbatch"
FAST_GBPS = 800.0
"""Rate between two devices of a node from which sums in every backward cost next to nothing."""


def decide_reduction(
    job: Job, machines: Machines, device_memory: int, kind: Kind, pipeline: ResolvedPipeline | None = None
) -> tuple[Job, str]:
    """Decides `mesh.reduce_gradients: auto`. Arguments as of `forecast`. Returns the job, and why,
    in words; "" where there is nothing to decide."""
    if job.mesh.reduce_gradients != "auto":
        return job, ""
    each, last = job.with_reduction(EACH), job.with_reduction(LAST)
    if kind == "cpu" or job.mesh.shards == 1 or job.pipeline.microbatches == 1:
        return last, ""
    auto, shared = "mesh.reduce_gradients: auto is", f"the {job.mesh.shards} ranks that share weights"
    if job.train.sync.kind == "int8":
        return last, f"{auto} {LAST}: sums over replicas are in int8 (train.sync)"
    seats = machines.seats(Mesh.of(job.mesh), apart=job.outer is not None)
    groups = [{seats[rank].name for rank in group} for group in Mesh.of(job.mesh).groups(("fsdp", "cp"))]
    links = [machines.between(*names, *names) for names in groups if len(names) == 1]
    rate = min((link.gbps for link in links if link is not None), default=0.0)
    if len(links) == len(groups) and rate >= FAST_GBPS:
        return each, f"{auto} {EACH}: {shared} are in one node, at {rate:,.0f} Gbit/s"
    if device_memory:
        least, most = (peak_memory(way, kind, pipeline) for way in (each, last))
        if least <= device_memory < most:
            need, have = size_text(most), size_text(device_memory)
            return each, f"{auto} {EACH}: with {LAST} a rank would need {need}, and a device has {have}"
    where = "are in several nodes" if len(links) < len(groups) else f"have {rate:,.0f} Gbit/s between them"
    return last, f"{auto} {LAST}: {shared} {where}"


def reduction_on(job: Job, devices: Sequence[int], names: Iterable[str], memory: int) -> Job:
    """Decides `mesh.reduce_gradients: auto` for the life of a run on nodes of a cluster. `devices`:
    GPUs of each node; none: ranks compute on CPUs. `names`: of these GPUs. `memory`: bytes of the
    smallest."""
    if sum(devices) < job.mesh.world:
        return job.with_reduction(LAST)
    nodes = tuple(Node(str(index), count) for index, count in enumerate(devices))
    try:
        inside = min((device_named(name).inside_gbps for name in names), default=INSIDE_GBPS)
    except JobError:  # an unknown card
        inside = INSIDE_GBPS
    try:
        return decide_reduction(job, Machines(nodes, inside_gbps=inside), memory, "cuda")[0]
    except JobError:  # `check_plan` says why
        return job.with_reduction(LAST)
