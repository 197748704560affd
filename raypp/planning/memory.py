"""Device memory that a rank needs, by purpose, at the moment of a step when it needs most.

The rank's actions are played in order. Before, within and after each of them the bytes of all
tensors are added up, and the largest sum is the prediction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from raypp.job.family import embedding, projection
from raypp.job.fp8 import layer_in_fp8, sizes_in_fp8
from raypp.job.job import Job
from raypp.job.known_families import counted_family, family_of
from raypp.job.lora import also_trained, is_quantised, quantised_base, quantised_bytes, trains_part
from raypp.job.models import DecoderOptions, with_experts
from raypp.job.precision import BF16, DTYPES, FP32, Dtype
from raypp.job.tensor_parts import end_on_rank, layer_on_rank
from raypp.kinds import OPTIMIZERS
from raypp.planning.activations import (
    backward_bytes,
    mask_bytes,
    microbatch_tokens,
    split_backward_bytes,
    stage_activation_bytes,
)
from raypp.planning.decision import CUDA_CONTEXT, Kind, RankMemory, ResolvedPipeline
from raypp.planning.loss_memory import LossMemory, loss_memory
from raypp.planning.offload import BLOCK, BLOCKS_ON_DEVICE, host_activation_bytes, passing_per_token
from raypp.planning.resolve import resolve_pipeline, wire_bytes, wire_of
from raypp.planning.schedules.action import Action
from raypp.planning.schedules.posting import RECEIVES_AHEAD
from raypp.planning.schedules.simulate import Simulator
from raypp.planning.schedules.waiting import Waiting
from raypp.planning.sizes import sizes_of

_MB = 10**6
_NOTHING = LossMemory(0, 0, 0)

CPU_RUNTIME = 35 * _MB
"""Libraries that a process on a CPU loads in its first steps, and its threads' buffers. Measured
with a model of 0.1 M parameters."""
HEAP = 0.19
"""Share of the tensors' bytes that glibc's heap takes in addition, once the process keeps what it
frees (`train.process_group`): holes that no later tensor fits. Measured (docs/benchmarks)."""
NCCL_KERNELS = 370 * _MB
"""What a process' first communicator takes beside its buffers, on an H200 with NCCL 2.28."""
NCCL_GROUP = 200 * _MB
"""Buffers of one NCCL communicator: channels times NCCL_BUFFSIZE (4 MiB by default) for each of its
protocols and peers. Between two processes by sockets it is 18 MiB; other transports were not
measured."""
NCCL_PAIR = NCCL_GROUP // 2
"""Of one that connects two ranks of a pipeline by 4 thread blocks (`parallel.rank_groups`)."""
NCCL_ONE_CTA = NCCL_GROUP // 4
"""Of the world's, with one thread block (`train.process_group`)."""
CACHING = 0.05
"""Share of the tensors' bytes that torch's caching allocator takes in addition, with expandable
segments: it rounds sizes and keeps blocks. Not measured here."""
_BATCH_BYTES = 32
"""Of a token on a GPU, for all microbatches of a step: its id, its label, its position, and what
attention needs to know of its document."""
_UNSHARDED_STAGES = 3
"""Most stages of a rank whose weights are gathered at a time: torch's `add_unshard_reshard`."""

MOMENTS_BLOCK = 256
"""Moments in 8 bits that share a scale, as in `raypp.rank.optimizers.quantised_moments`."""
_AT_A_TIME = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Values of one turn of `raypp.rank.optimizers.adamw`."""
_TURN_BYTES = 48
"""Bytes per value of a turn: gradient, moments, weight, random bits, codes, and what is computed
from them."""


def memory_kind(job: Job) -> Kind:
    """Returns the kind of device whose memory is planned: cuda unless the job asks for a CPU."""
    return "cpu" if job.resources.device == "cpu" else "cuda"


def memories(job: Job, pipeline: ResolvedPipeline, one: Simulator, kind: Kind | None) -> Iterator[RankMemory]:
    """Yields what every pipeline rank holds at its peak, for a program with any depth."""
    for rank, stages in enumerate(pipeline.stages_of_rank):
        yield rank_memory(job, stages, pipeline.cut, one.situations[rank], one.waiting[rank], kind)


def rank_memory(
    job: Job,
    stages: Sequence[int],
    cut: Sequence[int],
    actions: Sequence[Action],
    waiting: Mapping[Action, Waiting],
    kind: Kind | None = None,
) -> RankMemory:
    """Returns the memory of a pipeline rank at its peak.

    Args:
        actions: The rank's part of the program, with or without repeats (`without_repeats`).
        waiting: The messages that wait while it runs each of them (`schedules.waiting`).
        kind: The kind of device; None: the job's.
    """
    kind = kind or memory_kind(job)
    held = state_of(job, stages, cut, kind)
    microbatches = job.pipeline.microbatches if kind == "cuda" else 0
    fsdp = Gathered.of(job, stages, cut, kind, split=any(action.kind == "W" for action in actions))
    base = RankMemory(
        weights=held.weights + frozen_bytes(job, stages, cut) + fsdp.copies + _fp8_bytes(job, stages, cut),
        optimizer=held.optimizer
        + residual_bytes(job, stages, cut)
        + (outer_bytes(job, stages, cut) if kind == "cpu" else 0),
        messages=_received(job, stages, cut, actions, kind) + _BATCH_BYTES * microbatches * microbatch_tokens(job),
    )
    played = _moments(job, fsdp, stages, cut, actions, waiting, kind)
    gradients, activations, logits, working, sent = max(played, key=sum)
    dtypes = job.train.dtypes
    own = dtypes.weights if fsdp.replaces and not job.reduces_each else dtypes.gradients
    sums, whole = own.bytes * _trained_share(job, stages, cut), fsdp.replaces and not fsdp.streams
    moments = (
        dataclasses.replace(base, gathered=fsdp.flat),
        dataclasses.replace(
            base,
            gradients=0 if whole else gradients,
            gathered=fsdp.weights + (gradients if whole else 0),
            activations=activations,
            logits=logits,
            working=working,
            messages=base.messages + sent,
        ),
        # the end of the reduction: the weights are no longer gathered
        dataclasses.replace(base, gradients=sums, gathered=fsdp.buffers + fsdp.beside),
        # the update
        dataclasses.replace(base, gradients=sums, working=held.passing + update_bytes(job, kind)),
    )
    peak = max(moments, key=lambda moment: moment.total)
    runtime = _runtime(job, stages, cut, peak.total, fsdp.flat + fsdp.buffers, kind)
    return dataclasses.replace(peak, runtime=runtime)


@dataclass(frozen=True)
class HeldState:
    """Bytes of a rank's trained weights and optimizer state, by where they are between two updates.

    Attributes:
        weights: On the device.
        optimizer: On the device.
        saved: What a checkpoint saves of it.
        passing: On the device during an update.
    """

    weights: int
    optimizer: int
    saved: int
    passing: int = 0
    host: int = 0


def state_of(job: Job, stages: Sequence[int], cut: Sequence[int], kind: Kind) -> HeldState:
    """Returns where the state of a rank with these stages is. On a CPU, host memory is the
    device's: nothing is saved, and blocks are copied within it."""
    share = _trained_share(job, stages, cut)
    weights, optimizer = job.train.dtypes.weights.bytes * share, state_bytes(job, share)
    if job.train.dtypes.narrow_weights:  # a few are there in fp32, and bf16 is their copy
        wide = sum(sizes_of(job.model, job.mesh.tp).stage_fp32(_span(stage, cut, False)["layers"]) for stage in stages)
        weights += FP32.bytes * -(-wide // job.mesh.shards)
    if not job.train.optimizer.offload:
        return HeldState(weights, optimizer, weights + optimizer)
    ends = 0 in stages or len(cut) - 1 in stages
    largest = max(_largest(job), _head(job) if ends else 0)
    masters = job.train.dtypes.copies_weights
    moved = optimizer + (weights if masters else 0)
    each = -(-moved // max(1, share))
    passing = min(moved, each * max(BLOCKS_ON_DEVICE * BLOCK, -(-largest // job.mesh.shards)))
    copies = 2 * share if masters else 0
    if kind == "cpu":
        return HeldState(weights + copies, optimizer, weights + optimizer, passing)
    return HeldState(copies if masters else weights, 0, weights + optimizer, passing, moved)


def _largest(job: Job) -> int:
    """Returns the parameters of the largest matrix of a layer that is trained on one rank."""
    kinds = sizes_of(job.model, job.mesh.tp).kinds
    return max(layer.largest // (job.mesh.ep if layer.experts else 1) for layer in kinds)


def _head(job: Job) -> int:
    """Returns the parameters of the projection, or of the embedding, on one rank of a tp group."""
    return end_on_rank(embedding(job.model), job.mesh.tp).parameters


def residual_bytes(job: Job, stages: Sequence[int], cut: Sequence[int]) -> int:
    """Returns the bytes of a rank's residuals of int8 sums over replicas, for its stages."""
    sums_int8 = job.train.sync.kind == "int8" and job.mesh.dp_replicate > 1
    return FP32.bytes * _trained_share(job, stages, cut) if sums_int8 else 0


def outer_bytes(job: Job, stages: Sequence[int], cut: Sequence[int], *, saved: bool = False) -> int:
    """Returns the bytes of a rank's state of outer steps, in host memory: momentum and residuals,
    which are saved, and the weights on which replicas last agreed: beside their own in snapshots
    between outer steps; and what is under way beside the compute: weights in fp32, results in
    fp64."""
    if job.outer is None:
        return 0
    kept = 2 + (job.outer.compression != "none")
    beside = 0 if saved or not job.outer.overlap_steps else 3 + (job.outer.compression != "none")
    share = _trained_share(job, stages, cut)
    return FP32.bytes * (kept * share + beside * share // job.outer.fragments)


def offloaded_bytes(job: Job, stages: Sequence[int], cut: Sequence[int], actions: Sequence[Action]) -> int:
    """Returns the bytes that a rank on CUDA keeps in host memory (`planning.offload`)."""
    kept = state_of(job, stages, cut, "cuda").host + outer_bytes(job, stages, cut)
    return kept + host_activation_bytes(job, actions, cut, microbatch_tokens(job))


def stage_parameters(job: Job, stage: int, cut: Sequence[int], *, ends: bool = True) -> int:
    """Returns the parameters of a stage on one rank of a tp group, before fsdp and cp share them.
    Both ends hold tied embeddings. Without `ends`: only those of its layers."""
    return sizes_of(job.model, job.mesh.tp).stage_parameters(**_span(stage, cut, ends))


def stage_trained(job: Job, stage: int, cut: Sequence[int], *, ends: bool = True) -> tuple[int, int]:
    """Returns the trained parameters of a stage, and those of them that belong to experts: as
    `stage_parameters` counts."""
    return sizes_of(job.model, job.mesh.tp).stage_trained(**_span(stage, cut, ends))


def _trained_share(job: Job, stages: Sequence[int], cut: Sequence[int]) -> int:
    """Returns a rank's share of the trained parameters of its stages."""
    trained = sum(stage_trained(job, stage, cut)[0] for stage in stages)
    return -(-trained // job.mesh.shards)


def frozen_bytes(job: Job, stages: Sequence[int], cut: Sequence[int]) -> int:
    """Returns the bytes of a rank's share of the frozen parameters of its stages."""
    shards = job.mesh.shards
    if quantised_base(job.model) is not None:
        return -(-sum(_base(job, stage, cut) for stage in stages) // shards)
    frozen = sum(stage_parameters(job, stage, cut) - stage_trained(job, stage, cut)[0] for stage in stages)
    return _frozen_dtype(job).bytes * -(-frozen // shards)


def _fp8_bytes(job: Job, stages: Sequence[int], cut: Sequence[int]) -> int:
    """Returns the bytes of matrices that a rank keeps in fp8 for a step, in rows and in columns."""
    if quantised_base(job.model) is not None or job.mesh.reshard_after_forward:
        return 0
    layers: list[int] = [index for stage in stages for index in _span(stage, cut, False)["layers"]]
    if ":" in job.model.kind:  # at most: the widths of its matrices are not known
        weights = sizes_of(job.model).layers
        return sum(2 * weights[index].parameters for index in layers if layer_in_fp8(job, index))
    sizes = sizes_in_fp8(job, layers, job.mesh.tp)
    return 2 * (sizes.dense + sizes.experts // job.mesh.ep)


def _frozen_dtype(job: Job) -> Dtype:
    """Returns the dtype of frozen weights that are not quantised."""
    compute = job.train.dtypes.compute
    return DTYPES.get(job.model.lora.base, compute) if job.model.lora is not None else compute


def _base(job: Job, stage: int, cut: Sequence[int], *, ends: bool = True, without: tuple[str, ...] = ()) -> int:
    """Returns `base_bytes` of a stage of a job with a quantised base."""
    rest = job.train.dtypes.compute.bytes
    return base_bytes(job.model, **_span(stage, cut, ends), rest=rest, without=without, tp=job.mesh.tp)


def gathered_bytes(job: Job, stage: int, cut: Sequence[int], *, ends: bool = True) -> tuple[int, int]:
    """Returns the bytes of a stage's weights that FSDP gathers, and those of them of all experts. A
    quantised base travels as its integers. Frozen weights that one rank uses as they are do not
    count. `ends` as in `stage_parameters`."""
    each = job.train.dtypes.compute.bytes
    trained, of_experts = stage_trained(job, stage, cut, ends=ends)
    if job.mesh.shards == 1 and job.model.lora is not None and _frozen_dtype(job) is job.train.dtypes.compute:
        return each * trained, each * of_experts
    if quantised_base(job.model) is None:
        experts = sizes_of(job.model).stage_experts(_span(stage, cut, ends)["layers"])
        return each * stage_parameters(job, stage, cut, ends=ends), each * experts
    held = ("experts",) if job.mesh.ep == job.mesh.shards else ()  # by one rank, as they are
    whole, rest = (_base(job, stage, cut, ends=ends, without=(*held, *more)) for more in ((), ("experts",)))
    return whole + each * trained, whole - rest + each * of_experts


def _span(stage: int, cut: Sequence[int], ends: bool) -> dict[str, Any]:
    start = sum(cut[:stage])
    first, last = ends and stage == 0, ends and stage == len(cut) - 1
    return {"layers": range(start, start + cut[stage]), "first": first, "last": last}


def _moments(
    job: Job,
    fsdp: Gathered,
    stages: Sequence[int],
    cut: Sequence[int],
    actions: Sequence[Action],
    waiting: Mapping[Action, Waiting],
    kind: Kind,
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yields the bytes of gradients, activations, logits, working memory and sends at each action.
    A step after the first is played."""
    tokens, last, dtypes = microbatch_tokens(job), len(cut) - 1, job.train.dtypes
    kept = {stage: tokens * stage_activation_bytes(job, stage, cut, kind) for stage in stages}
    between = {stage: tokens * split_backward_bytes(job, stage, cut) for stage in stages}
    loss = {stage: loss_memory(job, tokens, kind) if stage == last else _NOTHING for stage in stages}
    together = kind == "cuda" and dtypes.compute is BF16
    product = product_bytes(job.model, dtypes.compute.bytes, ep=job.mesh.ep, together=together, tp=job.mesh.tp)
    product += tokens * mask_bytes(job)
    within = tokens * backward_bytes(job, kind) + product
    # A gradient that is summed in a wider dtype is there in both before it is added, by FSDP also
    # the first one; and only in its own when it is added, if FSDP or `compute_copies` adds it.
    own, summed = dtypes.weights.bytes, dtypes.gradients.bytes
    each = own if own == summed else own + summed
    widened = (kind == "cuda" if fsdp.replaces else fsdp.copies > 0) and summed > dtypes.compute.bytes
    if widened:
        each = dtypes.compute.bytes
    matrix = each * _largest(job)
    dense = trains_part(job.model, "embed_tokens") and not fsdp.streams
    embedded = each * _head(job) if dense else 0
    backward = {action.stage for action in actions if action.kind != "F"}
    # Gradients wider than their weights are there from the start (`parallel.compute_copies`).
    done = set(stages) if summed > own and not fsdp.replaces else set()
    gradients = sum(fsdp.gradients[stage] for stage in done)
    activations, logits = tokens * passing_per_token(job), 0
    sends = _sends(job)
    head = _head(job)
    on_way: dict[int, int] = {}  # the buffer of a backward's last sum, which the next backward frees
    narrow, one = dtypes.compute.bytes, dtypes.reduce.bytes * (1 if kind == "cuda" else 2)
    for action in actions:
        stage, added = action.stage, widened or action.stage in done
        ends, layer, whole = fsdp.groups.get(stage, (0, 0, 0))
        once = job.pipeline.microbatches == 1 and fsdp.streams and action.kind == "B"
        # The last backward frees each block's weights.
        freed = narrow * whole if once and not job.mesh.reshard_after_forward else 0
        sent = sum(count * size for count, size in zip(waiting[action], sends, strict=True))
        yield gradients, activations, logits, fsdp.again, sent
        if action.kind == "F" and stage not in backward:
            yield gradients, activations, logits, kept[stage] // max(1, cut[stage]) + product, sent
            continue
        if action.kind == "F":
            activations += kept[stage]
            logits += loss[stage].kept
            yield gradients, activations, logits, product, sent
            yield gradients, activations, logits + loss[stage].forward, 0, sent
            continue
        yield gradients, activations, logits + loss[stage].backward, 0, sent
        if action.kind == "I":  # the last block runs beside what those before it leave for W
            left = between[stage] - kept[stage]
            yield gradients, activations, logits, within, sent
            yield gradients, activations + int((1 - 1 / max(1, cut[stage])) * left), logits, within, sent
            activations += left
            continue
        if action.kind == "W":
            yield gradients, activations, logits, matrix if added or fsdp.replaces else 0, sent
            activations -= between[stage]
            # FSDP takes the gradients at the end, each into a sum of its own first.
            whole_here = narrow * whole + (2 if fsdp.streams else 1) * one * layer - on_way.get(stage, 0)
            yield gradients, activations, logits, whole_here if fsdp.replaces else 0, sent
        elif fsdp.streams:
            # In the second block, the gradients of the first one are on their way instead.
            there = narrow * (layer + (min(head, ends) if stage == last else 0))
            yield gradients, activations, logits, within + there, sent
            second, way = activations - kept[stage] // max(1, cut[stage]), one * layer - on_way.get(stage, 0)
            yield gradients, second, logits, within + there + max(0, way), sent
            if once:  # before its last block, most shares of the sums are there
                rest = 1 - 1 / max(1, cut[stage])
                most = int(rest * fsdp.gradients[stage]), int(rest * kept[stage]), int(rest * freed)
                yield most[0], activations - most[1], logits, within + there + one * layer - most[2], sent
        else:
            yield gradients, activations, logits, within + (matrix if added else 0), sent
        activations -= kept[stage] if action.kind == "B" else 0
        logits -= loss[stage].kept
        if fsdp.streams and action.kind == "B":
            all_sums = gradients + (fsdp.gradients[stage] if stage not in done else 0)
            yield all_sums, activations, logits, ends * narrow - freed + (0 if stage in on_way else ends * one), sent
        if stage not in done:
            done.add(stage)
            gradients += fsdp.gradients[stage]
            if fsdp.streams and not once:
                on_way[stage] = one * (ends or layer)
                gradients += on_way[stage]
        working = embedded if stage == 0 and added else 0
        yield gradients, activations, logits, working - freed, sent


@dataclass(frozen=True)
class Gathered:
    """What is held to compute with a rank's stages: weights in the compute dtype, gradients.

    Attributes:
        replaces: Whether FSDP manages the stages; else gradients are used as they are, and weights
            too, or copies of them (`parallel.compute_copies`).
        weights: Bytes of the gathered weights while the program runs.
        flat: Bytes of the weights that are gathered when a stage's first action is near. On CPUs
            all of them, also where each block frees its own after use: the heap keeps their memory.
        again: Bytes that more are there while the ends are gathered for an action, if each action
            gathers them: a flat copy, before the second layer.
        gradients: Bytes of each stage's accumulated gradients, which ranks do not share yet; with
            `streams`, of this rank's share.
        streams: Whether gradients are reduced block by block in every backward.
        groups: Trained parameters of the ends, a layer, and all layers of each stage.
        buffers: Bytes of the reduction's buffers.
        beside: Bytes of gradients that are held beside these buffers and the share of the sums.
        copies: Bytes of those copies, which stay between steps.
    """

    replaces: bool
    gradients: dict[int, int]
    weights: int = 0
    flat: int = 0
    again: int = 0
    buffers: int = 0
    beside: int = 0
    copies: int = 0
    streams: bool = False
    groups: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, job: Job, stages: Sequence[int], cut: Sequence[int], kind: Kind, *, split: bool) -> Gathered:
        """Returns the figures of a rank's stages; `split`: it splits backwards. A reduction has a
        buffer with what is sent and, if there are other ranks, one with what is received. On CPUs
        the sums of all blocks over replicas are in flight at once (`parallel.replica_sums`), unless
        they are in bf16. Otherwise one block after the other is reduced, beside the gradients. Sums
        over replicas are in place. In int8 there are also the replicas' messages and the next
        residuals."""
        dtypes, replicas = job.train.dtypes, job.mesh.shards * job.summed_replicas
        replaces = replicas > 1 or job.fsdp_alone
        # A single microbatch's backward is the last one, which reduces beside itself, unless a rank
        # still sends messages that sums over replicas would delay (`pipeline.wire.sum_start`).
        held = job.summed_replicas > 1 and job.mesh.pp > 1
        single = kind == "cuda" and job.mesh.shards > 1 and job.pipeline.microbatches == 1 and not (split or held)
        streams = job.reduces_each or single

        def here(whole: int, experts: int) -> int:
            """Returns what of a stage's weights comes here: tokens go to experts elsewhere."""
            return whole - (experts - experts // job.mesh.ep)

        def groups(of: Callable[..., tuple[int, int]]) -> dict[int, tuple[int, int, int]]:
            """Returns each stage's sum, and what FSDP's groups have of it: ends, and a layer."""
            sums = {s: (here(*of(job, s, cut)), here(*of(job, s, cut, ends=False))) for s in stages}
            return {s: (whole, whole - layers, -(-layers // max(1, cut[s]))) for s, (whole, layers) in sums.items()}

        of_trained = groups(stage_trained)
        trained = {stage: whole for stage, (whole, _, _) in of_trained.items()}
        part = job.mesh.shards if streams else 1
        gradients = {stage: dtypes.gradients.bytes * -(-count // part) for stage, count in trained.items()}
        of_gathered = groups(gathered_bytes)
        gathered = [whole for whole, _, _ in of_gathered.values()]
        if not replaces:
            if (
                len(cut) == 1 and job.model.tie_embeddings and trains_part(job.model, "lm_head")
            ):  # that of the head apart
                gradients[0] += dtypes.gradients.bytes * job.model.vocab_size * job.model.hidden_size
            return cls(False, gradients, copies=sum(gathered) if dtypes.copies_weights else 0)
        weights = flat = sum(sorted(gathered)[-_UNSHARDED_STAGES:])
        again = beside = 0
        if job.mesh.reshard_after_forward and any(cut[stage] for stage in stages):
            # The ends stay, with the layer in use and the one being fetched.
            few = max(ends + 2 * layer for _, ends, layer in of_gathered.values())
            if kind == "cuda":
                flat, again = few, max(0, *(ends - layer for _, ends, layer in of_gathered.values()))
            weights = few
        total = 0 if streams else sum(trained.values())
        within = {stage: (ends, layer, whole - ends) for stage, (whole, ends, layer) in of_trained.items()}
        residuals = residual_bytes(job, stages, cut)
        messages = residuals // FP32.bytes * job.mesh.dp_replicate
        at_once = kind == "cpu" and dtypes.sums_in_place and job.summed_replicas > 1
        alone = job.mesh.shards == 1 < replicas
        # On CUDA, what comes back is no more than what was freed; a single rank that FSDP lets
        # divide by 1 has a copy.
        two = alone if kind == "cuda" else replicas > 1 and not (at_once and alone)
        buffers = (2 if two else 1) * total * dtypes.reduce.bytes + messages
        if at_once and not streams:
            buffers += residuals
        else:
            largest = max((max(ends, layer) for _, ends, layer in of_trained.values()), default=0)
            # One group after the other.
            buffers = dtypes.reduce.bytes * largest if streams else buffers * largest // max(1, total)
            # A block's gradients are freed as soon as they are in its buffer.
            freed = dtypes.weights.bytes * _trained_share(job, stages, cut) if kind == "cuda" else 0
            beside = max(0, dtypes.gradients.bytes * total - freed) + residuals
        return cls(True, gradients, weights, flat, again, buffers, beside, 0, streams, within)


def _received(job: Job, stages: Sequence[int], cut: Sequence[int], actions: Sequence[Action], kind: Kind) -> int:
    """Returns the bytes of receives that are posted ahead. A rank receives activations for its
    stages from another rank, and gradients. With NCCL the order of all ranks' actions says how many
    receives are posted before their use (`schedules.posting`). They were always fewer than the
    microbatches in flight, which are counted here."""
    if job.mesh.pp == 1:
        return 0
    wire = wire_of(job)
    ahead = min(RECEIVES_AHEAD, job.pipeline.microbatches) if kind == "cpu" else _most_in_flight(actions)
    backward = {action.stage for action in actions if action.kind != "F"}
    down, up = any(stage > 0 for stage in stages), any(stage < len(cut) - 1 for stage in backward)
    return ahead * (down * wire_bytes(job, wire.activations) + up * wire_bytes(job, wire.gradients))


def _sends(job: Job) -> Waiting:
    """Returns the bytes that a rank holds for each message that waits, by what it carries. A
    message in the compute dtype is the stage's output itself, which counts as an activation until
    its backward. Other formats are copies."""
    wire = wire_of(job)
    same = wire.activations == job.train.dtypes.compute.name
    activations = wire_bytes(job, wire.activations)
    return Waiting(0 if same else activations, activations, wire_bytes(job, wire.gradients))


def _most_in_flight(actions: Sequence[Action]) -> int:
    """Returns the largest number of forwards whose backwards are still to come."""
    most = open_ones = 0
    for action in actions:
        open_ones += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        most = max(most, open_ones)
    return most


def _runtime(job: Job, stages: Sequence[int], cut: Sequence[int], tensors: int, buffers: int, kind: Kind) -> int:
    """Returns the bytes beside the tensors of the peak."""
    if kind == "cpu":
        return CPU_RUNTIME + buffers + int(HEAP * (tensors + buffers))
    return CUDA_CONTEXT + _communicators(job, stages, cut) + int(CACHING * tensors)


def _communicators(job: Job, stages: Sequence[int], cut: Sequence[int]) -> int:
    """Returns the bytes of a rank's NCCL communicators. Two for each rank that the pipeline
    exchanges messages with, one for each direction; two for context; that of the world, unless an
    axis of the data, or tp, spans it."""
    mesh, last, shards = job.mesh, len(cut) - 1, job.mesh.shards
    others = {other for stage in stages for other in (stage - 1, stage + 1) if 0 <= other <= last} - set(stages)
    pairs = 2 * min(len(others), 2, mesh.pp - 1)
    groups = (shards > 1) + (job.summed_replicas > 1) + 2 * (mesh.cp > 1)
    groups += (mesh.tp > 1) + (min(mesh.cp, mesh.tp) > 1 and with_experts(job.model) is not None)
    groups += (mesh.ep > 1) + (1 < mesh.ep < shards)  # among experts, and among those with the same experts
    tied = job.model.tie_embeddings and trains_part(job.model, "embed_tokens") and mesh.pp > 1
    groups += tied and (0 in stages) != (last in stages)
    world = mesh.world > 1 and mesh.world not in (shards, mesh.dp_replicate, mesh.tp)
    once = NCCL_KERNELS if mesh.world > 1 else 0
    return once + groups * NCCL_GROUP + pairs * NCCL_PAIR + world * NCCL_ONE_CTA


@lru_cache(maxsize=1024)
def base_bytes(
    model: DecoderOptions,
    layers: range,
    *,
    first: bool,
    last: bool,
    rest: int,
    without: tuple[str, ...] = (),
    tp: int = 1,
) -> int:
    """Returns the bytes of a stage's frozen weights, before fsdp and cp share them.

    Args:
        layers: Global indices of the stage's layers.
        first, last: The stage holds the embedding; the final norm and the projection.
        rest: Bytes of a frozen weight that is not quantised.
        without: Parts (of `Weight.part`) whose quantised matrices are not counted.
        tp: Ranks of a tp group, of which one is counted.
    """
    family, base = counted_family(model), quantised_base(model)
    total = 0
    weights = family.stage_weights(model, layers, first=first, last=last)
    if tp > 1:
        ends = (embedding(model).name, projection(model).name)
        weights |= {name: end_on_rank(weights[name], tp) for name in ends if name in weights}
        for index in layers:
            for one in layer_on_rank(model, index, family.weights(model, index), tp):
                weights[f"model.layers.{index}.{one.name}"] = one
    for name, weight in weights.items():
        if name in also_trained(model):
            continue
        if base is not None and name.startswith("model.layers.") and is_quantised(weight):
            total += 0 if weight.part in without else quantised_bytes(base, weight)
        else:
            total += rest * weight.parameters
    return total


@lru_cache(maxsize=64)
def product_bytes(model: DecoderOptions, width: int, *, ep: int = 1, together: bool = False, tp: int = 1) -> int:
    """Returns the bytes of the largest matrix while it is dequantised for a product. `width`: bytes
    of an element in the compute dtype. `together`: all experts of a layer are computed by one
    kernel (CUDA in bf16); `ep` ranks share them. `tp`: as of `base_bytes`."""
    family = family_of(model)
    if family is None or quantised_base(model) is None:
        return 0
    layers = ((index, family.weights(model, index)) for index in range(model.num_layers))
    weights = (weight for index, own in layers for weight in layer_on_rank(model, index, own, tp))
    sizes = (
        weight.parameters // ((ep if together else weight.shape[0]) if weight.part == "experts" else 1)
        for weight in weights
        if is_quantised(weight)
    )
    return width * max(sizes, default=0)


def rank_memories(job: Job, kind: Kind | None = None, pipeline: ResolvedPipeline | None = None) -> list[RankMemory]:
    """Returns what every pipeline rank holds at its peak. `pipeline`: the job's, if known."""
    pipeline = pipeline or resolve_pipeline(job)
    return list(memories(job, pipeline, pipeline.simulator(), kind))


def peak_memory(job: Job, kind: Kind | None = None, pipeline: ResolvedPipeline | None = None) -> int:
    """Returns the bytes of the rank that needs most."""
    return max(memory.total for memory in rank_memories(job, kind, pipeline))


def state_bytes(job: Job, parameters: int) -> int:
    """Returns the bytes of the optimizer's state of some parameters. In 8 bits each value is a
    byte, and each block of a row has an fp32 scale. Rows are taken to be as long as the hidden
    size."""
    values = OPTIMIZERS.get(job.train.optimizer.kind).states * parameters
    if job.train.optimizer.state == "fp32":
        return FP32.bytes * values
    columns = job.model.hidden_size
    return round(values * (1 + FP32.bytes * -(-columns // MOMENTS_BLOCK) / columns))


def update_bytes(job: Job, kind: str) -> int:
    """Returns the bytes that an update by rows needs for itself; 0 with torch's fused AdamW."""
    if not job.train.dtypes.narrow_weights and job.train.optimizer.state == "fp32":
        return 0
    largest = max(layer.largest for layer in sizes_of(job.model, job.mesh.tp).kinds)
    return _TURN_BYTES * min(_AT_A_TIME[kind], max(largest, _head(job)))
