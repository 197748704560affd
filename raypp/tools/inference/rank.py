"""One pipeline rank of a trained model: its stages, as far as decoding needs them, and weights."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from raypp.control.calls import Tell
from raypp.errors import CheckpointError, Problem
from raypp.job.job import Job
from raypp.job.precision import whole_precision
from raypp.planning.decision import ResolvedPipeline
from raypp.planning.resolve import resolve_pipeline
from raypp.rank.build import draw_weights
from raypp.rank.joining.cuda_settings import set_product_precision
from raypp.rank.joining.process_group import joined, pick_device
from raypp.records import Seat
from raypp.stages.models.stage import DecoderStage, build_stage
from raypp.stages.parallel.apply import compute_dtype, prepare_stage
from raypp.stages.parallel.attention_choice import choose_attention
from raypp.stages.parallel.rank_groups import make_groups
from raypp.stages.pipeline.decode import Choice, PipelineDecoder, Prompt, Repeats, length_that_changes_keys
from raypp.state.checkpoint.layout import commit_key
from raypp.state.checkpoint.load_checkpoint import load_checkpoint
from raypp.state.hf.initial_weights import load_from_hf
from raypp.state.hf.model_files import HfFiles, with_base_id
from raypp.state.hf.original import repeat_settings
from raypp.storage import open_store
from raypp.tools.inference.source import Source

HANG_S = 86_400.0
"""Ranks wait for each other this long: rank 0 may read large data, or wait for the next turn of a
conversation."""


@contextmanager
def open_decoder(source: Source, seat: Seat) -> Iterator[PipelineDecoder]:
    """Loads a rank's stages and joins the others. Collective over the pipeline. Raises JobError:
    see `Source.job` and `load_stages`. Raises CheckpointError: see `load_stages`."""
    rank, pp = seat.rank, seat.world_size
    # CPUs have no fast products in narrower dtypes, and fp32 holds every number of theirs.
    dtype = source.precision if seat.device == "cuda" else "fp32"
    job = source.job(pp, precision=whole_precision(dtype).name)
    device = pick_device(seat)
    if seat.device == "cuda":
        set_product_precision(tf32=job.train.tf32)
    kernel = choose_attention(job, device).kernel
    pipeline = resolve_pipeline(job)
    place: dict[str, Any] = {
        "stages": load_stages(source, job, pipeline, rank, device),
        "rank_of_stage": pipeline.rank_of_stage,
        "rank": rank,
        "hidden_size": job.model.hidden_size,
        "dtype": compute_dtype(job),
        "device": device,
        "kernel": kernel,
        "border": length_that_changes_keys(job.model),
        "repeats": Repeats(*repeat_settings(job.model)),
    }
    if pp == 1:
        yield PipelineDecoder(**place)
        return
    with joined(seat, HANG_S):
        groups = make_groups(seat.mesh_sizes, device.type)
        yield PipelineDecoder(**place, group=groups.forward, world=range(pp))


def decode(decoder: PipelineDecoder, settings: Mapping[str, Any], asked: Mapping[str, Any], tell: Tell) -> None:
    """Decodes the `prompts` of a turn with its `choice`. Rank 0 reports the tokens. Collective over
    the pipeline. `settings`: `ends`, ids that end a text, and `rows` that are decoded together."""
    prompts = [Prompt(tuple(tokens), limit) for tokens, limit in asked["prompts"]]
    tells = decoder.rank == 0

    def emit(prompt: int, token: int, finish: str | None) -> None:
        if tells:
            tell({"token": [prompt, token, finish]})

    decoder.run(prompts, Choice(**asked["choice"]), settings["ends"], emit, rows=settings["rows"])
    if tells and prompts:
        tell({"done": len(prompts)})


def load_stages(
    source: Source, job: Job, pipeline: ResolvedPipeline, rank: int, device: torch.device
) -> dict[int, DecoderStage]:
    """Builds the stages of a pipeline rank, by index, and loads them. No communication. `job`: from
    `Source.job`; its precision is the dtype of the weights, but for quantised ones. `pipeline`: the
    cut and the placement of the job. Raises JobError: `model.from_hf` names another base than the
    one the adapters belong to; CheckpointError: weights are missing, torn, or have other shapes;
    StoreError: the store does not answer."""
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
    return modules


def load_weights(source: Source, job: Job, stages: Sequence[nn.Module]) -> None:
    """Sets every weight of a rank's stages. No communication. Raises JobError: `model.from_hf`
    names another base than the one the adapters belong to. Raises CheckpointError: weights are
    missing, torn, or have other shapes. Raises StoreError: the store does not answer."""
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
        fault = "was removed before it was read: its run keeps the newest checkpoints only"
        fix = "run the command again, or resume the run with a larger checkpoint.keep"
        raise CheckpointError(Problem(source.place, fault, fix)) from None
