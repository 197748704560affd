"""Weights in FP8 are read as transformers dequantises them, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import tensors_of, written
from lazily import Lazily
from safetensors.torch import load_file, save_file
from their_models import loaded, options_in, run

from raypp.errors import CheckpointError, JobError
from raypp.job.models import DecoderOptions, LoraOptions
from raypp.stages.models.quantised import stored_formats
from raypp.stages.models.quantised_rows import quantise_rows
from raypp.stages.models.stage import build_stage
from raypp.state.checkpoint.commit import read_commit
from raypp.state.hf import initial_weights
from raypp.state.hf.from_hf import hf_options
from raypp.state.hf.import_model import import_hf
from raypp.state.hf.initial_weights import load_from_hf
from raypp.state.hf.model_files import HfFiles
from raypp.state.hf.tensor import fp8_values
from raypp.storage.directory import DirectoryStore
from raypp.tools.export.export_model import export_hf

transformers: Any = Lazily("transformers")
TOKENS = torch.arange(33).unsqueeze(0)
BLOCK = 128
WIDTHS: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "moe_intermediate_size": 192, "vocab_size": 300,
}  # fmt: skip
STATED = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}


def reference(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What transformers computes, which takes no partial blocks: `[O, I]` in bf16."""
    rows, columns = (torch.arange(size) // BLOCK for size in codes.shape)
    return (codes.float() * scales.float()[rows][:, columns]).to(torch.bfloat16)


def in_fp8(kind: str, folder: Path, scales: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Saves a small model with the matrices of its layers in FP8; returns what these mean."""
    written(kind, folder, **WIDTHS, dtype=torch.bfloat16, shard="400KB")
    meant = {}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        for name in [name for name, value in tensors.items() if ".layers." in name and value.dim() == 2]:
            if name.endswith("mlp.gate.weight"):
                continue
            weights = tensors[name].float()
            grid = [-(-size // BLOCK) for size in weights.shape]
            factors = (torch.rand(grid) * 0.01 + 1e-3).to(scales)
            spread = factors.float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            codes = (weights / spread[: weights.shape[0], : weights.shape[1]]).clamp(-448, 448).to(torch.float8_e4m3fn)
            tensors |= {name: codes, f"{name}_scale_inv": factors}
            index["weight_map"][f"{name}_scale_inv"] = path.name
            meant[name] = reference(codes, factors)
        save_file(tensors, path, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    stated(folder, STATED | {"modules_to_not_convert": ["lm_head"]})
    return meant


def stated(folder: Path, quantization: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


def test_every_code_has_the_bits_of_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(131, 1)
    scales = torch.tensor([[0.3, 1e-38], [1e38, 7e-5]])
    found = torch.from_numpy(fp8_values(codes.numpy(), scales.numpy())).view(torch.bfloat16)
    expected = reference(codes.view(torch.float8_e4m3fn), scales)
    assert torch.equal(found.isnan(), expected.isnan()) and expected.isinf().any()
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
def test_a_model_is_read_imported_and_exported_as_transformers_reads_it(scales: torch.dtype, tmp_path: Path) -> None:
    meant = in_fp8("qwen3", tmp_path / "hf", scales)
    config = transformers.FineGrainedFP8Config(dequantize=True, modules_to_not_convert=["lm_head"])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.bfloat16, quantization_config=config, attn_implementation="eager"
    )
    for name, value in theirs.state_dict().items():
        assert name not in meant or torch.equal(value, meant.pop(name)), name
    assert not meant
    expected = theirs.float()(TOKENS).logits
    torch.testing.assert_close(run(loaded(tmp_path / "hf"), TOKENS), expected, rtol=1e-5, atol=1e-5)

    files, store, options = HfFiles(str(tmp_path / "hf")), DirectoryStore(tmp_path / "s"), options_in(tmp_path / "hf")
    job = {"model": options.model_dump(mode="json"), "data": {"seq_len": 16}}
    import_hf(files, store, "run", options, job, object_bytes=100_000)
    export_hf(store, read_commit(store, "run", 0), DirectoryStore(tmp_path / "out"))
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in exported and exported["dtype"] == "bfloat16"
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert all(torch.equal(value.float(), theirs.state_dict()[name]) for name, value in again.state_dict().items())


@pytest.mark.parametrize("base", ["nf4", "int8", "bf16"])
def test_a_lora_base_is_made_of_a_few_rows_at_a_time(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts have partial blocks, and no piece begins where a block does."""
    meant = in_fp8("qwen3_moe", tmp_path)
    options = hf_options(DecoderOptions(from_hf=str(tmp_path), lora=LoraOptions(rank=3, base=base)))  # type: ignore[arg-type]
    stage = build_stage(options, range(2), first=True, last=True).to_empty(device="cpu")
    monkeypatch.setattr(initial_weights, "_READ_BYTES", 50 * 256 * 2)
    read, most = HfFiles.read, []

    def counted(files: HfFiles, tensor: Any, first: int, last: int) -> bytes:
        data = read(files, tensor, first, last)
        most.append(len(data))
        return data

    monkeypatch.setattr(HfFiles, "read", counted)
    load_from_hf(str(tmp_path), [stage], frozen=True)
    assert max(most) <= 50 * 256 * 2, "more of the model is in memory at once"
    stored, seen = dict(stored_formats(stage)), 0
    for name, parameter in stage.named_parameters():
        experts = [f"{name.replace('.experts.', f'.experts.{e}.')}.weight" for e in range(4)]
        parts = [meant[part] for part in ([name] if name in meant else experts) if part in meant]
        if parts:
            weights = parts[0] if name in meant else torch.stack(parts)
            expected = quantise_rows(weights, base) if base != "bf16" else weights.to(parameter.dtype)  # type: ignore[arg-type]
            assert (name in stored) == (base != "bf16") and torch.equal(parameter, expected), name
            seen += len(parts)
    assert seen == len(meant)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"weight_block_size": [64, 128]}, r"weight_block_size \[64, 128\] of weights in FP8 is not supported"),
        ({"weight_block_size": None}, "weight_block_size None"),
        ({"activation_scheme": "static"}, "activation_scheme 'static'"),
        ({"fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"a_key_of_tomorrow": True}, "a_key_of_tomorrow True"),
        ({"quant_method": "compressed-tensors"}, "quantization_config .*compressed-tensors.* is not supported"),
    ],
)
def test_other_kinds_of_fp8_are_refused_by_name(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    written("qwen3", tmp_path)
    stated(tmp_path, STATED | changed)
    with pytest.raises(JobError, match=said):
        options_in(tmp_path)


def test_factors_that_are_missing_or_do_not_fit_are_named(tmp_path: Path) -> None:
    in_fp8("qwen3", tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    tensors = tensors_of(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    name = "model.layers.1.mlp.up_proj.weight"
    factors = tensors.pop(f"{name}_scale_inv")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name}: is F8_E4M3 \[384, 256\] .* without {name}_scale_inv"):
        loaded(tmp_path)
    for wrong in (factors[:2], factors.to(torch.int32)):
        save_file({**tensors, f"{name}_scale_inv": wrong.contiguous()}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"{name}: .*no factor per block of 128 × 128"):
            loaded(tmp_path)
