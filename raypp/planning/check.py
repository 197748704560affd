"""Checks mesh, model, cut and schedule together, before anything is reserved."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from raypp.errors import JobError, Problem
from raypp.job.family import Shape
from raypp.job.job import Job
from raypp.job.known_families import family_of
from raypp.job.limits import RANKS
from raypp.job.lora import layer_adapters, quantised_base
from raypp.job.models import MoeOptions, with_experts
from raypp.job.precision import BF16, DTYPES, FP16, FP32
from raypp.planning.cut import most_stages
from raypp.planning.geometry import divisors
from raypp.planning.memory import MOMENTS_BLOCK
from raypp.planning.resolve import cut_of, lookahead_of, schedule_of
from raypp.planning.schedules.catalogue import schedule_named, size_problems, too_large

_LISTED = 64
"""More stages than this are not listed one by one."""


def check_plan(job: Job) -> list[Problem]:
    """Returns all problems of a job's mesh, cut and schedule, with the nearest values that work."""
    problems = list(_sizes(job))
    if problems:
        return problems  # nothing else can be computed for such a job
    problems += _schedule(job)
    problems += _cut(job)
    problems += _axes(job)
    problems += wire_problems(job)
    problems += _blocks(job)
    reduce, compute = job.train.dtypes.reduce, job.train.dtypes.compute
    if reduce is not FP32 and reduce is not compute:
        fault = f"{reduce.name} sums would lose the precision of {compute.name} gradients"
        fix = f"use train.precision {reduce.name}, or leave train.reduce_dtype at {FP32.name}"
        problems.append(Problem("train.reduce_dtype", fault, fix))
    return problems


def _sizes(job: Job) -> Iterator[Problem]:
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
        problems = list(_own_cut(job, job.pipeline.layers_per_stage))
        yield from problems or _parted(job, job.pipeline.layers_per_stage)
        return
    try:
        cut = cut_of(job)
    except JobError as error:
        yield from error.problems
        return
    yield from _parted(job, cut)


def _parted(job: Job, cut: Sequence[int]) -> Iterator[Problem]:
    """Finds cuts between layers that must be on one stage."""
    together = job.model.uncut()
    borders = [border for border in accumulate(cut[:-1]) if together.start < border < together.stop]
    if borders:
        fault = f"a cut before layer {borders[0]} parts layers {together.start} to {together.stop - 1}, which compute "
        fault += "for each other (K and V, or per-layer embeddings)"
        fix = "use mesh.pp 1 and pipeline.stages_per_rank 1"
        if together.start:
            fix += f", or pipeline.layers_per_stage with {len(together)} or more layers on the last stage"
        yield Problem("pipeline.layers_per_stage", fault, fix)


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
        fault = f"{terms} = {sum(cut)} layers, {abs(sum(cut) - layers)} {more} than model.num_layers"
        yield Problem(key, f"{fault} ({layers})", f"make them sum to {layers}, {example}")


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
    shard = mesh.shards
    if shard % mesh.ep:
        near = _near(mesh.ep, divisors(shard))
        fault = f"{mesh.ep} does not divide mesh.fsdp · mesh.cp = {shard}"
        yield Problem("mesh.ep", fault, f"use {near}, or make mesh.fsdp · mesh.cp a multiple of {mesh.ep}")
    elif mesh.ep > 1 and with_experts(model) is None:
        yield Problem("mesh.ep", f"{model.kind} has no experts to split over {mesh.ep} ranks", "use mesh.ep 1")
    elif (routed := with_experts(model)) is not None:
        yield from _experts(routed, mesh.ep, shard)
    if mesh.cp > 1:
        yield from _context(job)
    if mesh.tp > 1:
        yield from _tensor(job)


def _experts(model: MoeOptions, ep: int, shard: int) -> Iterator[Problem]:
    """Finds problems of splitting experts over `ep` of the `shard` ranks that share the weights."""
    if model.experts_per_token > model.num_experts:
        fault = f"{model.experts_per_token} is more than model.num_experts = {model.num_experts}"
        yield Problem("model.experts_per_token", fault, f"use at most {model.num_experts}")

    stacks = _stacks(model)

    def uncut(rest: int) -> _Stack | None:
        return next((stack for stack in stacks if all(width % rest for width in stack.cuttable)), None)

    rests = {d: shard // d for d in divisors(shard) if model.num_experts % d == 0}
    near = _near(ep, [d for d, rest in rests.items() if d == 1 or uncut(rest) is None])
    if model.num_experts % ep:
        yield Problem("mesh.ep", f"{ep} does not divide model.num_experts = {model.num_experts}", f"use {near}")
    elif ep > 1 and (stack := uncut(shard // ep)) is not None:
        rest = shard // ep
        fault = (
            f"{ep} leaves {rest} ranks of mesh.fsdp · mesh.cp to split each expert over, but {stack.name} cannot be "
        )
        fault += f"cut into {rest} equal parts"
        base = quantised_base(model)
        fault += f": matrices in {base} are cut between rows" if base is not None and not stack.trained else ""
        fix = f"use {near}, or make one of its widths a multiple of {rest}"
        yield Problem("mesh.ep", f"{fault} ({_widths(model)})", fix)


@dataclass(frozen=True)
class _Stack:
    """One parameter of all experts of a layer. `cuttable`: lengths of the dims that may be cut over
    ranks. `trained`: it has moments."""

    name: str
    shape: Shape
    cuttable: Shape
    trained: bool


def _stacks(model: MoeOptions) -> list[_Stack]:
    """Returns the parameters of experts in any layer, by distinct shape."""
    family, frozen = family_of(model), model.lora is not None
    rows_only = quantised_base(model) is not None
    stacks: dict[tuple[str, Shape], _Stack] = {}
    if family is None:
        return []
    for index in range(model.num_layers):
        parts = [(weight, not frozen) for weight in family.weights(model, index) if weight.part == "experts"]
        adapters = [adapter for adapter in layer_adapters(model, index) if adapter.stacked]
        parts += [(weight, True) for adapter in adapters for weight in (adapter.a, adapter.b)]
        for weight, trained in parts:
            shape = tuple(weight.shape[1:])
            cuttable = shape[:1] if rows_only and not trained else shape
            stacks[weight.name, shape] = _Stack(weight.name, shape, cuttable, trained)
    return list(stacks.values())


def _widths(model: MoeOptions) -> str:
    rank = "" if model.lora is None else f", model.lora.rank {model.lora.rank}"
    return f"model.expert_ffn_size {model.expert_ffn_size}, model.hidden_size {model.hidden_size}{rank}"


def _blocks(job: Job) -> Iterator[Problem]:
    """Finds experts whose rows several ranks would share within a block of 8-bit moments."""
    model, rest = with_experts(job.model), job.mesh.shards // job.mesh.ep
    if job.train.optimizer.state != "8bit" or job.mesh.ep == 1 or rest <= 1 or model is None:
        return
    for stack in _stacks(model):
        # FSDP cuts experts by rows where it can, else by columns. A bias has columns only.
        by_rows, columns = len(stack.shape) > 1 and stack.shape[0] % rest == 0, stack.shape[-1]
        if stack.trained and not by_rows and columns % (rest * MOMENTS_BLOCK):
            fault = (
                f"8bit needs whole blocks of {MOMENTS_BLOCK} values on each rank, but the {rest} ranks that share an "
                f"expert would cut {stack.name} into parts of {columns} columns, not whole blocks ({_widths(model)})"
            )
            yield Problem("train.optimizer.state", fault, f"use mesh.ep {job.mesh.shards}, or state: fp32")
            return


def _context(job: Job) -> Iterator[Problem]:
    mesh, multiple = job.mesh, job.pipeline.pad_to_multiple_of
    heads = job.model.num_heads // mesh.tp
    if mesh.cp_style == "ulysses" and heads % mesh.cp:
        fault = f"{heads} query heads cannot be split over {mesh.cp} ranks (ulysses)"
        yield Problem("mesh.cp", fault, f"use {_near(mesh.cp, divisors(heads))}, or mesh.cp_style ring")
    if mesh.cp_style == "ring" and multiple % 2:
        fault = f"{multiple} is odd, but each rank's part of a row has two chunks of equal length (mesh.cp_style ring)"
        yield Problem("pipeline.pad_to_multiple_of", fault, f"use {multiple + 1}, or mesh.cp_style ulysses")
    parts = 2 if mesh.cp_style == "ring" else 1
    rules = map(job.model.state_rule, range(job.model.num_layers))
    reach = max((rule.kernel - 1 for rule in rules if rule is not None), default=0)
    if multiple < parts * reach:
        fault = f"{multiple} allows parts of rows of {multiple // parts} tokens on a rank (mesh.cp), but the "
        fault += f"convolution of {job.model.kind} reads {reach} tokens of the part before"
        yield Problem("pipeline.pad_to_multiple_of", fault, f"use at least {parts * reach}")


def _tensor(job: Job) -> Iterator[Problem]:
    """Finds what the ranks of a tp group cannot share."""
    model, tp, family = job.model, job.mesh.tp, family_of(job.model)
    indices = range(model.num_layers) if family is not None else range(0)
    layers = [] if family is None else [(family.layer(model, index), model.of_layer(index)) for index in indices]
    rules = [rule for index in indices if (rule := model.state_rule(index)) is not None]
    sizes = {("model.num_heads", model.num_heads)}
    sizes |= {(f"model.{key}", size) for rule in rules for key, size in rule.divided.items()}
    sizes |= {("model.ffn_size", own.ffn_size) for layer, own in layers if not layer.routes}
    whole = any(layer.whole_norms for layer, _ in layers)  # of all heads, of which each rank then has its own
    keys = {own.kv_heads for _, own in layers}

    def undivided(by: int) -> list[str]:
        few = [("model.num_kv_heads", count) for count in keys if count % by and (whole or by % count)]
        return [f"{key} = {size}" for key, size in sorted([*few, *((k, n) for k, n in sizes if n % by)])]

    if faults := undivided(tp):
        near = _near(tp, [one for one in divisors(model.num_heads) if not undivided(one)])
        fix = f"use {near}, or share the weights by mesh.fsdp"
        yield Problem("mesh.tp", f"{tp} does not divide {', '.join(faults)}", fix)
    refused = [
        (family is None, f"{model.kind} is a model of your own, whose matrices raypp cannot cut"),
        (job.train.sync.kind == "int8", "sums over replicas are in int8 (train.sync.kind)"),
    ]
    for wrong, fault in refused:
        if wrong:
            yield Problem("mesh.tp", f"{fault}, which does not work with mesh.tp {tp}", "use mesh.tp 1 and mesh.fsdp")
    weights = {} if family is None or job.train.optimizer.state != "8bit" else family.model_weights(model)
    cut = {one.shape[-1] // tp for one in weights.values() if one.residual and one.part != "experts"}
    if wrong_widths := [str(width) for width in sorted(cut) if width % MOMENTS_BLOCK]:
        fault = f"8bit needs whole blocks of {MOMENTS_BLOCK} values on a rank, and mesh.tp {tp} cuts rows at "
        yield Problem("train.optimizer.state", fault + " and ".join(wrong_widths), "use state: fp32, or mesh.tp 1")


def _near(value: int, allowed: Iterable[int]) -> str:
    values = sorted(allowed)
    below = [v for v in values if v < value][-1:]
    above = [v for v in values if v > value][:1]
    return " or ".join(map(str, below + above)) or "1"


def wire_problems(job: Job) -> Iterator[Problem]:
    """Finds settings of `pipeline.wire` that are contradictory or have no effect."""
    wire, compute = job.pipeline.wire, job.train.dtypes.compute
    asked = {wire.of("activations"), wire.of("gradients")}
    if DTYPES.get(wire.dtype, compute).bytes > compute.bytes:
        fault = f"{wire.dtype} would double the size of messages that are computed in {compute.name}, "
        fault += "without gaining precision"
        yield Problem("pipeline.wire.dtype", fault, "use auto")
    if wire.dtype != "auto" and "none" not in asked:
        fault = f"{wire.dtype} applies to messages that are not compressed, but all are ({' and '.join(sorted(asked))})"
        yield Problem("pipeline.wire.dtype", fault, "use auto, or pipeline.wire.compression none")
    if compute is FP16 and (wire.dtype == BF16.name or BF16.name in asked):
        key = "dtype" if wire.dtype == BF16.name else "compression"
        fault = "bf16 has as many bytes as the messages, which are computed in fp16, and fewer digits"
        yield Problem(f"pipeline.wire.{key}", fault, "use auto" if key == "dtype" else "use none or int8")
    if compute.name in asked:
        fault = f"messages already travel in {compute.name}, because they are computed in it (train.precision)"
        yield Problem("pipeline.wire.compression", fault, "use none or int8")
    if "bf16" in asked and wire.dtype == "fp32":
        fault = "bf16 contradicts pipeline.wire.dtype fp32"
        yield Problem("pipeline.wire.compression", fault, "keep one of the two and remove the other")
