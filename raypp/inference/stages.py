"""Builds a rank's stages of a trained model and loads their weights. Nothing of them is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from raypp.checkpoint.layout import commit_key
from raypp.checkpoint.load_checkpoint import load_checkpoint
from raypp.errors import CheckpointError, Problem
from raypp.hf.base_identity import with_base_id
from raypp.hf.initial_weights import load_from_hf
from raypp.hf.model_files import HfFiles
from raypp.inference.source import Source
from raypp.models.stage import DecoderStage, build_stage
from raypp.parallel.apply import compute_dtype, prepare_stage
from raypp.planning.resolve import ResolvedPipeline, resolve_pipeline
from raypp.spec.job import Job
from raypp.storage import open_store
from raypp.train.build import draw_weights


@dataclass(frozen=True)
class LoadedStages:
    """A rank's part of a trained model.

    Attributes:
        pipeline: The cut and the placement.
        modules: This rank's stages by index.
    """

    pipeline: ResolvedPipeline
    modules: dict[int, DecoderStage]


def load_stages(source: Source, job: Job, rank: int, device: torch.device) -> LoadedStages:
    """Builds the stages of a pipeline rank, and loads them. No communication.

    Args:
        source: The model.
        job: From `Source.job`; its precision is the dtype of the weights, but for quantised ones.
        rank: The pipeline rank.
        device: The device that computes.

    Raises:
        JobError: `model.from_hf` names another base than the one the adapters belong to.
        CheckpointError: Weights are missing, torn, or have other shapes.
        StoreError: The store does not answer.
    """
    pipeline = resolve_pipeline(job)
    last = pipeline.num_stages - 1
    modules: dict[int, DecoderStage] = {}
    for index in pipeline.stages_of_rank[rank]:
        layers = pipeline.layers_of_stage[index]
        stage = build_stage(job.model, layers, first=index == 0, last=index == last)
        assert isinstance(stage, DecoderStage)
        prepared = prepare_stage(stage, job, None, device).module
        assert isinstance(prepared, DecoderStage)
        modules[index] = prepared
    stages = list(modules.values())
    load_weights(source, job, stages)
    for stage in stages:
        stage.requires_grad_(False).eval()
        for parameter in stage.parameters():
            if parameter.is_floating_point():  # the frozen ones of model.lora may be in bf16
                parameter.data = parameter.data.to(compute_dtype(job))
    return LoadedStages(pipeline, modules)


def load_weights(source: Source, job: Job, stages: Sequence[nn.Module]) -> None:
    """Sets every weight of a rank's stages. No communication.

    Raises:
        JobError: `model.from_hf` names another base than the one the adapters belong to.
        CheckpointError: Weights are missing, torn, or have other shapes; or the checkpoint was
            removed.
        StoreError: The store does not answer.
    """
    model = job.model
    if source.store is None:
        assert model.from_hf is not None
        load_from_hf(model.from_hf, stages)
        return
    if model.lora is not None and model.from_hf is not None:
        with_base_id(model, HfFiles(model.from_hf))
        load_from_hf(model.from_hf, stages, frozen=True)
    elif model.lora is not None:
        draw_weights(stages, job, frozen=True)
    store = open_store(source.store)
    try:
        load_checkpoint(store, source.run, source.step, stages, None)
    except CheckpointError:
        if store.head(commit_key(source.run, source.step)) is not None:
            raise
        what = "was removed before it was read: its run keeps the newest checkpoints only"
        fix = "run the command again, or resume the run with a larger checkpoint.keep"
        raise CheckpointError(Problem(source.place, what, fix)) from None
