"""Exports the adapters of a checkpoint as PEFT reads them. Without torch."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from safetensors.numpy import save

from raypp.errors import CheckpointError, JobError, Problem
from raypp.job.family import Weight, embedding, projection
from raypp.job.known_families import family_of
from raypp.job.lora import (
    ALL_LINEAR,
    Adapter,
    adapter_names,
    also_trained,
    in_files,
    matches,
    model_adapters,
    one_in_files,
)
from raypp.job.models import DecoderOptions
from raypp.state.checkpoint.arrays import Array, convert
from raypp.state.checkpoint.commit import Commit
from raypp.state.checkpoint.saved_tensors import SavedTensors
from raypp.state.hf.original import added_rows, saved_options
from raypp.storage import ObjectStore
from raypp.tools.export.export_model import Exported
from raypp.tools.export.tokenizer_files import tokenizer_files

_PREFIX = "base_model.model."
_TEXT, _WITHIN = f"{_PREFIX}model.", f"{_PREFIX}model.language_model."
"""How names of adapters begin: of a model of text, and of the text of a multimodal model."""
_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_GATE_UP = r".*\.gate_up_proj"
"""The experts' fused matrix in PEFT's patterns. Its adapter is those of gate and up together."""

_IN_TRANSFORMERS_5 = dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "gate_up_proj") | {"w2": "down_proj"}
"""The experts' matrices in transformers 5, by their names in files."""


def export_adapter(
    store: ObjectStore,
    commit: Commit,
    target: ObjectStore,
    *,
    base: str | None = None,
    job: Mapping[str, Any] | None = None,
    tokenizer: str | None = None,
    progress: Callable[[int], None] = lambda _bytes: None,
) -> Exported:
    """Writes adapter_model.safetensors, the tokenizer and, last, adapter_config.json, for PEFT.

    Experts have an adapter each, as in models of transformers 4. PEFT stacks them for transformers
    5 when it loads them. Experts that are one tensor in the model's files are one in PEFT's, too.

    Args:
        base: What they name as the adapters' base; None: `model.from_hf` of the commit's job.
        job: The run's resolved job, for its tokenizer; None: the commit's job.
        tokenizer: Another tokenizer: `bytes`, or the path of a tokenizer.json.

    Raises:
        JobError: The run trained no adapters, or the other tokenizer does not fit the model.
        DataError: The other tokenizer is missing or invalid.
        CheckpointError: An object is missing, torn or corrupt, or the checkpoint lacks an adapter.
    """
    options = saved_options(store, commit)
    lora = options.lora
    if lora is None:
        raise JobError(Problem("--adapter", f"{commit.run} trained all weights and has no adapters", "leave it out"))
    base = base or options.from_hf
    texts = tokenizer_files(job or commit.job, tokenizer, options, generation=False)
    adapters = _with_siblings(options)
    whole = options.original is not None and options.original.rest is not None
    if whole and any(adapter.stacked for adapter, _ in adapters.values()):
        fault = "PEFT has no names for adapters of experts within a multimodal model"
        raise JobError(Problem("--adapter", fault, "export with --merged"))
    saved = SavedTensors(store, commit)
    tensors = _tensors(adapters, saved) | _also_trained(options, saved)
    if whole:
        tensors = {name.replace(_TEXT, _WITHIN, 1): values for name, values in tensors.items()}
    data = save(tensors, {"format": "pt"})
    target.put(_WEIGHTS, data)
    progress(len(data))
    for key, content in texts.files.items():
        target.put(key, content)
    targets = _targets(options, adapters)
    if whole:  # a word would name matrices of the tower, too
        words = "|".join(map(re.escape, targets["target_modules"]))
        targets["target_modules"] = rf".*\.language_model\..*\.({words})"
    config = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "peft_type": "LORA",
        "r": lora.rank,
        "task_type": "CAUSAL_LM",
        **targets,
    }
    modules = {name.removeprefix(_PREFIX).rpartition(".")[0] for name in tensors if ".lora_" not in name}
    if modules:
        config["modules_to_save"] = sorted(modules if whole else {_last(module) for module in modules})
    target.put(_CONFIG, json.dumps(config, indent=2).encode())
    files = (_WEIGHTS, *texts.files, _CONFIG)
    remarks = list(texts.remarks)
    if grown := added_rows(options):
        fault = f"the base of the adapters has {grown} more rows than {base}, the mean of its rows"
        remarks.append(f"{fault}: add them to it, or export with --merged")
    return Exported(files, len(tensors), sum(tensor.nbytes for tensor in tensors.values()), tuple(remarks))


def _with_siblings(options: DecoderOptions) -> dict[str, tuple[Adapter, bool]]:
    """Returns the adapters that PEFT needs, by matrix, and whether each was trained. PEFT fuses the
    gate and up matrices of experts, and finds them only beside the down matrices."""
    adapters = model_adapters(options)
    assert options.lora is not None
    whole = options.model_copy(update={"lora": options.lora.model_copy(update={"targets": (ALL_LINEAR,)})})
    blocks = {name.rpartition(".")[0] for name, adapter in adapters.items() if adapter.stacked}
    return {
        name: (adapter, name in adapters)
        for name, adapter in model_adapters(whole).items()
        if name in adapters or (adapter.stacked and not one_in_files(name) and name.rpartition(".")[0] in blocks)
    }


def _targets(options: DecoderOptions, adapters: Mapping[str, tuple[Adapter, bool]]) -> dict[str, Any]:
    """Returns the keys of the config that say which matrices have adapters. PEFT takes dense
    matrices that are named as those of experts for experts. Where there are both, all are named as
    parameters. Experts that are one tensor in the files always are, and those it does not know."""
    lora, family = options.lora, family_of(options)
    assert lora is not None and family is not None
    everything = family.model_weights(options)
    experts = {name.rpartition(".")[2] for name, weight in everything.items() if weight.part == "experts"}
    dense = {name.removesuffix(".weight").rpartition(".")[2] for name in everything if name.endswith(".weight")}
    named = bool(experts & dense) or not family.hf.peft_names_experts

    def is_parameter(name: str) -> bool:
        return (named and _last(name) in experts) or one_in_files(name)

    parameters = [name for name in adapters if is_parameter(name)]
    modules = [name for name in adapters if name not in parameters]
    words = sorted({_last(name) for name in modules})
    if ALL_LINEAR not in lora.targets:
        targets = [target for target in lora.targets if any(matches(target, name) for name in modules)]
        added = {_last(name) for name in modules if not adapters[name][1]}
        words = [*targets, *sorted(added - {_last(target) for target in targets})]
    config: dict[str, Any] = {"target_modules": words}
    if parameters:
        names = [_parameter(name, everything) for name in parameters]
        config["target_parameters"] = list(dict.fromkeys(names))
        if any(name.endswith(".gate_up_proj") for name in names) and named:
            config["rank_pattern"] = {_GATE_UP: 2 * lora.rank}
            config["alpha_pattern"] = {_GATE_UP: 2 * lora.alpha}
    return config


def _parameter(matrix: str, everything: Mapping[str, Weight]) -> str:
    """Returns the name of a matrix's parameter in transformers 5."""
    if matrix not in everything:
        return f"{matrix}.weight"
    if one_in_files(matrix):
        return in_files(matrix)
    inside, _, name = matrix.rpartition(".")
    return f"{inside}.{_IN_TRANSFORMERS_5.get(name, name)}"


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _tensors(adapters: Mapping[str, tuple[Adapter, bool]], saved: SavedTensors) -> dict[str, Array]:
    """Returns the adapters by PEFT's names, in fp32. Those that were not trained are zero."""
    tensors: dict[str, Array] = {}
    for matrix, (adapter, trained) in adapters.items():
        weights = zip(("lora_A", "lora_B"), (adapter.a, adapter.b), adapter_names(matrix, adapter), strict=True)
        for part, weight, name in weights:
            values = _saved(name, saved) if trained else np.zeros(weight.shape, np.float32)
            tensors |= _by_peft_names(matrix, adapter, part, values, list(adapters))
    return tensors


def _also_trained(options: DecoderOptions, saved: SavedTensors) -> dict[str, Array]:
    """Returns what was trained beside the adapters, by PEFT's names, in fp32. Tied embeddings are
    there twice: PEFT unties them."""
    weights, end = {_PREFIX + name: _saved(name, saved) for name in also_trained(options)}, embedding(options).name
    if options.tie_embeddings and _PREFIX + end in weights:
        weights[_PREFIX + projection(options).name] = _saved(end, saved)
    return weights


def _saved(name: str, saved: SavedTensors) -> Array:
    info = saved.infos.get(name)
    if info is None:
        raise CheckpointError(Problem(name, "is not in the checkpoint"))
    return convert(saved.rows(name, 0, info.rows), info.dtype, "F32")


def _by_peft_names(
    matrix: str, adapter: Adapter, part: str, values: Array, matrices: Sequence[str]
) -> dict[str, Array]:
    """Returns A or B of a matrix by PEFT's names. `matrices` are all that have adapters."""
    if not adapter.stacked:
        return {f"{_PREFIX}{matrix}.{part}.weight": values}
    inside, _, name = matrix.rpartition(".")
    if not one_in_files(matrix):
        return {f"{_PREFIX}{inside}.{e}.{name}.{part}.weight": value for e, value in enumerate(values)}
    # PEFT wraps the block once per stack: the last one is outside.
    stacks = [other for other in matrices if other.rpartition(".")[0] == inside]
    depth = len(stacks) - 1 - stacks.index(matrix)
    flat = values.reshape(-1, values.shape[-1])  # [E · r, in]
    if part == "lora_B":
        flat = values.transpose(1, 2, 0).reshape(values.shape[1], -1)  # [out, r · E]
    return {f"{_PREFIX}{in_files(inside)}{'.base_layer' * depth}.{part}.weight": np.ascontiguousarray(flat)}
