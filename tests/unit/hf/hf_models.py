"""Tiny random models of every family, written by transformers; and checkpoints in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import small_models
import torch
from safetensors import safe_open
from small_models import small_options

from raypp.spec.families import FAMILIES

CASES: dict[str, dict[str, Any]] = {
    "plain": {"rope_theta": 5e5},
    "tied": {"tie_embeddings": True, "head_dim": 12, "norm_eps": 1e-6},
}
_SIZES = {"num_experts": 4, "ffn_size": 48}


def their_model(kind: str, case: str = "plain", **changed: Any) -> Any:
    """Returns a random transformers model with a section's sizes and changed config keys."""
    sizes = {name: value for name, value in _SIZES.items() if name in FAMILIES[kind].options.model_fields}
    return small_models.their_model(small_options(kind, **sizes, **CASES[case]), **changed)


def written(kind: str, folder: Path, case: str = "plain", *, shard: str = "5GB", **changed: Any) -> Any:
    """Saves such a model with `save_pretrained`."""
    model = their_model(kind, case, **changed)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Returns every tensor of a directory's safetensors by name, with its saved shape `[...]`."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    return found
