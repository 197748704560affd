"""What an export keeps of the model that a run began with, and what a run takes from its files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_models import tensors_of, written
from lazily import Lazily
from safetensors.torch import load_file, save_file
from test_adapters import saved
from their_models import keys_of, loaded, options_in, run, their_config, their_instance

from raypp.cli.checkpoint_commands import _run_of_job, _run_of_place
from raypp.errors import CheckpointError, JobError
from raypp.job.job_file import load_job
from raypp.job.known_families import FAMILIES
from raypp.job.load import job_document, parse_job
from raypp.job.models import DecoderOptions
from raypp.stages.models.stage import build_stage
from raypp.stages.parallel.apply import prepare_stage
from raypp.state.checkpoint.commit import read_commit
from raypp.state.checkpoint.load_checkpoint import load_checkpoint
from raypp.state.hf.from_hf import hf_options, with_hf_sizes
from raypp.state.hf.import_model import import_hf
from raypp.state.hf.initial_weights import load_from_hf
from raypp.state.hf.model_files import HfFiles
from raypp.storage.directory import DirectoryStore
from raypp.tools.export.export_model import export_hf
from raypp.tools.inference.source import find_source

transformers: Any = Lazily("transformers")
SYNTHETIC = {"kind": "synthetic", "seq_len": 16}
TOKENS = torch.arange(24).unsqueeze(0)
CPU = torch.device("cpu")


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def changed(folder: Path, **keys: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**config_of(folder), **keys}))


def exported(folder: Path, *, seq_len: int = 16, **model: Any) -> Path:
    """Imports `folder`/theirs, and exports it as a run trained on rows of this length."""
    source = folder / "theirs"
    store, options = DirectoryStore(folder / "store"), hf_options(DecoderOptions(from_hf=str(source), **model))
    job = {"model": options.model_dump(mode="json"), "data": {"seq_len": seq_len, "tokenizer": "bytes"}}
    import_hf(HfFiles(str(source)), store, "run", options, job)
    export_hf(store, read_commit(store, "run", 0), DirectoryStore(folder / "out"))
    return folder / "out"


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_an_export_is_the_config_that_the_run_began_with(kind: str, tmp_path: Path) -> None:
    """Key by key, as transformers wrote it; and transformers reads both as one config."""
    keys = {"vocab_size": 300, "bos_token_id": 5, "eos_token_id": [7, 9], "max_position_embeddings": 4096}
    written(kind, tmp_path / "theirs", **keys, dtype=torch.bfloat16)
    changed(tmp_path / "theirs", max_window_layers=28, a_key_of_another_program={"kept": [1, None, 0.5]})
    ours, theirs = (config_of(folder) for folder in (exported(tmp_path), tmp_path / "theirs"))
    assert ours == theirs
    again, before = (transformers.AutoConfig.from_pretrained(tmp_path / name) for name in ("out", "theirs"))
    assert again.to_diff_dict() == before.to_diff_dict()


@pytest.mark.parametrize("precision", ["bf16_pure", "bf16"])
def test_trained_parameters_have_the_dtypes_that_the_run_began_with(precision: str, tmp_path: Path) -> None:
    written("qwen3_5", tmp_path / "theirs", vocab_size=300, dtype=torch.bfloat16)
    source, masters = tmp_path / "theirs", ("A_log", "dt_bias", "conv1d.weight")
    tensors = {n: (v.float() if n.endswith("A_log") else v).clone() for n, v in tensors_of(source).items()}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    options = hf_options(DecoderOptions(from_hf=str(source)))
    job = {"name": "run", "model": options.model_dump(mode="json"), "train": {"precision": precision}}
    layers = range(options.num_layers)
    stage, fresh = (
        prepare_stage(build_stage(options, layers, first=True, last=True), parse_job(job), None, CPU).module
        for _ in range(2)
    )
    load_from_hf(str(source), [stage])
    trained = {name: weight for name, weight in stage.named_parameters() if name.endswith(masters)}
    with torch.no_grad():
        for weight in trained.values():
            weight.add_(1e-4)
    assert trained and {weight.dtype for weight in trained.values()} == {torch.float32}
    store, commit = saved(stage, options, tmp_path / "store")
    export_hf(store, commit, DirectoryStore(tmp_path / "out"), dtype=None if precision == "bf16_pure" else "BF16")
    out = tensors_of(tmp_path / "out")
    assert {name: value.dtype for name, value in out.items()} == {name: value.dtype for name, value in tensors.items()}
    assert all(torch.equal(out[name], weight.to(out[name].dtype)) for name, weight in trained.items())
    load_checkpoint(store, "run", 1, [fresh], None)
    assert all(torch.equal(fresh.get_parameter(name), weight) for name, weight in stage.named_parameters())


def test_a_server_reads_the_same_context_and_ends(tmp_path: Path) -> None:
    """The context is that of config.json, the ends are those of generation_config.json."""
    written("qwen3", tmp_path / "theirs", vocab_size=300, max_position_embeddings=40960, eos_token_id=2)
    sampling = {"bos_token_id": 1, "eos_token_id": [2, 256], "temperature": 0.6, "top_p": 0.95, "do_sample": True}
    (tmp_path / "theirs" / "generation_config.json").write_text(json.dumps(sampling))
    out = exported(tmp_path)
    config = config_of(out)
    assert (config["max_position_embeddings"], config["bos_token_id"], config["eos_token_id"]) == (40960, 1, 2)
    assert json.loads((out / "generation_config.json").read_text()) == sampling
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).generation_config
    assert (theirs.eos_token_id, theirs.temperature, theirs.pad_token_id) == ([2, 256], 0.6, None)
    of_run, of_export, of_original = (
        find_source(str(folder)) for folder in (tmp_path / "store" / "run", out, tmp_path / "theirs")
    )
    assert of_run.context == of_export.context == of_original.context == 40960
    assert of_run.eos_ids == of_export.eos_ids == of_original.eos_ids == (2, 256)


def test_the_end_of_the_texts_of_training_is_added(tmp_path: Path) -> None:
    written("llama", tmp_path / "theirs", vocab_size=300)
    (tmp_path / "theirs" / "generation_config.json").unlink()
    out = exported(tmp_path)
    assert config_of(out)["eos_token_id"] == 2  # the model's own
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 256]}  # 256 ends a text of `bytes`


@pytest.mark.parametrize(
    ("keys", "model", "seq_len", "expected"),
    [
        ({}, {}, 64, 64),
        ({}, {}, 96, 96),  # trained on longer rows than before
        ({}, {"max_context": 48}, 16, 48),
        ({}, {"max_context": 8}, 16, 16),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {}, 16, 64),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}, {}, 96, 64),
    ],
)
def test_the_context_is_the_longest_that_is_known(
    keys: dict[str, Any], model: dict[str, Any], seq_len: int, expected: int, tmp_path: Path
) -> None:
    written("llama", tmp_path / "theirs", vocab_size=300)
    changed(tmp_path / "theirs", **keys)
    out = exported(tmp_path, seq_len=seq_len, **model)
    assert config_of(out)["max_position_embeddings"] == expected
    assert find_source(str(out)).context == find_source(str(tmp_path / "store" / "run")).context == expected


def test_a_model_trained_from_nothing_has_its_tokenizers_ids_and_the_jobs_context(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    (tmp_path / "words").mkdir()
    words = {"in": 0, "<s>": 1, "</s>": 2, "<pad>": 3, "?": 4}
    Tokenizer(WordLevel(words, unk_token="?")).save(str(tmp_path / "words" / "tokenizer.json"))
    named = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": "<pad>"}
    (tmp_path / "words" / "tokenizer_config.json").write_text(json.dumps(named))
    written("llama", tmp_path / "theirs")
    for name, model, context in (("plain", {}, 16), ("longer", {"max_context": 4096}, 4096)):
        store, options = DirectoryStore(tmp_path / name), options_in(tmp_path / "theirs")
        document = options.model_dump(mode="json") | {"original": None, "from_hf": None} | model
        data = {"seq_len": 16, "tokenizer": str(tmp_path / "words" / "tokenizer.json")}
        import_hf(HfFiles(str(tmp_path / "theirs")), store, "run", options, {"model": document, "data": data})
        done = export_hf(store, read_commit(store, "run", 0), DirectoryStore(tmp_path / name / "out"))
        config = config_of(tmp_path / name / "out")
        assert not done.remarks and config["max_position_embeddings"] == context
        assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 3)


def test_a_run_without_the_original_says_so(tmp_path: Path) -> None:
    written("llama", tmp_path / "theirs")
    store, options = DirectoryStore(tmp_path / "store"), options_in(tmp_path / "theirs")
    older = {**options.model_dump(mode="json"), "original": None}
    import_hf(HfFiles(str(tmp_path / "theirs")), store, "run", options, {"model": older, "data": {"seq_len": 16}})
    done = export_hf(store, read_commit(store, "run", 0), DirectoryStore(tmp_path / "out"))
    assert "does not hold the config.json that it began with" in " ".join(done.remarks)
    assert config_of(tmp_path / "out")["max_position_embeddings"] == 16


def test_an_imported_run_keeps_the_original_through_a_resume(tmp_path: Path) -> None:
    """Import by name and by job file; a later COMMIT of a job that names no model."""
    written("llama", tmp_path / "theirs", max_position_embeddings=512)
    files = HfFiles(str(tmp_path / "theirs"))
    sizes = options_in(tmp_path / "theirs").model_dump(mode="json", exclude={"original", "from_hf", "lora", "rope"})
    (tmp_path / "job.json").write_text(
        json.dumps({"name": "run", "model": sizes, "data": SYNTHETIC, "checkpoint": {"url": f"{tmp_path}/by-job"}})
    )
    for place in (str(tmp_path / "by-job.json"), f"{tmp_path}/by-name/run"):
        by_job = place.endswith(".json")
        found = _run_of_job(files, str(tmp_path / "job.json")) if by_job else _run_of_place(files, place)
        store, name, options, document = found
        import_hf(files, store, name, options, document)
        commit = read_commit(store, name, 0)
        assert commit.job["model"]["original"] is not None
        commit.job["model"] = {**commit.job["model"], "original": None}
        export_hf(store, commit, DirectoryStore(tmp_path / f"out-{by_job}"))
        assert config_of(tmp_path / f"out-{by_job}") == config_of(tmp_path / "theirs")


def test_an_import_does_not_grow_to_a_default(tmp_path: Path) -> None:
    written("llama", tmp_path / "theirs")
    sizes = options_in(tmp_path / "theirs").model_dump(mode="json", exclude={"original", "from_hf", "lora", "rope"})
    del sizes["vocab_size"]
    (tmp_path / "job.json").write_text(json.dumps({"name": "run", "model": sizes, "data": SYNTHETIC}))
    with pytest.raises(JobError, match=r"model\.vocab_size: is 4096, the default, but .* says 97"):
        _run_of_job(HfFiles(str(tmp_path / "theirs")), str(tmp_path / "job.json"))


def with_head(folder: Path, factor: float, name: str = "lm_head.weight") -> None:
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"] * factor
    save_file({**tensors, name: head.contiguous()}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_a_head_of_its_own_is_used_as_transformers_does(kind: str, factor: float, tmp_path: Path) -> None:
    written(kind, tmp_path / "theirs", tie_word_embeddings=True, vocab_size=300)
    with_head(tmp_path / "theirs", factor)
    options = options_in(tmp_path / "theirs")
    assert options.tie_embeddings == (factor == 1.0)
    assert hf_options(options) == options
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "theirs", attn_implementation="eager", dtype=torch.float32
    )
    expected = theirs(TOKENS).logits.detach()
    torch.testing.assert_close(run(loaded(tmp_path / "theirs"), TOKENS).detach(), expected, rtol=1e-5, atol=1e-5)
    out = exported(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager", dtype=torch.float32)
    torch.testing.assert_close(again(TOKENS).logits.detach(), expected, rtol=1e-5, atol=1e-5)
    assert find_source(str(tmp_path / "theirs")).model["tie_embeddings"] == (factor == 1.0)


def test_tying_what_the_files_untie_is_refused(tmp_path: Path) -> None:
    written("llama", tmp_path, tie_word_embeddings=True)
    with_head(tmp_path, 1.5)
    with pytest.raises(JobError, match=r"model\.tie_embeddings: is true, .* hold an lm_head\.weight that is not the"):
        hf_options(DecoderOptions(from_hf=str(tmp_path), tie_embeddings=True))


@pytest.mark.parametrize("kind", ["qwen3", "olmo2", "qwen3_moe"])
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_a_base_model_is_read_without_the_prefix(kind: str, shard: str, tmp_path: Path) -> None:
    whole = their_instance(kind, their_config(kind, {**keys_of(kind, "plain"), "tie_word_embeddings": True}))
    whole.model.save_pretrained(tmp_path / "theirs", max_shard_size=shard)
    assert all(not name.startswith("model.") for name in tensors_of(tmp_path / "theirs"))
    expected = whole(TOKENS).logits.detach()
    torch.testing.assert_close(run(loaded(tmp_path / "theirs", 1), TOKENS).detach(), expected, rtol=1e-5, atol=1e-5)
    again = transformers.AutoModelForCausalLM.from_pretrained(exported(tmp_path), attn_implementation="eager")
    torch.testing.assert_close(again(TOKENS).logits.detach(), expected, rtol=1e-5, atol=1e-5)


def test_a_base_model_without_its_head_says_what_is_missing(tmp_path: Path) -> None:
    config = their_config("llama", {**keys_of("llama", "plain"), "tie_word_embeddings": False})
    their_instance("llama", config).model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: is not in .*\n.*a base model \(AutoModel\)"):
        loaded(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_larger_vocabulary_grows_by_the_mean_of_the_rows(tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    written("llama", tmp_path / "theirs", tie_word_embeddings=tied, dtype=dtype)
    out = tensors_of(exported(tmp_path, vocab_size=101))
    assert config_of(tmp_path / "out") == {**config_of(tmp_path / "theirs"), "vocab_size": 101}
    before = tensors_of(tmp_path / "theirs")
    for name in ("model.embed_tokens.weight", *(() if tied else ("lm_head.weight",))):
        mean = torch.from_numpy(np.add.reduce(before[name].double().numpy(), axis=0) / 97).to(torch.float32).to(dtype)
        assert torch.equal(out[name], torch.cat([before[name], mean.expand(4, -1)]))
    grown = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert grown.get_input_embeddings().weight.shape == (101, 32)


def test_a_smaller_vocabulary_and_files_of_another_model_are_refused(tmp_path: Path) -> None:
    written("llama", tmp_path)
    with pytest.raises(JobError, match=r"model\.vocab_size: is 90, but .* says 97\n.*write 97 or more"):
        hf_options(DecoderOptions(from_hf=str(tmp_path), vocab_size=90))
    changed(tmp_path, vocab_size=98)
    with pytest.raises(CheckpointError, match=r"has shape \[97, 32\] in .*, the job's model needs \[98, 32\]"):
        loaded(tmp_path)


def test_a_job_of_a_resolved_run_gives_the_same_job(tmp_path: Path) -> None:
    written("llama", tmp_path / "theirs")
    (tmp_path / "job.json").write_text(
        json.dumps({"name": "run", "model": {"from_hf": str(tmp_path / "theirs"), "vocab_size": 120}})
    )
    sized = with_hf_sizes(load_job(tmp_path / "job.json")).job
    (tmp_path / "job.json").write_text(json.dumps(job_document(sized)))
    assert with_hf_sizes(load_job(tmp_path / "job.json")).job == sized and sized.model.vocab_size == 120
