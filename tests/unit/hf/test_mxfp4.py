"""Experts in MXFP4 are read as transformers dequantises them, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lazily import Lazily
from safetensors.torch import load_file, save_file
from their_models import keys_of, loaded, options_in, run, their_config, their_instance

from raypp.errors import CheckpointError
from raypp.state.checkpoint.commit import read_commit
from raypp.state.hf.import_model import import_hf
from raypp.state.hf.model_files import HfFiles
from raypp.state.hf.tensor import dequantised
from raypp.storage.directory import DirectoryStore
from raypp.tools.export.export_model import export_hf

transformers: Any = Lazily("transformers")
TOKENS = torch.arange(33).unsqueeze(0)
WIDTHS = {"hidden_size": 64, "intermediate_size": 32, "num_key_value_heads": 2}


def reference(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    found: torch.Tensor = convert_moe_packed_tensors(blocks, scales)
    return found


def test_every_code_and_exponent_has_the_bits_of_transformers() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)  # all pairs of codes
    blocks = codes.repeat(1, 255, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).repeat(1, 1, 16)
    # torch multiplies by 2^(scale - 127) in bf16: where that is no normal number, it may round.
    expected = reference(blocks, scales)
    found = torch.from_numpy(dequantised(blocks.numpy(), scales.numpy())).view(torch.bfloat16)
    assert found.shape == expected.shape == (1, 512, 255)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    nan = dequantised(blocks.numpy(), torch.full_like(scales, 255).numpy())
    assert torch.from_numpy(nan).view(torch.bfloat16).isnan().all(), "as the standard says"


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A random gpt-oss in several files with its experts in MXFP4, and these experts in bf16."""
    folder, generator = tmp_path / "hf", torch.Generator().manual_seed(5)
    model = their_instance("gpt_oss", their_config("gpt_oss", {**keys_of("gpt_oss", "plain"), **WIDTHS}))
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    experts = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            count, inputs, outputs = tensors.pop(name).shape
            stored = {
                f"{name}_blocks": torch.randint(0, 256, (count, outputs, inputs // 32, 16), generator=generator),
                f"{name}_scales": torch.randint(118, 127, (count, outputs, inputs // 32), generator=generator),
            }
            tensors |= {part: value.to(torch.uint8) for part, value in stored.items()}
            experts[name] = reference(*(tensors[part] for part in stored))
            assert experts[name].shape == (count, inputs, outputs)
            del index["weight_map"][name]
            index["weight_map"] |= dict.fromkeys(stored, path.name)
        save_file(tensors, path)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    assert len(experts) == 2 * config["num_hidden_layers"]
    return folder, experts


def test_a_model_is_loaded_imported_and_exported_in_bf16(
    packed: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, experts = packed
    weights = dict(loaded(folder)[0].named_parameters())
    for name, expected in experts.items():
        inside, _, matrix = name.rpartition(".")
        assert torch.equal(weights[f"{inside}.fused_{matrix}"], expected.float())

    options = options_in(folder)
    store, job = DirectoryStore(tmp_path / "store"), {"model": options.model_dump(mode="json")}
    import_hf(HfFiles(str(folder)), store, "run", options, job, object_bytes=7000)
    export_hf(store, read_commit(store, "run", 0), DirectoryStore(tmp_path / "out"))
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(exported[name], value) for name, value in experts.items())
    assert not any(name.endswith(("_blocks", "_scales")) for name in exported)

    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        scale = expected.abs().max().item()
        torch.testing.assert_close(run(loaded(folder), TOKENS), expected, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("other", [(2, 3, 4, 15), (2, 3, 64), (2, 3, 5, 16)], ids=str)
def test_blocks_and_scales_that_do_not_belong_together_are_named(other: tuple[int, ...], tmp_path: Path) -> None:
    tensors = {"w_blocks": torch.zeros(other, dtype=torch.uint8), "w_scales": torch.zeros(2, 3, 4, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"w_blocks: .*do not form a tensor in MXFP4"):
        HfFiles(str(tmp_path)).tensors()
    save_file({**tensors, "w": torch.zeros(3)}, tmp_path / "model.safetensors")
    assert HfFiles(str(tmp_path)).tensors()["w"].shape == (3,), "names alone mean nothing beside the tensor itself"
