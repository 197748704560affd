"""Checks of a job that go beyond types and need nothing but the job. `raypp.planning` checks what
depends on mesh, model and schedule together (layers per stage, microbatches)."""

import difflib
import math
import os
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from raypp.errors import DataError, JobError, Problem
from raypp.job.availability import Choice, named_kinds
from raypp.job.fp8 import fp8_problems
from raypp.job.job import BatchOptions, Job, SourceOptions
from raypp.job.known_families import FAMILIES, family_of, layer_rotary
from raypp.job.lora import adapted_stacks, check_targets, width_problems
from raypp.job.models import DecoderOptions, LatentOptions, RouterOptions
from raypp.job.optimizer_groups import check_groups
from raypp.job.paths import exists, is_glob, is_hub_name, is_remote
from raypp.job.precision import DTYPES
from raypp.job.rope import CONTEXT_FIXING, rope_problems
from raypp.job.tokenizer_file import MAKE_ONE, TOKENIZER, read_tokenizer, tokenizer_path, vocabulary
from raypp.job.trackers import check_trackers
from raypp.job.wrong_values import one_of, shown
from raypp.kinds import OPTIMIZERS, SourceKind, data_forms, known_source, store_kind
from raypp.registry import is_module
from raypp.untrusted.files import files_below, special_kind
from raypp.untrusted.text import visible

_MOST_PARTS = 1000
BYTE_IDS = 257
"""Ids of the `bytes` tokenizer: 0 to 255 are the bytes, 256 ends a document."""


def check_spec(job: Job, directory: Path | None = None) -> list[Problem]:
    """Returns all problems of a job on its own. `job`: with resolved paths, as of `load_job`.
    `directory`: of the job file, which the message about a missing file names."""
    problems = [problem for named in named_kinds(job) for problem in _kind(*named)]
    if job.include is not None:
        problems.append(Problem("include", "is for job files only", "write the key into the file"))
    problems += _stores(job)
    refused = {problem.key for problem in problems}
    problems += [problem for problem in (*_model(job), *_lora(job)) if problem.key not in refused]
    problems += [problem for problem in _data(job, directory) if problem.key not in refused]
    problems += _elastic(job)
    problems += _sync(job)
    problems += [*_rate(job), *_global_batch(job), *_best(job), *_spikes(job), *_end(job)]
    problems += check_trackers(job)
    if "train.optimizer.kind" not in refused:
        problems += _optimizer(job)
    return problems


def check_training(job: Job) -> list[Problem]:
    """Returns the problems of adapters, precision, optimizer and samples. Reads no file. `job`: one
    in which `check_spec` found no problem, then changed in mesh, row length, or these options."""
    sample = _sample(job, known_source(job.data.kind)) if job.train.sample is not None else ()
    return [*_lora(job), *_optimizer(job), *_sync(job), *sample]


def _kind(key: str, choice: Choice, value: str) -> Iterator[Problem]:
    if choice.works(value):
        if choice.is_own(value) and not value.endswith(".csv"):  # `planning` reads and checks a file of actions
            yield from _own(value, key, choice)
        return
    known, usable = choice.words(), choice.available()
    if value in known or choice.is_own(value):
        yield Problem(key, f"{value} is not available yet; available: {', '.join(usable)}", f"use {one_of(usable)}")
    else:
        close = difflib.get_close_matches(value.lower(), known, n=1)
        fix = f"did you mean {close[0]}?" if close else f"use {one_of(usable)}"
        yield Problem(key, f"there is no {shown(value)}; there are: {', '.join(known)}", fix)


def _own(value: str, key: str, choice: Choice) -> Iterator[Problem]:
    """Checks that a user's own module can be found, its source parsed, and its declaration read.
    Does not import it, which may take seconds."""
    module = value.partition(":")[0]
    try:
        if not is_module(module):
            fix = "install it, or put it beside the job file or on PYTHONPATH"
            yield Problem(key, f"cannot import {module!r} (from {value!r})", fix)
            return
        choice.registry.get(value, key=key)
    except JobError as error:
        yield from (replace(problem, key=key) for problem in error.problems)


def _stores(job: Job) -> Iterator[Problem]:
    paths = {"data.path": job.data.path, "data.eval.path": job.data.eval and job.data.eval.path}
    paths |= {f"data.parts[{index}].path": part.path for index, part in enumerate(job.data.parts or ())}
    for key, path in {**paths, "checkpoint.url": job.checkpoint.url}.items():
        try:
            if path and is_remote(path):
                store_kind(path, key=key)
        except JobError as error:
            yield from error.problems


def _elastic(job: Job) -> Iterator[Problem]:
    options, world = job.recovery.elastic_options, job.mesh.world
    if options is None:
        return
    if job.recovery.site_timeout_s is not None:
        key = "recovery.site_timeout_s"
        if job.recovery.elastic:
            fault = "recovery.elastic decides already when the run goes on without lost nodes, and on which mesh"
            yield Problem(key, fault, "remove one of the two")
        if job.outer is None or job.mesh.dp_replicate == 1:
            fault = "has no effect without replicas that train apart, of which some can go on without the others"
            fix = "use train.sync.kind: outer and mesh.dp_replicate of 2 or more, or recovery.elastic"
            yield Problem(key, fault, fix)
    most = world if options.max_ranks is None else min(options.max_ranks, world)
    if options.min_ranks > most:
        fault = f"{options.min_ranks} is more than the {most} ranks that the run may use"
        fix = f"use at most {most} (the mesh, or recovery.elastic.max_ranks)"
        yield Problem("recovery.elastic.min_ranks", fault, fix)


MOST_INT8_REPLICAS, MOST_INT4_REPLICAS = 7, 15
"""With more, sums in 8 or 4 bits send no less than exact ones: each replica sends its numbers to
every other."""


def _sync(job: Job) -> Iterator[Problem]:
    """Checks whether replicas can be kept one model as the job asks, and whether that helps."""
    key, replicas, train = "train.sync.kind", job.mesh.dp_replicate, job.train
    if train.sync.kind == "exact":
        return
    if train.sync.kind == "outer":
        yield from _outer(job)
        return
    if replicas == 1:
        fault = "int8 has no effect: mesh.dp_replicate is 1, so no gradients are summed over replicas"
        yield Problem(key, fault, "use exact, or mesh.dp_replicate of 2 or more")
    elif replicas > MOST_INT8_REPLICAS:
        fault = f"int8 saves nothing with {replicas} replicas: each sends its gradients to the {replicas - 1} others"
        yield Problem(key, fault, f"use exact, or mesh.dp_replicate of 2 to {MOST_INT8_REPLICAS} and more mesh.fsdp")
    if train.dtypes.narrow_weights:
        fault = (
            f"int8 needs fp32 gradients, but train.precision: {train.precision} has them in {train.dtypes.weights.name}"
        )
        yield Problem(key, fault, "use train.precision: bf16, which keeps fp32 weights, or exact")
    elif train.dtypes.scales_loss:
        fault = "int8 carries what rounding left to the next step, and fp16 may scale that one's loss differently"
        yield Problem(key, fault, "use exact, or train.precision: bf16 or fp32")
    elif job.reduces_each:
        fault = "each_microbatch would round the sums over replicas to int8 in every backward (train.sync)"
        yield Problem("mesh.reduce_gradients", fault, "use auto or last_microbatch, or train.sync.kind: exact")
    elif train.reduce_dtype != "fp32":
        fault = f"int8 needs gradients that are summed in fp32, but train.reduce_dtype is {train.reduce_dtype}"
        yield Problem(key, fault, "use train.reduce_dtype: fp32 (the messages are int8 in any case), or exact")
    if job.mesh.ep > 1:
        fault = f"int8 is not available with mesh.ep {job.mesh.ep}: experts are cut along other dims than their first"
        yield Problem(key, fault, "use exact, or mesh.ep: 1")


def _outer(job: Job) -> Iterator[Problem]:
    key, train, every = "train.sync.kind", job.train, job.train.sync.every
    if job.mesh.dp_replicate == 1:
        fault = "outer has no effect: mesh.dp_replicate is 1, so there are no replicas that could train apart"
        yield Problem(key, fault, "use exact, or mesh.dp_replicate of 2 or more")
    most = {"int8": MOST_INT8_REPLICAS, "int4": MOST_INT4_REPLICAS}.get(train.sync.compression)
    if most is not None and job.mesh.dp_replicate > most:
        fault = (
            f"{train.sync.compression} saves nothing with {job.mesh.dp_replicate} replicas: each sends to all others"
        )
        yield Problem("train.sync.compression", fault, f"use none, or mesh.dp_replicate of 2 to {most}")
    if train.dtypes.narrow_weights:
        fault = "outer needs fp32 weights: the changes of bf16 ones in few steps are lost in their rounding"
        yield Problem(key, fault, "use train.precision: bf16, which keeps fp32 weights, or exact")
    layers, parts = job.model.num_layers, train.sync.fragments
    if parts > layers and (job.model.from_hf is None or "num_layers" in job.model.model_fields_set):
        fault = f"{parts} is more than the {layers} layers of the model: they are what takes turns"
        yield Problem("train.sync.fragments", fault, f"use at most {layers}")
    if train.sync.every_steps == "auto":
        if not job.outer_intervals():
            whole = " and ".join(f"{name}: {steps}" for name, steps in job.at_outer_steps.items() if steps)
            fault = (
                f"no number of steps up to 500 fits {parts} fragments, {train.sync.overlap_steps} overlap_steps and "
            )
            fault += f"train.steps: {train.steps}" + (f", and divides {whole}" if whole else "")
            yield Problem("train.sync.every_steps", fault, "use fewer fragments and overlap_steps, or longer intervals")
        return
    if every % parts:
        fault = f"{every} steps cannot be divided among {parts} train.sync.fragments: each has its turn after as many"
        nearest = min(job.outer_intervals(), key=lambda steps: abs(steps - every), default=None)
        fix = f"use {f'{nearest}, or ' if nearest else ''}train.sync.fragments: {math.gcd(every, parts)}"
        yield Problem("train.sync.every_steps", fault, fix)
    elif train.sync.overlap_steps >= every // parts:
        fault = f"{train.sync.overlap_steps} steps are more than lie between two exchanges, {every // parts}"
        fix = f"use at most {every // parts - 1}, or a higher train.sync.every_steps"
        yield Problem("train.sync.overlap_steps", fault, fix)
    for name, steps in job.at_outer_steps.items():
        if steps % every:
            fault = f"{steps} is no multiple of train.sync.every_steps, {every}: in between, replicas differ"
            fix = f"use {-(-steps // every) * every}, or train.sync.every_steps: {math.gcd(steps, every)}"
            yield Problem(name, fault, fix)
    if every > train.steps:
        fault = f"{every} is more than the {train.steps} steps of the run: replicas would agree only at its end"
        yield Problem("train.sync.every_steps", fault, "use fewer, a tenth of train.steps or less")


def _optimizer(job: Job) -> Iterator[Problem]:
    """Checks that the optimizer can keep its state, and the weights, as the job asks."""
    if not math.log2(scale := job.train.loss_scale.init).is_integer():
        fault = f"{scale:g} is not a power of two, so scaling would round gradients"
        yield Problem("train.loss_scale.init", fault, f"use {2 ** round(math.log2(scale))}")
    name, kind = job.train.optimizer.kind, OPTIMIZERS.get(job.train.optimizer.kind)
    if job.train.optimizer.state == "8bit" and not kind.states_in_8bit:
        fix = f"use state: fp32, or kind: {one_of([one.name for one in OPTIMIZERS.usable() if one.states_in_8bit])}"
        yield Problem("train.optimizer.state", f"{name} cannot keep its state in 8 bits", fix)
    if "num_layers" in job.model.model_fields_set or job.model.from_hf is None:  # else names are unknown
        yield from check_groups(job)
        yield from fp8_problems(job)
    if job.train.dtypes.narrow_weights and not kind.bf16_weights:
        fault = f"{name} does not say that it updates weights that exist in bf16 only (OptimizerKind.bf16_weights)"
        usable = one_of([one.name for one in OPTIMIZERS.usable() if one.bf16_weights])
        yield Problem("train.precision", fault, f"use bf16, or train.optimizer.kind {usable}")


def _model(job: Job) -> Iterator[Problem]:
    model = job.model
    if model.from_hf is not None and "num_layers" not in model.model_fields_set:
        return  # the sizes are unknown until from_hf is read
    if isinstance(model, LatentOptions):
        pass  # its widths of heads are its own
    elif model.head_dim is None and model.hidden_size % model.num_heads:
        better = max(1, round(model.hidden_size / model.num_heads)) * model.num_heads
        fix = f"use a multiple of model.num_heads ({better}), or set model.head_dim"
        yield Problem("model.hidden_size", f"{model.hidden_size} is not divisible by {model.num_heads} heads", fix)
    elif model.dim_per_head % 2:
        key = "model.head_dim" if model.head_dim is not None else "model.hidden_size"
        fix = f"use an even width, for example {model.dim_per_head + 1} per head"
        yield Problem(key, f"the head width {model.dim_per_head} is odd; the rotary encoding needs an even one", fix)
    yield from _rope(model)
    yield from _of_other_families(model)
    if job.outer is not None and isinstance(model, RouterOptions) and model.router_bias_rate:
        fault = "replicas that train apart would have routers of their own (train.sync.kind outer)"
        yield Problem("model.router_bias_rate", fault, "use 0, or train.sync.kind exact")
    if model.num_heads % model.kv_heads:
        divisors = [n for n in range(1, model.num_heads + 1) if model.num_heads % n == 0]
        fault = f"{model.num_heads} query heads cannot be split evenly over {model.kv_heads} key/value heads"
        fix = f"use a divisor of model.num_heads: {one_of([str(n) for n in divisors])}"
        yield Problem("model.num_kv_heads", fault, fix)
    source = known_source(job.data.kind)
    bytes_used = job.data.tokenizer == "bytes" and source is not None and source.ids == "text"
    if bytes_used and model.vocab_size < BYTE_IDS:
        fault = f"{model.vocab_size} is too small: the bytes tokenizer has {BYTE_IDS} ids (256 bytes, end of document)"
        yield Problem("model.vocab_size", fault, f"use at least {BYTE_IDS}, for example 320")


def _lora(job: Job) -> Iterator[Problem]:
    lora = job.model.lora
    if lora is None:
        return
    if job.model.kind in FAMILIES:
        yield from check_targets(job.model)
    elif ":" in job.model.kind:
        fault = f"{job.model.kind} is your own code: raypp does not know which of its matrices get adapters"
        fix = "add adapters in your factory and freeze the rest (requires_grad_(False)), or use a family"
        yield Problem("model.lora", fault, f"{fix}: {one_of(list(FAMILIES))}")
    if lora.dropout and (stacks := sorted(adapted_stacks(job.model))):
        fault = f"{lora.dropout} is not available for matrices of experts; targets match {', '.join(stacks)}"
        yield Problem("model.lora.dropout", fault, "use 0, or targets without them, as [q_proj, v_proj]")
    if "num_layers" in job.model.model_fields_set or job.model.from_hf is None:  # else the sizes are unknown
        yield from width_problems(job.model)
    base, dtypes = DTYPES.get(lora.base), job.train.dtypes
    if base is not None and base is not dtypes.compute and base.bytes <= dtypes.compute.bytes:
        fault = f"{base.name} weights cannot be used with train.precision: {dtypes.name}"
        yield Problem("model.lora.base", fault, f"use train.precision: {base.name}, or base: {dtypes.compute.name}")
    if base is not None and base.bytes > dtypes.weights.bytes:
        kept = dtypes.weights.name
        fault = (
            f"{base.name} weights cannot be used with train.precision: {dtypes.name}, which keeps all weights in {kept}"
        )
        yield Problem("model.lora.base", fault, f"use base: {kept}, int8 or nf4, or train.precision: {kept}")


def _rope(model: DecoderOptions) -> Iterator[Problem]:
    rotary = next(filter(None, (layer_rotary(model, index) for index in range(model.num_layers))), None)
    if rotary is not None and rotary.width % 2 and model.dim_per_head % 2 == 0:
        fault = f"{rotary.width} of the {model.dim_per_head} dims of a head would be rotated: not an even number"
        share = math.ceil((rotary.width + 1) / model.dim_per_head * 1e4) / 1e4
        yield Problem("model.rotary_share", fault, f"use {share:g}")
    if model.rope is not None and model.rope.kind in CONTEXT_FIXING and model.max_context is not None:
        fault = f"transformers computes the frequencies of {model.rope.kind} from the context that an export declares"
        yield Problem("model.max_context", fault, "remove the key, or set model.rope.factor")
    if model.rope is not None and rotary is not None:
        yield from rope_problems(model.rope, rotary.width, "model.rope")


_OF_SOME = (
    "attention_bias", "mlp_bias", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "routed_scale",
    "expert_groups", "chosen_groups", "shared_experts", "dense_layers",
)  # fmt: skip
"""Fields of shared classes of options that not all of their families have."""


def _of_other_families(model: DecoderOptions) -> Iterator[Problem]:
    """Finds settings that the family of a model does not have."""
    family = family_of(model)
    own_width = model.head_dim is not None and model.head_dim * model.num_heads != model.hidden_size
    own_width = own_width and not isinstance(model, LatentOptions)
    if family is not None and own_width and "head_dim" not in family.hf.settings:
        fault = f"{model.head_dim} is not hidden_size / num_heads, which kind {model.kind} requires"
        yield Problem("model.head_dim", fault, "remove the key")
    for name in _OF_SOME:
        info = type(model).model_fields.get(name)
        if family is None or info is None or name in family.hf.settings or getattr(model, name) == info.default:
            continue
        others = ", ".join(kind for kind, other in FAMILIES.items() if name in other.hf.settings)
        yield Problem(f"model.{name}", f"kind {model.kind} does not have it", f"remove the key; {others} have it")


def _data(job: Job, directory: Path | None) -> Iterator[Problem]:
    data, source = job.data, known_source(job.data.kind)
    if source is not None and source.mixes:
        yield from _mixture(job)
        for index, part in enumerate(data.parts or ()):
            yield from _options(part, f"data.parts[{index}]", directory)
    else:
        yield from _options(data, "data", directory)
        if data.parts is not None:
            yield Problem("data.parts", f"kind {data.kind} has no parts", "use `kind: mixture`, or remove the key")
        if data.phases:
            yield Problem("data.phases", f"kind {data.kind} has no parts", "use `kind: mixture`, or remove the key")
    sources = [known_source(part.kind) for part in data.parts or ()] or [source]
    texts = [token.text for token in data.added_tokens]
    for index, text in enumerate(texts):
        if text in texts[:index]:
            yield Problem(f"data.added_tokens[{index}]", f"{visible(text)} is listed twice", "remove one of them")
    if texts and all(one is not None and one.ids == "model" for one in sources):
        yield Problem("data.added_tokens", f"data of kind {data.kind} have no tokenizer", "remove the key")
    if data.loss != "assistant" and all(one is not None and _plain_text(one) for one in sources):
        fault = f"has no effect: kind {data.kind} reads plain text, all of which carries loss"
        yield Problem("data.loss", fault, "use `kind: chat` or `kind: hf`, or remove the key")
    if source is not None and source.ids == "text" and data.tokenizer != "bytes":
        yield from _tokenizer(job, directory)
    if source is not None and "chat_template" in source.keys and data.chat_template is not None:
        yield from _local_file("data.chat_template", data.chat_template, directory)
    if data.eval is not None and (data.eval.fraction is None) == (data.eval.path is None):
        yield Problem("data.eval", "needs either a fraction or a path", "for example `eval: {fraction: 0.02}`")
    if job.train.eval_every_steps and data.eval is None:
        fix = "for example `eval: {fraction: 0.02}` under data, or leave the key out"
        yield Problem("train.eval_every_steps", "there is no held-out part to evaluate: data.eval is not set", fix)
    if data.max_document is not None and data.max_document >= data.seq_len and data.too_long == "cut":
        fault = f"{data.max_document} has no effect: documents are cut at data.seq_len, {data.seq_len}"
        yield Problem("data.max_document", fault, "use fewer tokens, or `too_long: drop`, or remove the key")
    if job.train.epochs is not None:
        if "steps" in job.train.model_fields_set:
            yield Problem("train.epochs", f"train.steps: {job.train.steps} is given, too", "leave out one of the two")
        if source is not None and source.mixes:
            fault = "a mixture has none: its parts end at different steps"
            yield Problem("train.epochs", fault, "use train.steps, and give data.parts their epochs")
    if job.train.sample is not None:
        yield from _sample(job, source)


def _mixture(job: Job) -> Iterator[Problem]:
    """Returns the problems of the parts with each other. Reads no file. Whether their budgets
    suffice is only known when the data is read (`raypp.rank.data.mixture`)."""
    data, parts = job.data, job.data.parts
    example = "for example `parts: [{weight: 2, kind: text, path: a.txt}, {weight: 1, kind: text, path: b.txt}]`"
    if not parts:
        yield Problem("data.parts", "is empty" if parts is not None else "is missing: a mixture has parts", example)
        return
    if len(parts) > _MOST_PARTS:
        fault = f"has {len(parts):,} parts; at most {_MOST_PARTS:,} are mixed"
        yield Problem("data.parts", fault, "join files of the same kind by a glob or a directory")
    if data.path is not None:
        yield Problem("data.path", "a mixture has no path of its own", "give each of data.parts its path")
    yield from _phases(job)
    for name in ("columns", "roles"):
        if getattr(data, name):
            yield Problem(f"data.{name}", "a mixture has none of its own", f"give each of data.parts its {name}")
    if data.eval is not None and data.eval.path is not None:
        fault = "a mixture holds out a fraction of each of its parts"
        yield Problem("data.eval.path", fault, "use `eval: {fraction: 0.02}`")
    names = [part.name for part in parts if part.name is not None]
    for index, part in enumerate(parts):
        key = f"data.parts[{index}]"
        source = known_source(part.kind)
        if source is not None and source.mixes:
            fault = "a mixture cannot be a part of a mixture"
            yield Problem(f"{key}.kind", fault, "list its parts here, with their weights multiplied by its weight")
        if part.epochs is not None and part.tokens is not None:
            yield Problem(f"{key}.tokens", "epochs are given, too", "leave out one of the two")
        if part.name is not None and names.count(part.name) > 1:
            yield Problem(f"{key}.name", f"another part is named {part.name!r}, too", "give each its own name")


def _phases(job: Job) -> Iterator[Problem]:
    """Checks the phases of a mixture: in order, within the run, and of parts with names."""
    named = [part.name for part in job.data.parts or () if part.name is not None]
    before = 1
    for index, phase in enumerate(job.data.phases):
        key = f"data.phases[{index}]"
        if phase.from_step <= before:
            fault = f"{phase.from_step} is not after {before}, where the phase before begins"
            yield Problem(f"{key}.from_step", fault, "list phases in the order of their steps")
        elif phase.from_step > job.train.steps:
            fault = f"{phase.from_step:,} is after the last of {job.train.steps:,} steps"
            yield Problem(f"{key}.from_step", fault, "use an earlier step, or remove the phase")
        before = max(before, phase.from_step)
        for name in phase.weights:
            if name not in named:
                fault = f"no part is named {shown(name)}; named are: {', '.join(named) or 'none'}"
                yield Problem(f"{key}.weights", fault, "give the part a `name` in data.parts")
        if all(name in named for name in phase.weights) and not any(job.data.weights_at(phase.from_step)):
            yield Problem(f"{key}.weights", "no part is left: all weights are 0", "leave one above 0")


def _global_batch(job: Job) -> Iterator[Problem]:
    rows, each = job.batch_rows, job.mesh.replicas * job.train.micro_batch_size
    if rows is None or job.rows_per_step == rows:
        return
    if rows % each == 0:
        fault = (
            f"{job.pipeline.microbatches} are {job.rows_per_step:,} rows of a step, but train.global_batch: {rows:g}"
        )
        yield Problem("pipeline.microbatches", fault, f"remove the key, or use {int(rows) // each}")
        return
    unit = job.data.seq_len if isinstance(job.train.global_batch, BatchOptions) else 1
    near = [int(rows // each) * each * unit, (int(rows // each) + 1) * each * unit]
    what = f"{rows:g} rows" if unit == 1 else f"{rows * unit:,.0f} tokens, {rows:g} rows of {unit:,},"
    fault = f"{what} cannot be divided: {job.mesh.replicas} replicas (mesh.dp_replicate · mesh.fsdp) take "
    fault += f"{job.train.micro_batch_size} (train.micro_batch_size) at a time"
    fix = f"use {' or '.join(str(one) for one in near if one)}, or another train.micro_batch_size"
    yield Problem("train.global_batch" + (".tokens" if unit > 1 else ""), fault, fix)


def _best(job: Job) -> Iterator[Problem]:
    saves, evaluates = job.checkpoint.every_steps, job.train.eval_every_steps
    if job.checkpoint.best is None:
        return
    if not evaluates:
        fix = "set train.eval_every_steps and data.eval, or remove the key"
        yield Problem("checkpoint.best", "nothing is evaluated: train.eval_every_steps is 0", fix)
    elif saves and saves % evaluates and evaluates % saves:
        fault = f"evaluations every {evaluates} steps and saves every {saves} (checkpoint.every_steps) rarely meet"
        yield Problem("checkpoint.best", fault, f"use train.eval_every_steps: {saves}, or a divisor or multiple of it")


def _spikes(job: Job) -> Iterator[Problem]:
    """Checks that spikes are looked for which are acted on."""
    if job.recovery.on_spike == "continue":
        return
    if job.recovery.spike_factor is None:
        fault = f"{job.recovery.on_spike} has no effect: recovery.spike_factor is null"
        yield Problem("recovery.on_spike", fault, "set recovery.spike_factor, for example 3")
    if job.outer is not None:
        fault = f"{job.recovery.on_spike} is not available where replicas train apart (train.sync.kind: outer)"
        yield Problem("recovery.on_spike", fault, "use continue")


def _end(job: Job) -> Iterator[Problem]:
    key, options = "observe.on_end", job.observe.on_end
    if options is None:
        return
    if not options.url and not options.command:
        yield Problem(key, "names neither a url nor a command", "for example {url: https://example.org/runs}")
    try:
        shlex.split(options.command or "")
    except ValueError as error:
        yield Problem(f"{key}.command", f"cannot be split into words: {error}", "close the quotation marks")


def _rate(job: Job) -> Iterator[Problem]:
    schedule, key = job.train.lr_schedule, "train.lr_schedule"
    if schedule.warmup_ratio is not None and schedule.warmup_steps is not None:
        fault = f"warmup_steps: {schedule.warmup_steps} is given, too"
        yield Problem(f"{key}.warmup_ratio", fault, "leave out one of the two")
    if schedule.decay_steps is not None and schedule.kind == "constant":
        fault = "has no effect: a constant rate does not fall"
        yield Problem(f"{key}.decay_steps", fault, "use kind: wsd, or remove the key")
    first, length = job.train.decay
    if schedule.kind == "wsd" and first < job.train.warmup_steps:
        fault = f"{length} steps before the end of {job.train.steps}, the rate still rises: the warm-up has "
        fix = f"use at most {max(1, job.train.steps - job.train.warmup_steps)}, or a shorter warm-up"
        yield Problem(f"{key}.decay_steps", f"{fault}{job.train.warmup_steps}", fix)


def _sample(job: Job, source: SourceKind | None) -> Iterator[Problem]:
    """Checks whether the ranks can continue texts, and whether these fit."""
    sample, data = job.train.sample, job.data
    assert sample is not None
    refused = [
        (job.mesh.cp > 1, f"mesh.cp {job.mesh.cp} cuts rows over ranks, and decoding needs them whole"),
        (job.mesh.ep > 1, f"mesh.ep {job.mesh.ep} spreads experts over ranks, which decoding does not support"),
        (job.train.compiles, "train.compile compiles blocks for training only"),
    ]
    never = [
        (":" in job.model.kind, f"{job.model.kind} is a model of your own, whose attention has no cache"),
        (source is not None and source.ids == "model", f"data of kind {data.kind} have no tokenizer"),
    ]
    for cases, more in ((refused, ", and use `raypp generate` on a checkpoint"), (never, "")):
        for wrong, fault in cases:
            if wrong:
                yield Problem("train.sample", f"cannot sample here: {fault}", f"leave train.sample out{more}")
    if data.tokenizer == "bytes":
        for index, prompt in enumerate(sample.prompts):
            tokens, new = len(prompt.encode(errors="replace")), sample.max_new_tokens
            if tokens + new > data.seq_len:
                fault = f"has {tokens} tokens: with {new} new ones it exceeds data.seq_len, {data.seq_len}"
                fix = "shorten it, or lower train.sample.max_new_tokens"
                yield Problem(f"train.sample.prompts[{index}]", fault, fix)


def _plain_text(source: SourceKind) -> bool:
    """Whether a source of raypp's own has no rows of conversations."""
    return source.ids == "text" and not source.mixes and ":" not in source.name and "loss" not in source.keys


def _options(options: SourceOptions, key: str, directory: Path | None) -> Iterator[Problem]:
    source = known_source(options.kind)
    if source is None:
        return
    if source.endings and options.path is None:
        fix = f"set it to {data_forms()}; or use `kind: synthetic` to train without data"
        yield Problem(f"{key}.path", f"is missing: kind {options.kind} reads files", fix)
    elif source.endings and options.path is not None and not (source.hub and is_hub_name(options.path)):
        yield from _file(f"{key}.path", options.path, directory)
    for name in ("columns", "roles"):
        if getattr(options, name) and _plain_text(source):
            fault = f"has no effect: kind {options.kind} reads plain text"
            yield Problem(f"{key}.{name}", fault, "use `kind: chat` or `kind: hf`, or remove the key")
    if "document_len" in source.keys and options.document_len[0] > options.document_len[1]:
        shortest, longest = options.document_len
        fix = f"write [{longest}, {shortest}]"
        yield Problem(f"{key}.document_len", f"the shortest document ({shortest}) is longer than the longest", fix)


def _file(key: str, path: str, directory: Path | None) -> Iterator[Problem]:
    if is_remote(path):
        return
    if not exists(path):
        noun = "nothing matches" if is_glob(path) else "there is no"
        if Path(path).is_absolute():
            yield Problem(key, f"{noun} {visible(path)}", "check the path")
            return
        places = [str(Path.cwd())] + ([str(directory)] if directory and directory != Path.cwd() else [])
        fix = f"check the path; searched {' and '.join(places)}"
        yield Problem(key, f"{noun} {visible(path)}", fix)
    elif kind := special_kind(Path(path)):
        yield Problem(key, f"{visible(path)} is {kind}", "name a regular file, or a directory")
    elif os.path.isfile(path) and os.path.getsize(path) == 0:  # noqa: PTH113, PTH202 - false where not allowed
        yield Problem(key, f"{visible(path)} is empty", "name a file that contains text")
    elif os.path.isdir(path) and not any(map(os.path.isfile, files_below(Path(path)))):  # noqa: PTH112
        yield Problem(key, f"the directory {visible(path)} contains no files", "name a directory that contains files")


def _local_file(key: str, path: str, directory: Path | None) -> Iterator[Problem]:
    if is_remote(path):
        fix = "copy the file to this machine, and name that path"
        yield Problem(key, f"{visible(path)} is a URL, and this must be a file", fix)
    else:
        yield from _file(key, path, directory)


def _tokenizer(job: Job, directory: Path | None) -> Iterator[Problem]:
    path = job.data.tokenizer if is_remote(job.data.tokenizer) else str(tokenizer_path(job.data.tokenizer))
    if missing := list(_local_file("data.tokenizer", path, directory)):
        folder = Path(path).parent
        if Path(path).name == TOKENIZER and not is_remote(path) and folder.is_dir():
            fault = f"the folder {visible(folder)} has no {TOKENIZER}"
            missing = [Problem("data.tokenizer", fault, MAKE_ONE)]
        yield from missing
        return
    try:
        vocabulary(read_tokenizer(Path(path)), Path(path))
    except DataError as error:
        yield from error.problems
