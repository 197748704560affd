"""Tiny random models of every family, written by transformers."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from their_models import keys_of, their_config, their_instance


def written(kind: str, folder: Path, case: str = "plain", *, shard: str = "5GB", **changed: Any) -> Any:
    """Saves a family's model with `save_pretrained`; `changed` are keys of its config.json."""
    model = their_instance(kind, their_config(kind, {**keys_of(kind, case), **changed}))
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Returns every tensor of a directory's safetensors by name, with its saved shape `[...]`."""
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
