"""Exports the adapters of a checkpoint as PEFT reads them. Without torch."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
from safetensors.numpy import save

from raypp.checkpoint.arrays import Array, convert
from raypp.checkpoint.commit import Commit
from raypp.checkpoint.saved_tensors import SavedTensors
from raypp.errors import CheckpointError, JobError, Problem
from raypp.hf.export_model import Exported, saved_options
from raypp.spec.families import family_of
from raypp.spec.lora import ALL_LINEAR, Adapter, adapter_names, in_files, matches, model_adapters
from raypp.spec.models import DecoderOptions
from raypp.storage import ObjectStore

_PREFIX = "base_model.model."
_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"


def export_adapter(
    store: ObjectStore, commit: Commit, target: ObjectStore, *, progress: Callable[[int], None] = lambda _bytes: None
) -> Exported:
    """Writes adapter_model.safetensors and, last, adapter_config.json, as PEFT reads them.

    Experts have an adapter each, as in models of transformers 4. PEFT stacks them for transformers
    5 when it loads them. Experts that are one tensor in the model's files are one in PEFT's, too.

    Args:
        store: Opened at the job's checkpoint.url.
        commit: The checkpoint's COMMIT.
        target: The store for the exported files.
        progress: Called with the bytes written since its last call.

    Raises:
        JobError: The run trained no adapters.
        CheckpointError: An object is missing, torn or corrupt, or the checkpoint lacks an adapter.
    """
    options = saved_options(commit)
    lora = options.lora
    if lora is None:
        raise JobError(Problem("--adapter", f"{commit.run} trained all weights, no adapters", "leave it out"))
    tensors = _tensors(options, SavedTensors(store, commit))
    data = save(tensors, {"format": "pt"})
    target.put(_WEIGHTS, data)
    progress(len(data))
    adapters = model_adapters(options)
    parameters = {name: adapter for name, adapter in adapters.items() if _is_parameter(options, name, adapter)}
    modules = [name for name in adapters if name not in parameters]
    names: list[str] = sorted({name.rpartition(".")[2] for name in modules})
    if ALL_LINEAR not in lora.targets:
        names = [target for target in lora.targets if any(matches(target, name) for name in modules)]
    config = {
        "base_model_name_or_path": options.from_hf,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": names,
        "target_parameters": [
            in_files(name) if adapter.stacked else f"{name}.weight" for name, adapter in parameters.items()
        ],
        "task_type": "CAUSAL_LM",
    }
    target.put(_CONFIG, json.dumps(config, indent=2).encode())
    return Exported((_WEIGHTS, _CONFIG), len(tensors), sum(tensor.nbytes for tensor in tensors.values()), ())


def _is_parameter(options: DecoderOptions, matrix: str, adapter: Adapter) -> bool:
    """Whether PEFT finds a matrix by the name of its parameter only.

    These are experts that are one tensor in the files, too. And PEFT takes a module that has the
    name of the experts' matrices for them.
    """
    if adapter.stacked:
        return adapter.transposed
    family = family_of(options)
    stacks = family.model_weights(options).items() if family is not None else ()
    word = matrix.rpartition(".")[2]
    return any(weight.part == "experts" and name.endswith(f".{word}") for name, weight in stacks)


def _tensors(options: DecoderOptions, saved: SavedTensors) -> dict[str, Array]:
    """Returns the adapters by PEFT's names, in fp32.

    Raises:
        CheckpointError: An adapter is missing; names it.
    """
    found: dict[str, Array] = {}
    adapters = model_adapters(options)
    for matrix, adapter in adapters.items():
        inside, _, name = matrix.rpartition(".")
        for part, global_name in zip(("lora_A", "lora_B"), adapter_names(matrix, adapter), strict=True):
            info = saved.infos.get(global_name)
            if info is None:
                raise CheckpointError(Problem(global_name, "is not in the checkpoint"))
            values = convert(saved.rows(global_name, 0, info.rows), info.dtype, "F32")
            if not adapter.stacked:
                found[f"{_PREFIX}{matrix}.{part}.weight"] = values
                continue
            if adapter.transposed:
                # PEFT wraps the block once per stack: the last one is outside.
                stacks = [name for name in adapters if name.rpartition(".")[0] == inside]
                depth = len(stacks) - 1 - stacks.index(matrix)
                rows = values if part == "lora_A" else values.transpose(2, 0, 1)  # [r, E, out]
                flat = np.ascontiguousarray(rows.reshape(-1, rows.shape[-1]))
                name = f"{_PREFIX}{inside}{'.base_layer' * depth}.{part}.weight"
                found[name] = flat if part == "lora_A" else np.ascontiguousarray(flat.T)
                continue
            for expert, value in enumerate(values):
                found[f"{_PREFIX}{inside}.{expert}.{name}.{part}.weight"] = value
    return found
