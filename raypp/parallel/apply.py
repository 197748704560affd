"""What is done to a stage between building it and training it, in the one order that works.

0. experts are spread over ranks, each keeps its share
1. torch.compile takes each block's forward
2. activation checkpointing wraps that (inside FSDP, so that recomputation sees plain modules)
3. FSDP2 shards each block, then the stage itself, which must be the root that the pipeline calls
4. memory is taken on the device, and only then
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from raypp.parallel.expert import expert_fsdp_settings, moe_blocks, spread_experts
from raypp.parallel.late_sums import LateSums, sum_by_parts
from raypp.parallel.rank_groups import RankGroups
from raypp.parallel.recompute import recompute_blocks
from raypp.spec.job import Job


@dataclass(frozen=True)
class PreparedStage:
    """A stage that can be trained.

    Attributes:
        module: Its module.
        late_sums: Its gradient sums, to be waited for at the end of a step; None where FSDP's own are used.
    """

    module: nn.Module
    late_sums: LateSums | None


def compute_dtype(job: Job) -> torch.dtype:
    """The dtype of activations, also of those sent between stages.

    What a job calls fp32 is torch's default dtype. Tests set that to fp64, in which no rounding hides a wrong sum.
    """
    return torch.bfloat16 if job.train.precision == "bf16" else torch.get_default_dtype()


def prepare_stage(
    stage: nn.Module, job: Job, data_mesh: DeviceMesh | None, device: torch.device, groups: RankGroups | None = None
) -> PreparedStage:
    """Applies the job's parallelism to a stage built on meta and gives it (uninitialised) memory.

    Args:
        stage: From `models.stage.build_stage`.
        job: The job.
        data_mesh: Where weights are sharded; None leaves a plain module (fp32 only).
        device: Where the weights live.
        groups: Where experts are spread over, and what shares a microbatch; None: neither.
    """
    expert_mesh = groups.experts if groups is not None else None
    if expert_mesh is not None:
        spread_experts(stage, expert_mesh)
    if groups is not None and groups.context is not None:
        for block in moe_blocks(stage):
            block.microbatch_group = groups.context[0]
    if job.train.compile:
        _compile_blocks(stage)
    if job.train.activation_checkpointing != "none":
        recompute_blocks(stage, job.train.activation_checkpointing)
    late_sums = None if data_mesh is None else _shard(stage, job, data_mesh, expert_mesh)
    return PreparedStage(stage.to_empty(device=device), late_sums)


def _compile_blocks(stage: nn.Module) -> None:
    """Compiles each block's forward (not its call: FSDP's hooks stay outside), for any length from the start on."""
    for block in stage.get_submodule("model.layers").children():
        block.forward = torch.compile(block.forward, dynamic=True)


def _shard(stage: nn.Module, job: Job, data_mesh: DeviceMesh, expert_mesh: DeviceMesh | None) -> LateSums | None:
    policy = MixedPrecisionPolicy()
    if job.train.precision == "bf16":
        reduce_dtype = torch.bfloat16 if job.train.reduce_dtype == "bf16" else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    settings: dict[str, Any] = {
        "mesh": data_mesh,
        "mp_policy": policy,
        "reshard_after_forward": job.mesh.reshard_after_forward,
    }
    if expert_mesh is not None:
        for part in moe_blocks(stage):
            fully_shard(part.experts, **{**settings, **expert_fsdp_settings(expert_mesh)})
    for block in stage.get_submodule("model.layers").children():
        fully_shard(block, **settings)
    fully_shard(stage, **settings)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            # Gradients are sums here; the division by the global token count comes once, after the schedule.
            # gloo has no pre-multiplied sum, so the plain one is asked for by name.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if data_mesh.device_type != "cpu":
        return None
    return sum_by_parts(stage, late=data_mesh.ndim == 1 and job.train.reduce_dtype == "fp32")
