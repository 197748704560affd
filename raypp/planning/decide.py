"""Decides what follows from a job and its devices: the only place that does.

`settle` decides what holds for the whole life of a run, and stands in its job from then on.
`decide` adds what depends on the mesh of an attempt and on its nodes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from raypp.errors import JobError, Problem, ResourcesError, size_text
from raypp.job.job import Job
from raypp.job.precision import BF16
from raypp.planning.activations import stage_activation_bytes
from raypp.planning.costs import against_compiling, device_named, peak_tflops
from raypp.planning.decision import Decision, Facts, Kind, ResolvedPipeline
from raypp.planning.flops import flops_per_key, flops_per_token
from raypp.planning.geometry import Mesh
from raypp.planning.host_memory import offloaded_by_ranks
from raypp.planning.machines import INSIDE_GBPS, Machines, Node
from raypp.planning.memory import memories, peak_memory
from raypp.planning.resolve import resolve_pipeline, whole_backwards
from raypp.planning.schedules.action import splits_backward
from raypp.planning.schedules.simulate import StageTimes

_MOST_SIMULATED = 60_000
"""Actions of all programs together beyond which no deeper warm-up is planned for."""
_MOST_CTAS = 4
"""Thread blocks of NCCL that carry a message between stages, at most. A posted receive holds them,
each about a processor of the GPU, until its message arrives. NCCL's default is up to 32 on
NVLink."""
_ONE_CTA_GBPS = 100.0
EACH, LAST = "each_microbatch", "last_microbatch"
FAST_GBPS = 800.0
"""Rate between two devices of a node from which sums in every backward cost next to nothing."""


def settle(job: Job, facts: Facts) -> Job:
    """Returns the job with what is decided once for the life of a run, so that later attempts
    compute the same: its precision, the base of its adapters, and when gradients are reduced. On
    GPUs of unknown nodes, the last stays open."""
    job = job.for_device(facts.device, cuda=facts.precision)
    if facts.device == "cuda" and not facts.gpus:
        return job
    return reduction_on(job, facts.gpus, facts.cards, facts.memory)


def fp16_remark(asked: Job, facts: Facts) -> str:
    """Returns what is better than the precision that a job asks for on its GPUs, or ""."""
    scaled = asked.train.dtypes.scales_loss and facts.device == "cuda" and facts.precision == BF16.name
    return "train.precision: fp16, but these GPUs have bf16, which needs no loss scale" if scaled else ""


ON_CPUS = Facts()


def decide(job: Job, facts: Facts = ON_CPUS) -> Decision:
    """Decides everything that follows from a job on its mesh. `job`: on the mesh of the attempt.
    What `settle` decides may be decided already. `facts`: what is known of the cluster; by default,
    ranks compute on CPUs. Raises JobError: the schedule does not exist or does not support these
    sizes, or a stage would have no layer. `check_plan` reports all such problems at once."""
    if job.train.epochs is not None:
        raise JobError(Problem("train.epochs", "was not counted", "use train.steps, or `raypp submit`"))
    job, kind = settle(job, facts), facts.device
    if job.mesh.reduce_gradients == "auto":
        job = job.with_reduction(LAST)
    pipeline = resolve_pipeline(job)
    job, remarks = _with_compile(job, pipeline, facts)
    pipeline = replace(pipeline, whole_backwards=whole_backwards(job))  # all else is as resolved
    ctas, ctas_words = pipeline_ctas(job, facts)
    simulator = pipeline.simulator()
    stages = range(pipeline.num_stages)
    return Decision(
        job=job,
        facts=facts,
        pipeline=pipeline,
        memory=tuple(memories(job, pipeline, simulator, kind)),
        in_flight=tuple(simulator.run(StageTimes.equal(pipeline.num_stages)).in_flight),
        activation_bytes=tuple(stage_activation_bytes(job, stage, pipeline.cut, kind) for stage in stages),
        depth_bytes=_depth_bytes(job, pipeline, facts),
        offloaded=tuple(offloaded_by_ranks(job, pipeline)) if kind == "cuda" else (),
        ctas=ctas,
        ctas_words=ctas_words,
        remarks=remarks,
        flops_per_token=flops_per_token(job, attention=False),
        flops_per_key=flops_per_key(job.model),
        peak_tflops=peak_tflops(job, facts.cards) if kind == "cuda" else 0.0,
    )


def _with_compile(job: Job, pipeline: ResolvedPipeline, facts: Facts) -> tuple[Job, dict[str, str]]:
    if job.train.compile != "auto":
        return job, {}
    reasons = (
        "" if facts.compiler else "there is no C compiler",
        against_compiling(job, splits_backward(pipeline.program)),
    )
    why = ", ".join(filter(None, reasons))
    words = f"blocks are not compiled: {why}" if why else "blocks are compiled"
    train = job.train.model_copy(update={"compile": not why})
    return job.model_copy(update={"train": train}), {"train.compile": words}


def _depth_bytes(job: Job, pipeline: ResolvedPipeline, facts: Facts) -> tuple[int, ...]:
    """Returns the planned memory of the rank that needs most by depth of the warm-up, from 0. As
    far as programs change, and a device has the memory."""
    found: list[int] = []
    if job.pipeline.lookahead != "auto" or job.mesh.pp == 1 or facts.device == "cpu":
        return ()
    before = None
    for depth in range(job.pipeline.microbatches):
        if before is not None and (depth + 1) * before.actions > _MOST_SIMULATED:
            break
        simulator = pipeline.simulator(depth)
        if before is not None and simulator.program == before.program:
            break
        found.append(max(memory.total for memory in memories(job, pipeline, simulator, facts.device)))
        if facts.memory and found[-1] > facts.memory:
            break
        before = simulator
    return tuple(found)


def ctas_for(gbps: float) -> int:
    """Returns the thread blocks that carry a rate: 1 up to 100 Gbit/s, 2 above, 4 on NVLink. One is
    expected to carry about 160 Gbit/s (not measured). `gbps`: in Gbit/s; 0: unknown."""
    if 0 < gbps <= _ONE_CTA_GBPS:
        return 1
    return 2 if gbps < FAST_GBPS else _MOST_CTAS


def pipeline_ctas(job: Job, facts: Facts) -> tuple[int, str]:
    """Decides the thread blocks of all messages between stages. All groups of the pipeline have the
    same, by the slowest boundary that any of them crosses: faster ones wait for it in every
    microbatch. Returns the number, and why, in words; "" without messages on GPUs."""
    mesh = Mesh.of(job.mesh)
    if facts.device == "cpu" or job.mesh.pp == 1 or sum(facts.gpus) < mesh.world:
        return _MOST_CTAS, ""
    nodes = Machines(tuple(Node(str(index), count) for index, count in enumerate(facts.gpus)))
    try:
        seats = nodes.seats(mesh, apart=job.outer is not None)
    except ResourcesError:  # a tp group fits on no node; whoever places it says so
        return _MOST_CTAS, ""
    rates = {"in a node": _inside(facts.cards, 0.0), "between nodes": facts.network_gbps}
    crossed = {
        "in a node" if seats[one].name == seats[other].name else "between nodes"
        for ranks in mesh.groups("pp")
        for one, other in pairwise((*ranks, ranks[0]))
    }
    ctas, rate, where = min((ctas_for(rates[where]), rates[where], where) for where in crossed)
    known = f"{rate:,.0f} Gbit/s" if rate else "an unknown rate"
    blocks = f"{ctas} thread block{'s' if ctas > 1 else ''} of NCCL"
    return ctas, f"a message between stages gets {blocks}: the slowest boundary, {where}, has {known}"


def _inside(cards: Iterable[str], unknown: float) -> float:
    """Returns the least rate in Gbit/s between two of these cards in a node."""
    try:
        return min((device_named(card).inside_gbps for card in cards), default=unknown)
    except JobError:  # an unknown card
        return unknown


# `mesh.reduce_gradients`: when the ranks that share weights sum their gradients. Sums in every
# backward keep no whole gradients between microbatches, but send as much again for each of them
# (docs/design/0065).


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
    """Decides `mesh.reduce_gradients: auto` for a run on nodes of a cluster. `devices`: GPUs of
    each node; none: on CPUs. `names`: of these GPUs. `memory`: bytes of the smallest."""
    if sum(devices) < job.mesh.world:
        return job.with_reduction(LAST)
    nodes = tuple(Node(str(index), count) for index, count in enumerate(devices))
    inside = _inside(names, INSIDE_GBPS)
    try:
        return decide_reduction(job, Machines(nodes, inside_gbps=inside), memory, "cuda")[0]
    except (JobError, ResourcesError):  # `check_plan` says why, or whoever places the ranks
        return job.with_reduction(LAST)
