"""Checks mesh, model, cut and schedule together, before anything is reserved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import isqrt

from raypp.errors import JobError, Problem
from raypp.mesh.cut import most_stages, no_layer
from raypp.planning.choices import cut_of, lookahead_of, schedule_of
from raypp.planning.end_weights import end_weights
from raypp.planning.stored_bytes import BLOCK
from raypp.planning.wire_checks import wire_problems
from raypp.schedules.action import splits_backward
from raypp.schedules.catalogue import build_program, schedule_named, size_problems, too_large
from raypp.spec.job import Job
from raypp.spec.limits import RANKS
from raypp.spec.lora import model_adapters
from raypp.spec.models import MoeOptions
from raypp.spec.quantised import quantised_base

_LISTED = 64
"""More stages than this are not listed one by one."""


def check_plan(job: Job) -> list[Problem]:
    """Returns all problems of a job's mesh, cut and schedule.

    Each names its key and the nearest values that work.
    """
    problems = list(_sizes(job))
    if problems:
        return problems  # nothing else can be computed for such a job
    problems += _schedule(job)
    problems += _cut(job)
    problems += _axes(job)
    problems += wire_problems(job)
    problems += _blocks(job)
    if job.train.activation_checkpointing == "selective" and not job.train.compile:
        problems += _selective(job)
    if job.train.reduce_dtype == "bf16" and job.train.precision == "fp32":
        fix = "use train.precision bf16, or leave train.reduce_dtype at fp32"
        problems.append(Problem("train.reduce_dtype", "bf16 sums would lose the precision of fp32 gradients", fix))
    return problems


def _sizes(job: Job) -> Iterator[Problem]:
    """Finds sizes beyond the limits of a run."""
    world = job.mesh.world
    if world > RANKS:
        yield Problem("mesh", f"has {world:,} ranks; at most {RANKS:,} are possible", "use a smaller mesh")
    yield from too_large(job.mesh.pp, job.pipeline.stages_per_rank, job.pipeline.microbatches)


def _schedule(job: Job) -> Iterator[Problem]:
    name = schedule_of(job)
    try:
        schedule = schedule_named(name)
    except JobError as error:
        yield from error.problems
        return
    pipeline = job.pipeline
    problems = size_problems(schedule, job.mesh.pp, pipeline.stages_per_rank, pipeline.microbatches)
    yield from problems
    if schedule.own and not problems:
        try:
            schedule.build()(job.mesh.pp, pipeline.stages_per_rank, pipeline.microbatches, lookahead_of(job))
        except JobError as error:
            yield from error.problems


def _cut(job: Job) -> Iterator[Problem]:
    if job.pipeline.layers_per_stage is not None:
        yield from _own_cut(job, job.pipeline.layers_per_stage)
        return
    try:
        cut_of(job)
    except JobError:
        yield no_layer(job.model.num_layers, job.num_stages, *end_weights(job), job.pipeline.stages_per_rank)


def _own_cut(job: Job, cut: list[int]) -> Iterator[Problem]:
    key, layers, stages = "pipeline.layers_per_stage", job.model.num_layers, job.num_stages
    example = f"for example {_example(job)}, or leave the key out"
    if len(cut) != stages:
        per_rank = job.pipeline.stages_per_rank
        of = f"mesh.pp {job.mesh.pp}" + (f" · {per_rank} stages per rank" if per_rank > 1 else "")
        given = f"{len(cut)} number{'' if len(cut) == 1 else 's'} for {stages} stages ({of})"
        yield Problem(key, given, f"give {stages} numbers, {example}")
        return
    empty = [stage for stage, count in enumerate(cut) if count == 0]
    if empty:
        yield Problem(key, f"stage {empty[0]} has no layers", f"give every stage at least one, {example}")
    if sum(cut) != layers:
        more = "more" if sum(cut) > layers else "fewer"
        terms = " + ".join(map(str, cut)) if len(cut) <= _LISTED else f"{len(cut)} stages"
        what = f"{terms} = {sum(cut)} layers, {abs(sum(cut) - layers)} {more} than model.num_layers"
        yield Problem(key, f"{what} ({layers})", f"make them sum to {layers}, {example}")


def _example(job: Job) -> str:
    stages = job.num_stages
    if most_stages(job.model.num_layers, 0, 0) < stages:
        return f"mesh.pp {max(1, job.model.num_layers // job.pipeline.stages_per_rank)}"
    each, rest = divmod(job.model.num_layers, stages)
    if stages > _LISTED:
        return f"{each + 1} for {rest} stages and {each} for the others" if rest else f"{each} for each"
    return str([each + (stage < rest) for stage in range(stages)])


def _axes(job: Job) -> Iterator[Problem]:
    mesh, model = job.mesh, job.model
    shard = mesh.fsdp * mesh.cp
    if shard % mesh.ep:
        near = _near(mesh.ep, divisors(shard))
        what = f"{mesh.ep} does not divide mesh.fsdp · mesh.cp = {shard}"
        yield Problem("mesh.ep", what, f"use {near}, or make mesh.fsdp · mesh.cp a multiple of {mesh.ep}")
    elif mesh.ep > 1 and not isinstance(model, MoeOptions):
        yield Problem("mesh.ep", f"{model.kind} has no experts to split over {mesh.ep} ranks", "use mesh.ep 1")
    elif isinstance(model, MoeOptions):
        yield from _experts(model, mesh.ep, shard)
    if mesh.cp > 1:
        yield from _context(job)


def _experts(model: MoeOptions, ep: int, shard: int) -> Iterator[Problem]:
    """Finds problems of splitting experts over `ep` of the `shard` ranks that share the weights."""
    if model.experts_per_token > model.num_experts:
        what = f"{model.experts_per_token} is more than model.num_experts = {model.num_experts}"
        yield Problem("model.experts_per_token", what, f"use at most {model.num_experts}")

    base = quantised_base(model)
    adapted = any(adapter.stacked for adapter in model_adapters(model).values())

    def cuts(rest: int) -> bool:
        inner, width = model.expert_ffn_size % rest == 0, model.hidden_size % rest == 0
        if base is not None or (adapted and model.lora is not None and model.lora.rank % rest):
            return inner and width
        return inner or width

    near = _near(ep, [d for d in divisors(shard) if model.num_experts % d == 0 and (d == 1 or cuts(shard // d))])
    if model.num_experts % ep:
        yield Problem("mesh.ep", f"{ep} does not divide model.num_experts = {model.num_experts}", f"use {near}")
    elif ep > 1 and not cuts(shard // ep):
        what = f"{ep} leaves {shard // ep} ranks of mesh.fsdp · mesh.cp to split each expert over, but neither "
        widths = f"model.expert_ffn_size {model.expert_ffn_size} nor model.hidden_size {model.hidden_size}"
        what += f"{widths} is divisible by {shard // ep}"
        if adapted and model.lora is not None and model.lora.rank % (shard // ep):
            what = f"{what.partition(', but')[0]}: model.lora.rank, or both model.expert_ffn_size and model.hidden_size"
            what += f", must be divisible by {shard // ep}"
        if base is not None:
            what = f"{what.partition(', but')[0]}, but matrices in {base} are cut between rows: "
            what += f"{widths.replace(' nor ', ' and ')} must be divisible by {shard // ep}"
        yield Problem("mesh.ep", what, f"use {near}, or make one of the widths a multiple of {shard // ep}")


def _blocks(job: Job) -> Iterator[Problem]:
    """Finds experts whose rows several ranks would share within a block of 8-bit moments."""
    model, rest = job.model, job.mesh.fsdp * job.mesh.cp // job.mesh.ep
    if job.train.optimizer.state != "8bit" or job.mesh.ep == 1 or not isinstance(model, MoeOptions):
        return
    # FSDP cuts experts [E, rows, columns] by rows where it can, else by columns.
    widths = {"expert_ffn_size": model.expert_ffn_size, "hidden_size": model.hidden_size}
    for (name, rows), columns in zip(widths.items(), reversed(widths.values()), strict=True):
        if rows % rest and columns % (rest * BLOCK):
            what = f"8bit needs whole blocks of {BLOCK} values on each rank, but the {rest} ranks that share an expert "
            what += f"cannot cut model.{name} {rows} evenly, and {columns} columns not into such blocks"
            yield Problem("train.optimizer.state", what, f"use mesh.ep {job.mesh.fsdp * job.mesh.cp}, or state: fp32")
            return


def _context(job: Job) -> Iterator[Problem]:
    mesh, heads, multiple = job.mesh, job.model.num_heads, job.pipeline.pad_to_multiple_of
    if mesh.cp_style == "ulysses" and heads % mesh.cp:
        what = f"{heads} query heads cannot be split over {mesh.cp} ranks (ulysses)"
        yield Problem("mesh.cp", what, f"use {_near(mesh.cp, divisors(heads))}, or mesh.cp_style ring")
    if mesh.cp_style == "ring" and multiple % 2:
        what = f"{multiple} is odd, but each rank's part of a row has two chunks of equal length (mesh.cp_style ring)"
        yield Problem("pipeline.pad_to_multiple_of", what, f"use {multiple + 1}, or mesh.cp_style ulysses")


def _selective(job: Job) -> Iterator[Problem]:
    try:
        program = build_program(
            schedule_of(job), job.mesh.pp, job.pipeline.stages_per_rank, job.pipeline.microbatches, lookahead_of(job)
        )
    except JobError:
        return  # reported by _schedule
    if splits_backward(program):
        what = "selective checkpointing allows one backward per block, but"
        what += f" pipeline.schedule {schedule_of(job)} computes the gradients of inputs and weights separately"
        fix = "use full or none, or a schedule with whole backwards, for example 1f1b"
        yield Problem("train.activation_checkpointing", what, fix)


def divisors(number: int) -> list[int]:
    """Returns the divisors of a positive number, ascending."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def _near(value: int, allowed: Iterable[int]) -> str:
    """Returns the nearest allowed values below and above."""
    values = sorted(allowed)
    below = [v for v in values if v < value][-1:]
    above = [v for v in values if v > value][:1]
    return " or ".join(map(str, below + above)) or "1"
