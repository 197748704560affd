"""Import and export of Hugging Face models: files, dtypes, memory, and what is refused.

`tests/unit/models/test_families_against_transformers.py` imports and exports every family.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_folder import write_hf_folder
from hf_models import tensors_of, written
from lazily import Lazily
from safetensors.numpy import save_file
from their_models import keys_of, options_in, their_config

from raypp.cli.main import run
from raypp.errors import CheckpointError, JobError
from raypp.job.models import DecoderOptions, MoeOptions
from raypp.stages.models.stage import build_stage
from raypp.state.checkpoint.arrays import convert
from raypp.state.checkpoint.commit import read_commit
from raypp.state.checkpoint.load_checkpoint import load_checkpoint
from raypp.state.hf.from_hf import hf_options
from raypp.state.hf.import_model import import_hf
from raypp.state.hf.initial_weights import load_from_hf
from raypp.state.hf.model_files import HfFiles
from raypp.storage.directory import DirectoryStore
from raypp.tools.export import export_model as exporting
from raypp.tools.export.export_model import export_hf

transformers: Any = Lazily("transformers")


def empty_stage(options: DecoderOptions, layers: range | None = None) -> torch.nn.Module:
    layers = range(options.num_layers) if layers is None else layers
    last = layers.stop == options.num_layers
    return build_stage(options, layers, first=layers.start == 0, last=last).to_empty(device="cpu")


def imported(source: Path, root: Path, **other: Any) -> DirectoryStore:
    store = DirectoryStore(root)
    options = options_in(source)
    import_hf(HfFiles(str(source)), store, "run", options, {"model": options.model_dump(mode="json")}, **other)
    return store


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_an_imported_checkpoint_loads_onto_any_cut(kind: str, tmp_path: Path) -> None:
    written(kind, tmp_path / "theirs", dtype=torch.bfloat16)
    store = imported(tmp_path / "theirs", tmp_path / "store", object_bytes=5000)
    options = options_in(tmp_path / "theirs")
    whole, loaded = empty_stage(options), {}
    load_from_hf(str(tmp_path / "theirs"), [whole])
    for layers in (range(1), range(1, 3)):
        stage = empty_stage(options, layers)
        optimizer = torch.optim.AdamW(stage.parameters())
        found = load_checkpoint(store, "run", None, [stage], optimizer)
        assert found is not None and found.step == 0 and not optimizer.state
        loaded |= dict(stage.named_parameters())
    expected = dict(whole.named_parameters())
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_a_stage_reads_the_bytes_it_needs_and_no_more(tmp_path: Path) -> None:
    written("llama", tmp_path, shard="20KB")
    options = options_in(tmp_path)
    stage = empty_stage(options, range(1, 2))
    loaded = load_from_hf(str(tmp_path), [stage])
    assert loaded.bytes_read == sum(parameter.numel() * 4 for parameter in stage.parameters())


def test_conversions_are_those_of_torch_for_every_kind_of_number() -> None:
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, 3.4e38, -3.4e38, 65520.0, 1.00390625]
    bits = torch.randint(-(2**31), 2**31 - 1, (20_000,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    values = torch.cat([torch.tensor(special), bits.view(torch.float32)])
    names = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
    for into, dtype in names.items():
        found = convert(values.numpy(), "F32", into)
        expected = values.to(dtype)
        back = torch.from_numpy(found.view(np.int16)).view(dtype) if into == "BF16" else torch.from_numpy(found)
        torch.testing.assert_close(back, expected, rtol=0, atol=0, equal_nan=True)
    halves = values.bfloat16()
    found = convert(halves.view(torch.int16).numpy().view(np.uint16), "BF16", "F32")
    torch.testing.assert_close(torch.from_numpy(found), halves.float(), rtol=0, atol=0, equal_nan=True)


def test_export_holds_a_piece_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written("llama", tmp_path / "theirs")
    store = imported(tmp_path / "theirs", tmp_path / "store")
    monkeypatch.setattr(exporting, "PIECE_BYTES", 1000)
    sizes: list[int] = []
    export_hf(store, read_commit(store, "run", 0), DirectoryStore(tmp_path / "out"), progress=sizes.append)
    assert max(sizes) <= 1000 and len(sizes) > 40
    before, after = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "out")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_tensors_that_do_not_fit_are_named_and_nothing_is_written(tmp_path: Path) -> None:
    written("llama", tmp_path / "theirs")
    options = options_in(tmp_path / "theirs").model_copy(update={"hidden_size": 64, "num_layers": 3})
    with pytest.raises(CheckpointError) as caught:
        import_hf(HfFiles(str(tmp_path / "theirs")), DirectoryStore(tmp_path / "store"), "run", options, {})
    assert "model.embed_tokens.weight: has shape [97, 32] in" in str(caught.value)
    assert "the job's model needs [97, 64]" in str(caught.value) and "more tensors" in str(caught.value)
    assert not (tmp_path / "store").exists()


def test_a_run_is_imported_once(tmp_path: Path) -> None:
    written("llama", tmp_path / "theirs")
    imported(tmp_path / "theirs", tmp_path / "store")
    with pytest.raises(JobError, match="has checkpoints at"):
        imported(tmp_path / "theirs", tmp_path / "store")


def config_of(folder: Path, **changed: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changed}
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "gone"}))


@pytest.mark.parametrize(
    ("kind", "changed", "said"),
    [
        ("llama", {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "'gpt2' (GPT2LMHeadModel) is not supp"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling {'rope_type': 'llama3'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            "rope_parameters {'rope_type': 'yarn'",
        ),
        ("glm4", {"attention_bias": False}, "attention_bias False is not supported"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"vocab_size": "gone"}, "vocab_size is missing"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window True"),
        ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, "quantised experts in mxfp4 only"),
    ],
)
def test_what_raypp_would_compute_otherwise_is_refused_by_name(
    kind: str, changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    their_config(kind, keys_of(kind, "plain")).save_pretrained(tmp_path)
    options_in(tmp_path)
    config_of(tmp_path, **changed)
    with pytest.raises(JobError) as caught:
        options_in(tmp_path)
    assert said in str(caught.value) and "config.json" in str(caught.value)


def test_sizes_that_contradict_config_json_are_named(tmp_path: Path) -> None:
    their_config("qwen3_moe", keys_of("qwen3_moe", "plain")).save_pretrained(tmp_path)
    given = MoeOptions(kind="qwen3_moe", from_hf=str(tmp_path), num_layers=4, vocab_size=97, aux_loss_weight=0.5)
    with pytest.raises(JobError, match=r"model\.num_layers: is 4, but .*config\.json says 3"):
        hf_options(given)
    sized = hf_options(MoeOptions(kind="qwen3_moe", from_hf=str(tmp_path), aux_loss_weight=0.5))
    assert (sized.num_layers, sized.aux_loss_weight, sized.num_experts) == (3, 0.5, 4)
    assert hf_options(sized) == sized


def test_pickles_torn_files_and_no_files_are_distinguished(tmp_path: Path) -> None:
    files = HfFiles(str(tmp_path))
    with pytest.raises(JobError, match=r"there is no .*config\.json"):
        files.config()
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match=r"only pytorch_model\.bin: raypp loads no pickle"):
        files.tensors()
    written("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is torn"):
        files.tensors()
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match="is not a safetensors file: its header would have"):
        files.tensors()


def test_one_file_of_weights_comes_before_the_index_and_shards_of_an_earlier_save(tmp_path: Path) -> None:
    written("llama", tmp_path / "base", shard="50KB")
    (tmp_path / "again").mkdir()
    torch.manual_seed(8)
    new = written("llama", tmp_path / "again")
    shutil.copy(tmp_path / "again" / "model.safetensors", tmp_path / "base")
    for _ in range(2):
        files = HfFiles(str(tmp_path / "base"))
        tensor = files.tensors()["model.embed_tokens.weight"]
        assert files.rows(tensor, 0, tensor.shape[0]).tolist() == new.model.embed_tokens.weight.tolist()
        for shard in (tmp_path / "base").glob("model-0*.safetensors"):
            shard.unlink()


def test_tensors_that_no_parameter_takes_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 48, "vocab_size": 300}
    tensors = write_hf_folder(tmp_path / "hf", num_layers=2, tie_embeddings=True, **sizes)
    place = f"{tmp_path / 'store'}/run"
    assert run(["checkpoints", "import", str(tmp_path / "hf"), f"{place}0"]) == 0
    assert "not used" not in capsys.readouterr().out
    more = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for i in range(2)}
    more |= {"visual.proj": np.ones(4, np.float32), "lm_head.weight": tensors["model.embed_tokens.weight"]}
    save_file({**tensors, **more}, tmp_path / "hf" / "model.safetensors")
    assert run(["checkpoints", "import", str(tmp_path / "hf"), place]) == 0
    said = f"3 tensors of {tmp_path / 'hf'}, 48 bytes, are not used, no parameter takes them: "
    said += "model.layers.N.self_attn.rotary_emb.inv_freq (2), visual.proj (1)"
    assert f"note: {said}\n" in capsys.readouterr().out, "the head is the embedding"
