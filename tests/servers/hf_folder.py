"""Writes a random Hugging Face model to a directory, without transformers and without torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from raypp.job.known_families import FAMILIES
from raypp.state.hf.config import config_from_options
from raypp.state.hf.names import hf_parts, model_tensors


def write_hf_folder(folder: Path, seed: int = 0, *, kind: str = "llama", **sizes: Any) -> dict[str, np.ndarray]:
    """Writes config.json and model.safetensors. Returns the tensors by their names in the file."""
    options = FAMILIES[kind].options(kind=kind, **sizes)
    gain = 0.0 if options.stage_ends().gain_from_zero else 1.0
    random = np.random.default_rng(seed)
    parts = [part for name, shape in model_tensors(options).items() for part in hf_parts(name, shape)]
    tensors = {
        part.name: (random.normal(size=part.shape) * 0.05 + gain * part.name.endswith("norm.weight")).astype(np.float32)
        for part in parts
    }
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = config_from_options(options, dtype="float32", context=64, eos_id=256)
    (folder / "config.json").write_text(json.dumps(config))
    return tensors
