"""What replicas send each other: sums of gradients, and how much of them a step hides.

The runtime starts the sum of a block when the block's gradients are done
(`pipeline.wire`). Pipeline ranks that finish early sum while others still compute. What is
left after the last backward makes the step longer. Replicas that train apart send their weights
once in `train.sync.every_steps` steps, and wait for what `overlap_steps` do not hide.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raypp.job.job import Job
from raypp.planning.decision import Kind, ResolvedPipeline, sent_bytes
from raypp.planning.machines import Link
from raypp.planning.memory import stage_trained
from raypp.planning.schedules.simulate import Slot, Timeline

_INT8_S = {"cpu": (2.8e-9, 0.65e-9), "cuda": (2.7e-11, 0.9e-11)}
"""Seconds to quantise a number, and to add up one of a replica's. On a CPU as measured
(docs/design/0054); on a GPU 40 and 13 bytes at 1.5 TB/s, not measured."""


@dataclass(frozen=True)
class ReplicaSums:
    """Sums of gradients over the replicas of mesh.dp_replicate in a step.

    Attributes:
        exact_bytes: Bytes that a rank with the largest share would send for exact sums.
        int8_bytes: The same for sums in int8.
        outer_bytes: Bytes that it sends in an outer step; 0 where gradients are summed.
        every_steps: Steps between two exchanges; 1 where gradients are summed.
        fragments: Parts of the model that take turns within these steps.
        seconds: Time of an exchange of the slowest rank on its cable; of outer steps, of all
            fragments' together.
        hidden_s: The part of it that the step does not wait for.
        exposed_s: Seconds by which exchanges make a step longer on average, with what int8
            computes.
    """

    kind: str
    exact_bytes: int
    int8_bytes: int
    outer_bytes: int
    every_steps: int
    seconds: float
    hidden_s: float
    exposed_s: float
    fragments: int = 1


def hidden_exchanges(job: Job, now: ReplicaSums, compute_s: float) -> Iterator[Job]:
    """Yields the job with fragments, fewest first, and the fewest overlap_steps that hide their
    exchanges in steps of `compute_s`: at most 8 and 5, since late results cost quality."""
    for parts in range(1, 1 + min(8, job.model.num_layers)):
        overlap = math.ceil(now.seconds / parts / compute_s)
        if overlap <= 5:
            yield job.with_sync(fragments=parts, overlap_steps=overlap)


def replica_sums(
    job: Job, pipeline: ResolvedPipeline, timeline: Timeline, link: Link | None, messages: Sequence[float], kind: Kind
) -> ReplicaSums | None:
    """Returns the sums of a step; None without replicas. `timeline`: the simulated step. `link`:
    the slowest link between replicas; None: sending takes no time. `messages`: seconds of a message
    at every boundary between stages."""
    if job.mesh.dp_replicate == 1:
        return None
    shards, form = job.mesh.shards, job.train.sync.kind
    held = {stage: stage_trained(job, stage, pipeline.cut)[0] / shards for stage in range(pipeline.num_stages)}
    # On CPUs, a sum whose result is cast is awaited at once.
    beside = kind == "cuda" or job.train.dtypes.sums_in_place
    seconds = late = most = 0.0
    for rank, stages in enumerate(pipeline.stages_of_rank):
        most = max(most, sum(held[stage] for stage in stages))
        own = [_seconds(job, held[stage], link) for stage in stages]
        seconds = max(seconds, sum(own))
        if beside:
            slots = timeline.slots[rank]
            ready = [_ready(slots, stage, pipeline, messages) for stage in stages]
            late = max(late, _end(list(zip(ready, own, strict=True))) - timeline.makespan)
    every, waits = 1, late if beside else seconds
    if form == "outer":
        sync = job.train.sync
        numbers = most
        if sync.link_gbps is not None:  # the ranks of a replica share it
            link, numbers = (
                Link(sync.link_gbps, link.latency_s if link is not None else 0.0),
                shards * sum(held.values()),
            )
        one = _seconds(job, numbers / sync.fragments, link)  # of a fragment
        seconds, every = sync.fragments * one, sync.every
        waits = sync.fragments * max(0.0, one - sync.overlap_steps * timeline.makespan)
    computing = 0.0
    if form == "int8":
        quantise, add = _INT8_S[kind]
        computing = most * (quantise + job.mesh.dp_replicate * add)
    return ReplicaSums(
        kind=form,
        exact_bytes=round(sent_bytes(job, most, "exact")),
        int8_bytes=round(sent_bytes(job, most, "int8")),
        outer_bytes=round(sent_bytes(job, most, "outer")) if form == "outer" else 0,
        every_steps=every,
        seconds=seconds,
        hidden_s=max(0.0, seconds - waits),
        exposed_s=max(0.0, waits) / every + computing,
        fragments=job.train.sync.fragments if form == "outer" else 1,
    )


def _seconds(job: Job, numbers: float, link: Link | None) -> float:
    if link is None:
        return 0.0
    return link.latency_s + sent_bytes(job, numbers, job.train.sync.kind) * 8 / (link.gbps * 1e9)


def _ready(slots: Sequence[Slot], stage: int, pipeline: ResolvedPipeline, messages: Sequence[float]) -> list[float]:
    """Returns when the gradients of each block of a stage can be summed, in order. That is within
    its last backward. If the rank sends afterwards, it is when the last message has left."""
    holder, whole = pipeline.rank_of_stage, max(1, pipeline.cut[stage])
    last = next(slot for slot in reversed(slots) if slot.action.stage == stage)
    for slot in reversed(slots):
        to = slot.action.stage + (1 if slot.action.kind == "F" else -1)
        crosses = slot.action.kind in "FBI" and 0 <= to < len(holder) and holder[to] != holder[slot.action.stage]
        if crosses and slot.end >= last.end:
            return [slot.end + messages[min(to, slot.action.stage)]] * whole
    if last.action.kind != "B":
        return [last.end] * whole
    return [last.start + (last.end - last.start) * (block + 1) / whole for block in range(whole)]


def _end(sums: Sequence[tuple[Sequence[float], float]]) -> float:
    """Returns when a rank's sums have left its cable, one block after the other. `sums`: for each
    stage, when its blocks are ready, and the seconds of them all."""
    now = 0.0
    for ready, seconds in sorted((at, seconds / len(blocks)) for blocks, seconds in sums for at in blocks):
        now = max(now, ready) + seconds
    return now
