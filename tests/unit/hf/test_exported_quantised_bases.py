"""Quantised bases from Hugging Face's files: loaded by rows, merged as they were trained on."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_folder import write_hf_folder
from safetensors.numpy import load_file, save_file
from test_adapters import loaded, our_logits, saved, whole
from their_models import loaded as stages_in

from raypp.errors import CheckpointError
from raypp.job.known_families import FAMILIES
from raypp.job.lora import BASES, adapter_names, model_adapters, quantised_names
from raypp.job.models import DecoderOptions, LoraOptions
from raypp.stages.models.quantised import stored_formats
from raypp.stages.models.quantised_rows import dequantise_rows, quantise_rows
from raypp.stages.models.stage import build_stage
from raypp.state.checkpoint.saved_tensors import SavedTensors
from raypp.state.hf import initial_weights
from raypp.state.hf.from_hf import hf_options
from raypp.state.hf.initial_weights import load_from_hf
from raypp.storage.directory import DirectoryStore
from raypp.tools.export.export_model import export_hf
from raypp.tools.export.merged_tensors import rounded

SIZES: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 128, "vocab_size": 97,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 64}
WINDOW = {"sliding_window": 7}
U = 2.0**-24
"""Unit roundoff of fp32."""
KINDS = {
    "qwen2": SIZES,
    "qwen3_moe": SIZES | EXPERTS,
    "qwen2_moe": SIZES | EXPERTS | {"shared_ffn_size": 128},
    "gpt_oss": SIZES | EXPERTS | WINDOW,
    "gemma2": SIZES | WINDOW,
    "phi3": SIZES,
}

OFTEN = {("int8", "qwen3_moe"), ("nf4", "gpt_oss")}
bases_and_kinds = pytest.mark.parametrize(
    ("base", "kind"),
    [
        pytest.param(base, kind, marks=() if (base, kind) in OFTEN else pytest.mark.slow)
        for base in BASES
        for kind in KINDS
    ],
)


def options_of(folder: Path, base: str, kind: str = "qwen2") -> DecoderOptions:
    return hf_options(
        FAMILIES[kind].options(kind=kind, from_hf=str(folder), lora=LoraOptions(rank=3, alpha=64.0, base=base))
    )


def file_tensor(tensors: dict[str, np.ndarray], name: str) -> torch.Tensor:
    if name in tensors:
        return torch.from_numpy(tensors[name])
    block, _, matrix = name.rpartition(".")
    if matrix.startswith("fused_"):
        return torch.from_numpy(tensors[f"{block}.{matrix.removeprefix('fused_')}"])
    return torch.from_numpy(np.stack([tensors[f"{block}.{e}.{matrix}.weight"] for e in range(4)]))


@bases_and_kinds
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


@bases_and_kinds
def test_a_merged_model_computes_what_was_trained(base: str, kind: str, tmp_path: Path) -> None:
    """In fp64, where products differ by rounding only, and the files by the rounding of fp32."""
    write_hf_folder(tmp_path / "hf", kind=kind, **KINDS[kind])
    options = options_of(tmp_path / "hf", base, kind)
    stage = whole(options)
    store, commit = saved(stage, options, tmp_path / "store")
    assert all(".lora_" in name for name in SavedTensors(store, commit).infos)
    done = export_hf(store, commit, DirectoryStore(tmp_path / "merged"))
    assert any(f"dequantised from {base}" in remark for remark in done.remarks)
    loaded(tmp_path / "merged")  # by transformers, which misses nothing

    [plain] = stages_in(tmp_path / "merged")
    exact, rounding = exactly_merged(stage, options)
    files = dict(plain.named_parameters())
    assert files.keys() == exact.keys()
    far = [name for name in files if bool(((files[name] - exact[name]).abs() > rounding[name]).any())]
    assert far == []
    if base == "fp8":
        return  # a merged model does not round the inputs of its products
    with torch.no_grad(), default_dtype(torch.float64):
        trained = our_logits(stage.double())
        for name, parameter in plain.double().named_parameters():
            parameter.copy_(exact[name])
        found = our_logits(plain)
    assert found.dtype == trained.dtype == torch.float64
    torch.testing.assert_close(found, trained, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("base", BASES)
def test_a_head_of_its_own_is_used_beside_a_quantised_base(base: str, tmp_path: Path) -> None:
    """config.json says that it is tied; the files hold another one."""
    tensors = write_hf_folder(tmp_path / "hf", kind="qwen2", tie_embeddings=True, **SIZES)
    head = tensors["model.embed_tokens.weight"] * 1.5
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "hf" / "model.safetensors")
    options = options_of(tmp_path / "hf", base)
    assert not options.tie_embeddings
    stage = whole(options)
    assert torch.equal(dict(stage.named_parameters())["lm_head.weight"], torch.from_numpy(head))
    store, commit = saved(stage, options, tmp_path / "store")
    export_hf(store, commit, DirectoryStore(tmp_path / "merged"))
    merged = loaded(tmp_path / "merged")
    assert torch.equal(merged.get_output_embeddings().weight, torch.from_numpy(head).double())
    embedding = torch.from_numpy(tensors["model.embed_tokens.weight"]).double()
    assert torch.equal(merged.get_input_embeddings().weight, embedding)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def exactly_merged(
    stage: torch.nn.Module, options: DecoderOptions
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns W + s · B · A in fp64 by global name, and how far fp32 may be from it. With the unit
    roundoff u, fp32 rounds s, each of the r products and their sums, the product with s, and the
    last sum: at most u · (|W| + (r + 4) · s · |B| · |A|)."""
    assert options.lora is not None
    parameters, formats = dict(stage.named_parameters()), dict(stored_formats(stage))
    exact = {
        name: (formats[name].dequantise(value, torch.float64) if name in formats else value.double())
        for name, value in parameters.items()
        if ".lora_" not in name
    }
    rounding = {name: U * value.abs() for name, value in exact.items()}
    for matrix, adapter in model_adapters(options).items():
        name = matrix if adapter.stacked else f"{matrix}.weight"
        a, b = (parameters[part].double() for part in adapter_names(matrix, adapter))
        product, size = b @ a, b.abs() @ a.abs()
        if adapter.transposed:
            product, size = product.mT, size.mT
        exact[name] = exact[name] + options.lora.scale * product
        rounding[name] += U * (options.lora.rank + 4) * options.lora.scale * size
    return exact, rounding


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
