"""Builds a rank's stages and their runtime, and keeps frozen weights between two attempts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from raypp.job.job import Job
from raypp.job.lora import trains_part
from raypp.planning.decision import ResolvedPipeline
from raypp.records import Coordinates, Progress, no_progress
from raypp.stages.models.initial_values import initialise
from raypp.stages.models.loss import token_loss_sum
from raypp.stages.models.stage import build_stage
from raypp.stages.parallel.apply import compute_dtype, prepare_stage
from raypp.stages.parallel.rank_groups import RankGroups
from raypp.stages.parallel.replica_sums import ReplicaSums
from raypp.stages.parallel.shard import local_part, local_rows
from raypp.stages.pipeline.link_probe import Channels
from raypp.stages.pipeline.planned_stage import PlannedStage
from raypp.stages.pipeline.runtime import ProgramRuntime
from raypp.stages.pipeline.tied import TiedEmbedding
from raypp.stages.pipeline.wire import message_seed, wire_format


@dataclass(frozen=True)
class BuiltStages:
    """This rank's part of the model. `tied`: sums gradients of tied embeddings; None without."""

    modules: list[nn.Module]
    runtime: ProgramRuntime
    tied: TiedEmbedding | None = None

    @property
    def replica_sums(self) -> list[ReplicaSums]:
        """The sums over replicas that FSDP does not take, of these stages."""
        return [stage.replica_sums for stage in self.runtime.planned.values() if stage.replica_sums is not None]


def draw_weights(
    stages: Iterable[nn.Module],
    job: Job,
    *,
    frozen: bool | None = None,
    skip: Collection[str] = (),
    progress: Progress = no_progress,
) -> None:
    """Initialises the weights of a new run. No communication; the bits are the same on any mesh.
    `frozen`: True: only frozen weights. False: only those that are trained. None: all. `skip`:
    names of weights that have their values."""
    for stage in stages:
        initialise(stage, job.model, job.train.seed, local_rows, frozen=frozen, skip=skip, progress=progress)


def build_stages(
    job: Job,
    pipeline: ResolvedPipeline,
    groups: RankGroups,
    device: torch.device,
    mark: Callable[[str], None],
    *,
    draw: bool = True,
    kept: Mapping[str, Tensor] | None = None,
) -> BuiltStages:
    """Builds and shards this rank's stages, and compiles the job's program onto them. Collective
    over the rank's data mesh. Allocates memory for this rank's stages only. `draw`: True:
    initialise the weights (`draw_weights`). False: the caller must set every one of them. `kept`:
    this rank's part of weights that have their values, by global name."""
    layers, ranks = pipeline.layers_of_stage, pipeline.rank_of_stage
    held = pipeline.stages_of_rank[groups.coordinates.pp]
    data_mesh = groups.data_mesh
    if data_mesh is None and job.fsdp_alone:
        data_mesh = groups.mesh["fsdp"]

    place = groups.coordinates
    modules, stages = [], []
    for index in held:
        module = build_stage(job.model, layers[index], first=index == 0, last=index == len(layers) - 1)
        prepared = prepare_stage(module, job, data_mesh, device, groups, kept)
        module = prepared.module
        if draw:
            draw_weights([module], job)
        modules.append(module)
        stages.append(
            PlannedStage(
                module,
                index,
                len(layers),
                rank_of_stage=ranks,
                hidden_size=job.model.hidden_size,
                dtype=compute_dtype(job),
                device=device,
                up_group=groups.forward,
                down_group=groups.backward,
                activations=wire_format(pipeline.wire.activations),
                gradients=wire_format(pipeline.wire.gradients),
                seed=message_seed(job.train.seed, *place.column),
                replica_sums=prepared.replica_sums,
                replicated=job.summed_replicas > 1,
                frees_weights=job.mesh.reshard_after_forward,
                reduces_each=job.reduces_each,
                below_trains=any(pipeline.trained[:index]),
            )
        )
    if job.mesh.pp > 1:
        Channels(place.pp, ranks, groups.forward, groups.backward, device).connect()
    offload = None
    if job.train.activation_checkpointing == "offload":
        from raypp.stages.pipeline.activation_offload import ActivationOffload

        offload = ActivationOffload(device)
    runtime = ProgramRuntime(
        stages, pipeline.program, ranks, pipeline.microbatches, token_loss_sum, mark, offload=offload
    )
    tied = None
    if job.model.tie_embeddings and trains_part(job.model, "embed_tokens"):
        tied = TiedEmbedding(dict(zip(held, modules, strict=True)), ranks, job.mesh.pp)
    return BuiltStages(modules, runtime, tied)


# Reading and quantising a large base takes minutes. A process that survives a restart keeps it if
# the next attempt has the same base, cut and place in the mesh.


@dataclass(frozen=True)
class FrozenPart:
    """Which frozen weights a rank holds, and from which base; equal ones have equal values. `job`:
    what determines the values and how they are cut. `files`: name, size and time of every file of
    the base; empty: the weights are drawn. `place`: the rank's coordinates, without that of its
    replica, and its device."""

    job: str
    files: tuple[tuple[str, int, float], ...]
    layers: tuple[range, ...]
    place: tuple[Coordinates, str]

    @staticmethod
    def of(job: Job, layers: Sequence[range], place: Coordinates, device: str) -> FrozenPart | None:
        """Returns the part of a rank; None without frozen weights. Raises StoreError: the store of
        `model.from_hf` does not answer."""
        model, mesh = job.model, job.mesh.model_copy(update={"dp_replicate": 1})
        if model.lora is None:
            return None
        files: tuple[tuple[str, int, float], ...] = ()
        if model.from_hf is not None:
            from raypp.state.hf.model_files import HfFiles  # only runs with model.from_hf import it

            files = tuple(sorted((info.key, info.size, info.modified) for info in HfFiles(model.from_hf).listed()))
        what = f"{model.model_dump_json()} {mesh.model_dump_json()} {job.train.precision} {job.train.seed}"
        return FrozenPart(what, files, tuple(layers), (replace(place, dp_replicate=0), device))


_kept: tuple[FrozenPart, dict[str, Tensor]] | None = None


def keep_frozen(part: FrozenPart | None, stages: Sequence[nn.Module]) -> None:
    """Keeps the frozen weights of a rank's stages, which all have their values."""
    global _kept
    named = [(name, weight) for stage in stages for name, weight in stage.named_parameters()]
    held = {name: local_part(weight).detach() for name, weight in named if not weight.requires_grad}
    _kept = (part, held) if part is not None else None


def take_frozen(part: FrozenPart | None) -> Mapping[str, Tensor]:
    """Returns this rank's part of the kept weights, by global name, and keeps them no longer."""
    global _kept
    kept, _kept = _kept, None
    return kept[1] if kept is not None and kept[0] == part else {}


def forget_frozen() -> None:
    """Frees the kept weights: they may be bad."""
    global _kept
    _kept = None
