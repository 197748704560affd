"""Exports the adapters of a checkpoint as PEFT reads them. Without torch."""

from __future__ import annotations

import json
from collections.abc import Callable

from safetensors.numpy import save

from raypp.checkpoint.arrays import Array, convert
from raypp.checkpoint.commit import Commit
from raypp.checkpoint.saved_tensors import SavedTensors
from raypp.errors import CheckpointError, JobError, Problem
from raypp.hf.export_model import Exported, saved_options
from raypp.spec.lora import ALL_LINEAR, adapter_names, model_adapters
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
    5 when it loads them.

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
    names = lora.targets if ALL_LINEAR not in lora.targets else sorted(_last_words(options))
    config = {
        "base_model_name_or_path": options.from_hf,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": list(names),
        "task_type": "CAUSAL_LM",
    }
    target.put(_CONFIG, json.dumps(config, indent=2).encode())
    return Exported((_WEIGHTS, _CONFIG), len(tensors), sum(tensor.nbytes for tensor in tensors.values()), ())


def _last_words(options: DecoderOptions) -> set[str]:
    return {adapter.module.rpartition(".")[2] for adapter in model_adapters(options).values()}


def _tensors(options: DecoderOptions, saved: SavedTensors) -> dict[str, Array]:
    """Returns the adapters by PEFT's names, in fp32.

    Raises:
        CheckpointError: An adapter is missing; names it.
    """
    found: dict[str, Array] = {}
    for matrix, adapter in model_adapters(options).items():
        inside, _, name = matrix.rpartition(".")
        for part, global_name in zip(("lora_A", "lora_B"), adapter_names(matrix, adapter), strict=True):
            info = saved.infos.get(global_name)
            if info is None:
                raise CheckpointError(Problem(global_name, "is not in the checkpoint"))
            values = convert(saved.rows(global_name, 0, info.rows), info.dtype, "F32")
            if not adapter.stacked:
                found[f"{_PREFIX}{matrix}.{part}.weight"] = values
                continue
            for expert, value in enumerate(values):
                found[f"{_PREFIX}{inside}.{expert}.{name}.{part}.weight"] = value
    return found
