"""Describes each wrong value of a job as a problem that a user can fix. Finds the job's sections by
key path, says their types in words, and translates other trainers' names of keys."""

import difflib
import json
import math
import re
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from raypp.errors import Problem
from raypp.job import limits
from raypp.job.job import Job
from raypp.job.known_families import model_options
from raypp.job.section import KeyPath, Section, dotted, section_of

_PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def problems_of(error: ValidationError, document: Any) -> list[Problem]:
    """Returns one problem per wrong key, in the document's order. Merges the errors of a union."""
    problems: dict[KeyPath, Problem] = {}
    for details in error.errors(include_url=False):
        if details["loc"][-1:] == ("bool",) and isinstance(details["input"], dict):
            continue  # of a union with a section, whose own errors describe the mistake
        path = key_path(tuple(details["loc"]), document, missing=details["type"] == "missing")
        limit = details["ctx"]["le"] if details["type"] == "less_than_equal" else None
        beyond = limit is not None and is_limit(limit)
        if path in problems and not beyond:
            continue
        if beyond:
            problems[path] = _too_large(path, details["input"], limit)
        elif details["type"] == "extra_forbidden":
            problems[path] = unknown_key(path, document)
        elif details["type"] == "missing" and isinstance(path[-1], str):
            problems[path] = Problem(dotted(path), "is missing", f"add `{path[-1]}:` ({expected_at(path, document)})")
        elif details["type"] == "missing":
            problems[path[:-1]] = wrong_value(path[:-1], _value(path[:-1], document), document)
        else:
            problems[path] = wrong_value(path, details["input"], document)
    return list(problems.values())


def _too_large(path: KeyPath, value: Any, most: Any) -> Problem:
    words = f"{most:,}" if isinstance(most, int) else f"{most:g}"
    return Problem(dotted(path), f"must be at most {words}, is {shown(value)}", f"use a number up to {words}")


def key_path(location: KeyPath, document: Any, *, missing: bool = False) -> KeyPath:
    """Returns an error's location as a key path, without the names of union members."""
    path: list[str | int] = []
    for position, part in enumerate(location):
        last = position == len(location) - 1
        inside = part in document if isinstance(document, dict) else False
        if isinstance(document, list) and isinstance(part, int):
            inside = part < len(document)
        if inside:
            document = document[part]
        elif not (missing and last):
            continue
        path.append(part)
    return tuple(path)


def unknown_key(path: KeyPath, document: Any) -> Problem:
    """Describes an unknown key: suggests the closest, or the section that has it, or lists all."""
    name, section = str(path[-1]) if path else "", section_at(path[:-1], document)
    known = list(section.model_fields) if section else []
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    homes = [f"{key}.{name}" if key else name for key, other in all_sections() if name in other.model_fields]
    if theirs := translated(name):
        fix = theirs
    elif close:
        fix = f"did you mean {close[0]}?"
    elif len(homes) in (1, 2):
        fix = f"did you mean {' or '.join(homes)}?"
    elif theirs := translated_section(_value(path, document)):
        fix = theirs
    else:
        fix = f"remove it; {dotted(path[:-1]) or 'a job'} has: {', '.join(known)}"
    return Problem(dotted(path), "unknown key", fix)


def wrong_value(path: KeyPath, value: Any, document: Any) -> Problem:
    """Describes a value of the wrong type or out of range."""
    fault = f"must be {expected_at(path, document)}, is {shown(value)}"
    return Problem(dotted(path), fault, _fix(path, value, document))


def shown(value: Any) -> str:
    """Formats a value as it would appear in the file, truncated if long."""
    if value is None:
        return "null"
    if isinstance(value, str | float):
        text = repr(value)
    elif isinstance(value, dict):
        text = "a section of keys"
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "…"


def _fix(path: KeyPath, value: Any, document: Any) -> str:
    expected, name = expected_at(path, document), str(path[-1]) if path else ""
    info = field_at(path, document)
    listed = info or (field_at(path[:-1], document) if path and isinstance(path[-1], int) else None)
    literals = literals_of(listed.annotation) if listed else []
    if literals and isinstance(value, str):
        close = difflib.get_close_matches(value.lower(), literals, n=1, cutoff=0.5)
        if close:
            return f"did you mean {close[0]}?"
    if "whole number" in expected and isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"write {int(value)}"
    if "number" in expected and isinstance(value, str) and _number(value):
        return f"write it without quotes: {value.strip()}"
    if expected.startswith("text") and isinstance(value, bool | int | float):
        quoted = f"'{json.dumps(value)}'"
        return f'put it in quotes: {quoted} (in a shell: --set "{dotted(path)}={quoted}")'
    if expected == "true or false":
        return "write true" if str(value).lower() in ("yes", "on", "1") else "write true or false"
    if path == ("name",):
        slug = re.sub(r"[^a-z0-9]+", "-", str(value).lower()).strip("-")[:40]
        return f"for example `name: {slug or 'my-run'}`"
    if literals and "number" not in expected:
        return f"use {' or '.join(literals)}" if len(literals) < 3 else f"use one of {', '.join(literals)}"
    if info is not None and (section := section_of(info.annotation)) is not None:
        return f"put its keys below `{name}:`, indented ({', '.join(list(section.model_fields)[:4])} …)"
    default = info.get_default(call_default_factory=True) if info else PydanticUndefined
    if default is not PydanticUndefined and default is not None:
        return f"for example `{name}: {default if isinstance(default, str) else json.dumps(default)}`"
    sections = (path[:depth] for depth in range(len(path), 0, -1))
    of = next((dotted(part) for part in sections if section_at(part, document)), "")
    return f"see `raypp explain {of}`" if of else "see `raypp explain`"


def _number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _value(path: KeyPath, document: Any) -> Any:
    for part in path:
        document = document[part]
    return document


# The types of the sections, in words: also for `raypp explain`.


def words_of(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """Describes the values that a type accepts: `a whole number ≥ 1`, `ring or ulysses`."""
    if get_origin(annotation) is Annotated:
        inner, *extra = get_args(annotation)
        return words_of(inner, (*metadata, *extra))
    if any(getattr(constraint, "pattern", None) for constraint in _flat(metadata)):
        return "1 to 40 of a-z, 0-9 and -, not beginning with -"
    plain = {type(None), bool} & set(get_args(annotation)) or literals_of(annotation)
    if section_of(annotation) is not None and not plain:
        return "a section of keys"
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return one_of([str(value) for value in arguments])
    if origin in (Union, types.UnionType):
        members = sorted(arguments, key=lambda member: member is type(None))
        return one_of([words_of(member, metadata if member is not type(None) else ()) for member in members])
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"a list, each {words_of(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)}, each {words_of(arguments[0])}"
    if origin is list:
        return f"a list, each {words_of(arguments[0])}"
    if origin is dict:
        return "a section of names and texts"
    return _PLAIN.get(annotation, "a section of keys") + _bounds(metadata)


def literals_of(annotation: Any) -> list[str]:
    """Returns the literal values that an annotation accepts; empty if it accepts others."""
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    return [word for member in get_args(annotation) for word in literals_of(member)]


def item_section_of(annotation: Any) -> type[Section] | None:
    """Returns the section class of the items of a list; None for other values."""
    lists = (member for member in _members(annotation) if get_origin(member) is list)
    return next((section for member in lists if (section := section_of(get_args(member)[0]))), None)


def section_at(path: KeyPath, document: Any) -> type[Section] | None:
    """Returns the section class at a key path of the job, or of the items of a list there. That of
    `model` depends on the document's `model.kind`."""
    section: type[Section] | None = Job
    for part in path:
        if isinstance(part, int):
            continue
        info = section.model_fields.get(part) if section else None
        section = section_of(info.annotation) or item_section_of(info.annotation) if info else None
        if part == "model" and len(path) >= 1 and path[0] == "model":
            section = model_options(document.get("model") if isinstance(document, dict) else None)
    return section


def field_at(path: KeyPath, document: Any) -> FieldInfo | None:
    """Returns the field at a key path; None for an item of a list or an unknown key."""
    section = section_at(path[:-1], document) if path else None
    return section.model_fields.get(str(path[-1])) if section else None


def expected_at(path: KeyPath, document: Any) -> str:
    """Describes the values accepted at a key path; for an item of a list, those of its items."""
    info = field_at(path, document)
    if info is not None:
        return words_of(info.annotation, tuple(info.metadata))
    parent = field_at(path[:-1], document) if path else None
    if parent is None:
        return "another value"
    items = [member for member in _members(parent.annotation) if get_origin(member) in (tuple, list, dict)]
    kinds = [one for one in get_args(items[0]) if one is not Ellipsis] if items else []
    return words_of(kinds[-1]) if kinds else "another value"


def all_sections(key: str = "", section: type[Section] = Job) -> Iterator[tuple[str, type[Section]]]:
    """Yields a section and all within it, each with its dotted key: "" for the job itself."""
    yield key, section
    for name, info in section.model_fields.items():
        inner = section_of(info.annotation) or item_section_of(info.annotation)
        if inner is not None:
            yield from all_sections(f"{key}.{name}" if key else name, inner)


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def one_of(words: list[str]) -> str:
    """Returns words as a choice: `a, b or c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _flat(metadata: tuple[Any, ...]) -> Iterator[Any]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from _flat(tuple(item.metadata))
        else:
            yield item


def _bounds(metadata: tuple[Any, ...]) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [
        f"{sign} {bound:g}"
        for constraint in _flat(metadata)
        for name, sign in signs.items()
        if (bound := getattr(constraint, name, None)) is not None and not (name == "le" and is_limit(bound))
    ]
    return " " + " and ".join(bounds) if bounds else ""


def is_limit(bound: float) -> bool:
    """Whether an upper bound is one of `job.limits`, which no real job reaches."""
    return bound >= limits.STAGES


# What transformers, TRL, axolotl, LLaMA-Factory, torchtitan, Megatron-LM and DeepSpeed call the
# keys of a job. `docs/tasks/coming_from.md` has the same table.

_SHOWN, _LOOKED_AT = 3, 100
_TABLE = """
gradient_accumulation_steps gradient_accumulation accumulate_grad_batches = pipeline.microbatches
per_device_train_batch_size micro_batch_size_per_gpu train_micro_batch_size_per_gpu local_batch_size = train.micro_batch_size
batch_size global_batch_size train_batch_size total_batch_size = train.global_batch | rows of a step, of all replicas; or {tokens: …}
num_train_epochs num_epochs max_epochs = train.epochs | in place of train.steps
max_steps train_iters num_train_steps total_steps training_steps max_iters = train.steps
learning_rate max_lr peak_lr = train.optimizer.lr
lr_scheduler_type lr_scheduler scheduler lr_decay_style decay_type = train.lr_schedule.kind | cosine, linear, constant or wsd (warmup_stable_decay)
warmup_steps num_warmup_steps lr_warmup_iters lr_warmup_steps warmup_iters warmup_num_steps = train.lr_schedule.warmup_steps
warmup_ratio warmup_fraction lr_warmup_fraction warmup_proportion = train.lr_schedule.warmup_ratio
lr_decay_iters lr_decay_steps num_decay_steps wsd_decay_steps lr_wsd_decay_iters = train.lr_schedule.decay_steps | without the warm-up
min_lr min_lr_ratio min_lr_rate min_lr_factor cosine_min_lr_ratio = train.lr_schedule.min_ratio | the least rate divided by the largest
optim optimizer_type optimizer_name = train.optimizer.kind | adamw_torch is adamw; adamw_8bit is adamw with state: 8bit
loraplus_lr_ratio embedding_lr embedding_lr_scale decoupled_lr lr_groups param_groups = train.optimizer.groups | as [{match: lora_B, lr_factor: 16}]
adam_beta1 adam_beta2 beta1 beta2 = train.optimizer.betas | a list of both
adam_epsilon adam_eps = train.optimizer.eps
max_grad_norm clip_grad clip_grad_norm gradient_clipping gradient_clip_val grad_clip = train.clip_norm
bf16 mixed_precision precision dtype torch_dtype params_dtype model_dtype = train.precision | bf16 (mixed), bf16_pure or fp32
fp16 half = train.precision | fp16
loss_scale initial_scale_power init_scale loss_scale_window growth_interval = train.loss_scale | as {init: 65536, growth_interval: 2000}
fp8 fp8_format float8 = train.precision | as fp8
gradient_checkpointing use_gradient_checkpointing activation_checkpoint recompute_activations recompute_granularity = train.activation_checkpointing | full for true; selective is quicker
torch_compile use_compile = train.compile
attn_implementation flash_attention flash_attn use_flash_attn use_flash_attention_2 sdp_attention = train.attention | auto takes the quickest that is there
max_length max_seq_length max_seq_len cutoff_len sequence_len sequence_length seq_length block_size = data.seq_len ; sample_packing neat_packing = data.packing
train_on_inputs train_on_prompt mask_prompt assistant_only_loss completion_only_loss = data.loss | assistant, last or all
dataset datasets dataset_name dataset_path data_path dataset_dir train_file train_files = data.path | a file, a folder, a glob, s3://…; with kind: hf org/name
dataset_text_field text_column text_field = data.text_key
val_set_size val_size validation_split test_size = data.eval.fraction | a share of the documents
eval_steps eval_interval val_check_interval = train.eval_every_steps
template chat_template_jinja = data.chat_template | a file with a Jinja template
tokenizer_name tokenizer_name_or_path tokenizer_path tokenizer_model tokenizer_config = data.tokenizer | a tokenizer.json or its folder
tokens special_tokens add_tokens add_special_tokens new_special_tokens additional_special_tokens = data.added_tokens | a list, special unless {text: …, special: false}
model_name_or_path model_name model_path model_id base_model pretrained_model_name_or_path hf_assets_path = model.from_hf | a folder, or s3://…
num_hidden_layers n_layers n_layer = model.num_layers ; n_embd d_model = model.hidden_size ; intermediate_size ffn_hidden_size ffn_dim d_ff n_inner = model.ffn_size
num_attention_heads n_heads n_head = model.num_heads ; num_key_value_heads num_query_groups n_kv_heads = model.num_kv_heads ; kv_channels = model.head_dim ; max_position_embeddings = model.max_context
rms_norm_eps layer_norm_eps layernorm_epsilon norm_epsilon = model.norm_eps ; tie_word_embeddings = model.tie_embeddings
rope_scaling = model.rope | with rope_type as kind, original_max_position_embeddings as original_context
initializer_range init_method_std = model.init_std
adapter finetuning_type peft use_lora use_peft = model.lora | a section: {rank: 16, alpha: 32}
lora_r lora_rank r = model.lora.rank ; lora_alpha = model.lora.alpha ; lora_dropout = model.lora.dropout
target_modules lora_target lora_target_modules lora_target_linear = model.lora.targets | a list of names; all is [all-linear]
modules_to_save lora_modules_to_save additional_target = model.lora.also_train | embed_tokens, lm_head, norms
load_in_4bit load_in_8bit quantization_bit = model.lora.base | nf4 or int8
num_local_experts n_routed_experts = model.num_experts ; num_experts_per_tok moe_router_topk = model.experts_per_token ; moe_intermediate_size moe_ffn_hidden_size = model.expert_ffn_size
router_aux_loss_coef moe_aux_loss_coeff = model.aux_loss_weight
pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel_degree pp_size = mesh.pp
dp dp_size data_parallel_size data_parallel_replicate_degree num_gpus world_size = mesh.dp_replicate | ranks with a whole copy of the weights
fsdp_size dp_shard data_parallel_shard_degree zero_stage zero_optimization fsdp_config deepspeed = mesh.fsdp | the number of ranks that share weights and moments, as with ZeRO-3
context_parallel_size context_parallel_degree sequence_parallel_degree sequence_parallel_size = mesh.cp ; expert_parallel_size expert_model_parallel_size expert_parallel_degree = mesh.ep
tp tp_size tensor_parallel tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree = mesh.tp | ranks of one node; tokens are always spread over them
pipeline_parallel_schedule = pipeline.schedule
num_layers_per_virtual_pipeline_stage = pipeline.layers_per_stage | a list
load_best_model_at_end metric_for_best_model save_best save_best_model save_top_k = checkpoint.best | as {keep: 1}; then `raypp checkpoints export --best`
save_steps save_interval save_freq checkpoint_interval = checkpoint.every_steps ; save_total_limit keep_latest_k = checkpoint.keep
output_dir save_dir save_folder dump_folder checkpoint_dir = checkpoint.url | a folder that all nodes share, or s3://…; the run's name is added
report_to wandb_project use_wandb enable_wandb use_tensorboard = observe.trackers | [{kind: wandb}], or tensorboard
run_name experiment_name exp_name = name
ddp_timeout = recovery.hang_timeout_s
use_cpu no_cuda = resources.device | cpu
resume_from_checkpoint load_checkpoint = checkpoint.url | ! leave it out: `raypp submit JOB --resume` continues from the newest checkpoint
logging_steps log_interval log_freq = observe | ! leave it out: raypp records every step
num_workers dataloader_num_workers dataset_num_proc preprocessing_num_workers = data | ! leave it out: raypp reads ahead by itself; `raypp data tokenize --processes N` tokenises once
num_nodes nnodes nproc_per_node devices num_gpus_per_node = mesh | ! leave it out: the product of the axes of mesh is the number of GPUs
"""  # noqa: E501
"""Each: names = our key | how its value translates, where it is not the same; with `!` what
to do instead."""


def other_names() -> dict[str, tuple[str, str]]:
    """Returns our key for each name, and how the value translates; "" where it is the same."""
    names: dict[str, tuple[str, str]] = {}
    for line in _TABLE.strip().replace(" ; ", "\n").splitlines():
        theirs, _, ours = line.partition(" = ")
        key, _, how = ours.partition(" | ")
        names |= dict.fromkeys(theirs.split(), (key, how))
    return names


def translated(name: str) -> str:
    """Returns what to write for another trainer's name; "" if it is none."""
    names = other_names()
    close = difflib.get_close_matches(name.lower().replace("-", "_"), names, n=1, cutoff=0.9)
    if not close:
        return ""
    key, how = names[close[0]]
    return how[2:] if how.startswith("! ") else f"write {key}: {how or 'the same value'}"


def translated_section(value: Any) -> str:
    """Returns what to write for names in a section of another trainer; "" if it has none."""
    names = [str(name) for name in value] if isinstance(value, dict) else []
    found = [f"for {name} {words}" for name in names[:_LOOKED_AT] if (words := translated(name))]
    return "; ".join(found[:_SHOWN])
