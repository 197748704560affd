"""Quantised bases from Hugging Face's files: loaded by rows, merged as they were trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_folder import write_hf_folder
from safetensors.numpy import load_file, save_file
from test_adapters import our_logits, saved, whole

from raypp.checkpoint.saved_tensors import SavedTensors
from raypp.errors import CheckpointError
from raypp.hf import initial_weights
from raypp.hf.export_model import export_hf
from raypp.hf.from_hf import hf_options
from raypp.hf.initial_weights import load_from_hf
from raypp.hf.quantised_arrays import rounded
from raypp.models.quantised import stored_formats
from raypp.models.quantised_rows import dequantise_rows, quantise_rows
from raypp.models.stage import build_stage
from raypp.spec.families import FAMILIES
from raypp.spec.models import DecoderOptions, LoraOptions
from raypp.spec.quantised import BASES, quantised_names
from raypp.storage.directory import DirectoryStore

SIZES: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 128, "vocab_size": 97,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 64}
WINDOW = {"sliding_window": 7}
KINDS = {
    "qwen2": SIZES,
    "qwen3_moe": SIZES | EXPERTS,
    "qwen2_moe": SIZES | EXPERTS | {"shared_ffn_size": 128},
    "gpt_oss": SIZES | EXPERTS | WINDOW,
    "gemma2": SIZES | WINDOW,
    "phi3": SIZES,
}


def options_of(folder: Path, base: str, kind: str = "qwen2") -> DecoderOptions:
    return hf_options(
        FAMILIES[kind].options(kind=kind, from_hf=str(folder), lora=LoraOptions(rank=3, alpha=3.0, base=base))
    )


def file_tensor(tensors: dict[str, np.ndarray], name: str) -> torch.Tensor:
    """Returns a global tensor; experts are stacked."""
    if name in tensors:
        return torch.from_numpy(tensors[name])
    block, _, matrix = name.rpartition(".")
    if matrix.startswith("fused_"):
        return torch.from_numpy(tensors[f"{block}.{matrix.removeprefix('fused_')}"])
    return torch.from_numpy(np.stack([tensors[f"{block}.{e}.{matrix}.weight"] for e in range(4)]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", BASES)
def test_weights_are_quantised_as_they_are_read(
    base: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = write_hf_folder(tmp_path, kind=kind, **KINDS[kind])
    options = options_of(tmp_path, base, kind)
    monkeypatch.setattr(initial_weights, "_READ_BYTES", 5 * 64 * 4)  # a few rows at a time
    stage = build_stage(options, range(1, 2), first=False, last=True).to_empty(device="cpu")
    load_from_hf(str(tmp_path), [stage], frozen=True)
    stored = dict(stored_formats(stage))
    assert set(stored) == {name for name in quantised_names(options) if ".layers.1." in name}
    for name, parameter in stage.named_parameters():
        if ".lora_" in name:
            continue
        weights = file_tensor(tensors, name)
        expected = quantise_rows(weights, base) if name in stored else weights
        assert torch.equal(parameter, expected), name
    assert not any(name.endswith((".gate.weight", "norm.weight", ".bias", "head.weight")) for name in stored)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", BASES)
def test_a_merged_model_computes_what_was_trained(base: str, kind: str, tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    write_hf_folder(tmp_path / "hf", kind=kind, **KINDS[kind])
    options = options_of(tmp_path / "hf", base, kind)
    stage = whole(options)
    store, commit = saved(stage, options, tmp_path / "store")
    assert all(".lora_" in name for name in SavedTensors(store, commit).infos)
    done = export_hf(store, commit, DirectoryStore(tmp_path / "merged"))
    assert any(f"dequantised from {base}" in remark for remark in done.remarks)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    with torch.no_grad():
        tokens = torch.randint(0, 97, (2, 17), generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(model(tokens).logits, our_logits(stage), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("base", BASES)
def test_numpy_rounds_as_torch_quantises(base: str) -> None:
    weights = torch.randn(3, 40, 256, generator=torch.Generator().manual_seed(0))
    weights[0, 3] = 0
    weights[1, :, 7] *= 300
    weights[2, 5] *= 1e-42
    expected = dequantise_rows(quantise_rows(weights, base), base, 256, torch.float32)
    assert torch.equal(torch.from_numpy(rounded(weights.numpy(), base)), expected)


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    write_hf_folder(tmp_path, kind="qwen2", **SIZES)
    path, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(path)
    tensors[name][5, 7] = np.nan
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=f"{name}.*cannot be quantised: a weight is not a finite number"):
        whole(options_of(tmp_path, "nf4"))
