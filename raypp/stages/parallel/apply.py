"""Prepares a stage for training. The steps work in this order only.

0. Spread experts and cut matrices over ranks; each rank keeps its share. Beside a quantised base,
   other frozen weights get the compute dtype first.
1. Compile the forward of each block with torch.compile; selective activation checkpointing goes
   inside, before.
2. Wrap that in other activation checkpointing (inside FSDP, so that recomputation sees plain
   modules).
3. Shard each block with FSDP2, then the stage itself: it must be the root that the pipeline calls.
4. Allocate memory on the device, for copies in the compute dtype, too, where FSDP makes none.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from raypp.errors import RayppError
from raypp.job.job import Job
from raypp.job.known_families import family_of
from raypp.job.lora import quantised_base
from raypp.job.precision import FP32
from raypp.stages.models import grouped_products
from raypp.stages.models.fp8 import compute_in_fp8
from raypp.stages.models.products import defer_in, halved
from raypp.stages.models.quantised import multiply_experts_in_fp8, store_rest, stored_formats, torch_dtype
from raypp.stages.models.recomputed import recomputed
from raypp.stages.parallel.compute_copies import ComputeCopies, sum_in
from raypp.stages.parallel.expert import expert_fsdp_settings, moe_blocks, spread_experts
from raypp.stages.parallel.rank_groups import RankGroups
from raypp.stages.parallel.replica_sums import ReplicaSums
from raypp.stages.parallel.shard import sharded_like
from raypp.stages.parallel.tensor import split_tensors
from raypp.torch_private import (
    ATTENTION_OPERATORS,
    GROUPED_MM_OPERATOR,
    SCALED_GROUPED_MM_OPERATOR,
    SCALED_MM_OPERATOR,
    allocate,
    integer_weights,
)


@dataclass(frozen=True)
class PreparedStage:
    """A stage that is ready to train. `replica_sums`: the stage's sums over replicas. None where
    there are none, or FSDP takes them."""

    module: nn.Module
    replica_sums: ReplicaSums | None = None


def compute_dtype(job: Job) -> torch.dtype:
    """The dtype of activations, including those sent between stages."""
    return torch_dtype(job.train.dtypes.compute)


def prepare_stage(
    stage: nn.Module,
    job: Job,
    data_mesh: DeviceMesh | None,
    device: torch.device,
    groups: RankGroups | None = None,
    kept: Mapping[str, Tensor] | None = None,
) -> PreparedStage:
    """Applies the job's parallelism to a stage on the meta device, then allocates its memory.

    The memory is uninitialised, but for what is kept.

    Args:
        data_mesh: The mesh that weights are sharded over. None leaves a plain module.
        groups: The process groups for expert and context parallelism. None: neither is used.
        kept: Weights that have memory and values already: this rank's part of them, by global name.
    """
    if quantised_base(job.model) is not None:
        store_rest(stage, compute_dtype(job))
    dtypes, family = job.train.dtypes, family_of(job.model)
    masters = False
    if dtypes.narrow_weights:
        wide = frozenset() if family is None else family.fp32_names(job.model)
        for name, parameter in stage.named_parameters():
            if name in wide and parameter.requires_grad:
                masters = True
            elif parameter.is_floating_point():  # not the bytes of a quantised base
                parameter.data = parameter.data.to(torch_dtype(dtypes.weights))
    expert_mesh = groups.experts if groups is not None else None
    if expert_mesh is not None:
        spread_experts(stage, expert_mesh)
    if groups is not None and groups.tensor is not None:
        split_tensors(stage, job, groups.weights)
    if groups is not None:
        for block in moe_blocks(stage):
            block.microbatch_group = groups.tokens
    extent, within, own = job.train.activation_checkpointing, False, ":" in job.model.kind
    if own:
        defer_in(stage)
    if dtypes.fp8:
        compute_in_fp8(stage, job, kept=not job.mesh.reshard_after_forward)
    if job.train.fp8.experts and quantised_base(job.model) == "fp8":
        multiply_experts_in_fp8(stage, fused=job.train.compiles)
    if job.train.compiles:
        within = extent == "selective"
        if within:
            recompute_within_compiled_blocks(stage)
        _compile_blocks(stage)
    if extent != "none" and not within:
        recompute_blocks(stage, extent, own=own)
    replica_sums = None
    if data_mesh is not None:
        _shard(stage, job, data_mesh, expert_mesh)
        replica_sums = _replica_sums(stage, job, data_mesh)
    _allocate(stage, device, kept or {})
    if replica_sums is not None:
        replica_sums.allocate(stage)
    if (data_mesh is None or job.reduces_each) and dtypes.gradients is not dtypes.weights:
        sum_in(stage, torch_dtype(dtypes.gradients))
    elif data_mesh is not None and masters:
        sum_in(stage, torch_dtype(dtypes.weights))
    if data_mesh is None and (dtypes.copies_weights or masters):
        ComputeCopies(stage, compute_dtype(job), torch_dtype(dtypes.reduce), _held_whole(stage, job))
    return PreparedStage(stage, replica_sums)


def _allocate(stage: nn.Module, device: torch.device, kept: Mapping[str, Tensor]) -> None:
    """Gives the parameters of a stage memory on a device, that of the kept ones where there are."""
    if not kept:
        stage.to_empty(device=device)
        return
    names = {id(parameter): name for name, parameter in stage.named_parameters()}

    def memory(tensor: Tensor) -> Tensor:
        held = kept.get(names.get(id(tensor), ""))
        if held is None:
            return torch.empty_like(tensor, device=device)
        return sharded_like(tensor, held, tensor.shape) if isinstance(tensor, DTensor) else held

    allocate(stage, memory)


def _compile_blocks(stage: nn.Module) -> None:
    """Compiles the forward of each block for any sequence length. It leaves `__call__` alone, so
    FSDP's hooks stay outside the compiled part. Backwards may be split."""
    for block in _blocks(stage):
        block.forward = halved(block, torch.compile(block.forward, dynamic=True), moe_blocks(block))


def _prefetch_next_block(stage: nn.Module) -> None:
    """Makes each block gather the weights of the next one before it computes, in both directions.
    FSDP's default gathers a block's weights in the forward when the host reaches the block, and in
    the backward for the block that ran before it: with several microbatches in flight, that may be
    a block of another one. Only of use if weights are freed between microbatches."""
    blocks: list[list[FSDPModule]] = [
        [module for module in block.modules() if isinstance(module, FSDPModule)] for block in _blocks(stage)
    ]
    for own, following in pairwise(blocks):
        own[0].set_modules_to_forward_prefetch(following)
        following[0].set_modules_to_backward_prefetch(own)


def _held_whole(stage: nn.Module, job: Job) -> set[nn.Parameter]:
    """Returns the frozen weights that products take as they are: they need no copies. Quantised
    weights that no two ranks share. Where one rank holds all its weights, also those that have the
    compute dtype."""
    shards = job.mesh.shards
    if shards > 1 and job.mesh.ep < shards:
        return set()
    parts = [stage] if shards == 1 else [part.experts for part in moe_blocks(stage)]
    held = {part.get_parameter(name) for part in parts for name, _ in stored_formats(part)}
    if shards == 1:
        dtype = compute_dtype(job)
        held |= {weight for weight in stage.parameters() if not weight.requires_grad and weight.dtype == dtype}
    return held


def _shard(stage: nn.Module, job: Job, data_mesh: DeviceMesh, expert_mesh: DeviceMesh | None) -> None:
    """Shards experts, blocks and the stage with FSDP2."""
    policy, dtypes = MixedPrecisionPolicy(), job.train.dtypes
    if dtypes.compute is not FP32:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype(job), reduce_dtype=torch_dtype(dtypes.reduce))
    settings: dict[str, Any] = {
        "mesh": data_mesh,
        "mp_policy": policy,
        "reshard_after_forward": job.mesh.reshard_after_forward,
    }
    settings["ignored_params"] = _held_whole(stage, job)
    with integer_weights():
        if expert_mesh is not None:
            for part in moe_blocks(stage):
                fully_shard(
                    part.experts, **{**settings, **expert_fsdp_settings(expert_mesh, apart=job.outer is not None)}
                )
        for block in _blocks(stage):
            fully_shard(block, **settings)
        fully_shard(stage, **settings)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            # Gradients are sums. They are divided by the global token count once, after the
            # schedule. gloo has no pre-multiplied sum, so force the plain one.
            module.set_force_sum_reduction_for_comms(True)
            if data_mesh.size() > 1:  # a rank alone would divide by 1, into one more buffer
                module.set_gradient_divide_factor(1.0)
    if data_mesh.device_type != "cpu" and job.mesh.reshard_after_forward:
        _prefetch_next_block(stage)


def _replica_sums(stage: nn.Module, job: Job, data_mesh: DeviceMesh) -> ReplicaSums | None:
    """Takes the sums over replicas from FSDP where that gains anything. On CUDA, FSDP sums on a
    separate stream, so its exact sums are beside the backward already. If every backward sums over
    shards, FSDP keeps these sums until the last one sums over replicas."""
    if data_mesh.ndim == 1 or job.reduces_each:
        return None
    int8, late = job.train.sync.kind == "int8", data_mesh.device_type == "cpu"
    if not job.train.dtypes.sums_in_place or not (int8 or late):
        return None
    return ReplicaSums(stage, int8=int8, late=late)


# Activation checkpointing: which intermediate results of a block are kept for the backward.

_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", SCALED_MM_OPERATOR)
_GROUPED = (GROUPED_MM_OPERATOR, SCALED_GROUPED_MM_OPERATOR, grouped_products.OPERATOR)
_MATRIX_PRODUCTS = frozenset((*_PRODUCTS, *_GROUPED))
_ATTENTION = (*ATTENTION_OPERATORS, "torch_attn::")


def recompute_blocks(stage: nn.Module, extent: str, *, own: bool = False) -> None:
    """Makes each block recompute activations in its backward.

    "full" and "offload" keep only the input of a block. "selective" also keeps the results of
    matrix products and of attention, which are most of the work, and recomputes the rest: norms,
    rotary encoding, SiLU, elementwise products. All give bitwise the same gradients as keeping
    everything.

    Selective recomputation does not surround the exchange of experts spread over ranks, but
    attention and the experts, so that rows on their way are kept, and not sent again.

    Only `forward` is replaced. A wrapper module would change parameter names. FSDP's hooks belong
    to `__call__`, so they stay outside the recomputed part. `extent`: as in the job file, but not
    "none". `own`: its layers are the user's own, and may multiply by other means than raypp's. Then
    selective recomputation watches every operator, which takes the host much longer.
    """
    for block in _blocks(stage):
        parts: list[Any] = [block]
        spread = [part.experts for part in moe_blocks(block) if part.exchange is not None]
        if extent == "selective" and spread:
            parts = [block.get_submodule(block.mixer_name), *spread]
        for part in parts:
            if own and extent == "selective":
                part.forward = _watched(part.forward)
            else:
                keeps, offloads = extent == "selective", extent == "offload"
                part.forward = recomputed(part.forward, keeps=keeps, offloads=offloads)


def recompute_within_compiled_blocks(stage: nn.Module) -> None:
    """Makes blocks recompute like "selective". Call it before they are compiled.

    Selective checkpointing watches every operator, which it cannot do in compiled code: there, the
    compiler must do it. The compiler does it only for a checkpoint that contains nothing it leaves
    uncompiled. So the checkpoint is put around the feed-forward of each block, the largest part
    without attention. Around it, the compiler recomputes norms and the rotary encoding by itself,
    because they are cheap, and attention keeps its inputs and results. Experts are not compiled;
    what they compute is recomputed as in `recompute_blocks`.

    Raises:
        RayppError: A block of an own model has no method `feed`.
    """
    for block in _blocks(stage):
        if not hasattr(block, "feed"):
            raise RayppError(
                f"{type(block).__name__} has no method feed, which train.activation_checkpointing selective "
                "recomputes in compiled blocks",
                "use train.activation_checkpointing full or none, or train.compile false",
            )
        experts: list[Any] = [part.experts for part in moe_blocks(block)]
        for part in experts:
            part.forward = recomputed(part.forward, keeps=True)
        if not experts:
            block.feed = _watched(block.feed)


def _blocks(stage: nn.Module) -> Iterator[Any]:
    yield from stage.get_submodule("model.layers").children()


def _watched(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward that recomputes like "selective" by torch's own means."""
    # Nothing in a block draws random numbers, so their state need not be kept. On CUDA, keeping it
    # costs copies and makes the host wait.
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": _operators_kept}
    return partial(checkpoint, forward, **settings)


def _policy(context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """Keeps the results of matrix products and attention."""
    name = operation.name().partition(".")[0]
    kept = name in _MATRIX_PRODUCTS or name.startswith(_ATTENTION)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


_operators_kept = partial(create_selective_checkpoint_contexts, _policy)
