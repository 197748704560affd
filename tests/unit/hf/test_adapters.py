"""Adapters of every family: exported, PEFT and transformers compute the logits of raypp."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_folder import write_hf_folder
from lazily import Lazily
from small_models import SIZES
from their_models import rule_in_fp64

from raypp.cli.main import run
from raypp.errors import CheckpointError, JobError
from raypp.job.known_families import FAMILIES
from raypp.job.models import DecoderOptions, LoraOptions
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.initial_values import initialise
from raypp.stages.models.stage import build_stage
from raypp.stages.parallel.shard import local_rows
from raypp.state.checkpoint.commit import Commit, ObjectRecord, read_commit, write_commit
from raypp.state.checkpoint.compatibility import check_resume
from raypp.state.checkpoint.layout import rank_key
from raypp.state.checkpoint.load_checkpoint import load_checkpoint
from raypp.state.checkpoint.ranged_reads import verify_checkpoint
from raypp.state.checkpoint.save import upload_snapshot
from raypp.state.checkpoint.snapshot import SnapshotBuffer
from raypp.state.checkpoint.state import gather_state
from raypp.state.hf.from_hf import hf_options
from raypp.state.hf.import_model import import_hf
from raypp.state.hf.initial_weights import load_from_hf
from raypp.state.hf.model_files import HfFiles, base_identity
from raypp.storage.directory import DirectoryStore
from raypp.storage.rate_limit import Pace
from raypp.tools.export.export_adapter import export_adapter
from raypp.tools.export.export_model import export_hf
from raypp.tools.inference.source import find_source

transformers: Any = Lazily("transformers")
TOKENS = torch.randint(0, 97, (2, 17), generator=torch.Generator().manual_seed(0))
LORA = {"rank": 3, "alpha": 12.0, "base": "fp32"}


def folder_of(kind: str, folder: Path, seed: int = 0, **changed: Any) -> Path:
    fields = FAMILIES[kind].options.model_fields
    sizes = {**SIZES, "sliding_window": 7, "dense_layers": 1, **changed}
    if "num_kv_heads" not in FAMILIES[kind].hf.settings:
        del sizes["num_kv_heads"]
    write_hf_folder(folder, seed, kind=kind, **{name: size for name, size in sizes.items() if name in fields})
    return folder


def options_of(folder: Path, **lora: Any) -> DecoderOptions:
    return hf_options(DecoderOptions(from_hf=str(folder), lora=LoraOptions(**{**LORA, **lora})))


def whole(options: DecoderOptions) -> torch.nn.Module:
    """Builds the model with its frozen weights, and adapters as if they had been trained."""
    stage = build_stage(options, range(options.num_layers), first=True, last=True).to_empty(device="cpu")
    if options.from_hf is None:
        initialise(stage, options, 7, local_rows, frozen=True)
    else:
        load_from_hf(options.from_hf, [stage], frozen=True)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in stage.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn(parameter.shape))
    return stage


def saved(stage: torch.nn.Module, options: DecoderOptions, root: Path) -> tuple[DirectoryStore, Commit]:
    store, buffer = DirectoryStore(root), SnapshotBuffer()
    snapshot = buffer.take(gather_state([stage], None).values())
    record = upload_snapshot(store, rank_key("run", 1, 1, 0), snapshot, {"rank": 0}, lambda write: write(), Pace())
    assert isinstance(record, ObjectRecord)
    job = {"model": options.model_dump(mode="json"), "train": {"seed": 7}}
    write_commit(store, Commit("run", 1, 1, {}, job, {}, (record,)))
    return store, read_commit(store, "run", 1)


def our_logits(stage: torch.nn.Module) -> torch.Tensor:
    """In fp64: what is compared are weights, which their files hold in fp32. In fp32 the kernels of
    one CPU sum in another order than those of another, by more than 1e-5 in these logits."""
    stage.double()
    positions = torch.arange(17)[None].expand_as(TOKENS)
    with torch.no_grad():
        found: torch.Tensor = stage(TOKENS, positions, PackedDocuments.of_rows([[17]] * 2, 17))
    return found


def their_logits(model: Any) -> torch.Tensor:
    rule_in_fp64(type(model.get_base_model() if hasattr(model, "get_base_model") else model).__module__)
    with torch.no_grad():
        found: torch.Tensor = model.double()(TOKENS, use_cache=False).logits
    return found


def loaded(folder: Path) -> Any:
    """Loads with the class that config.json names: transformers' AutoModel does not know all."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    model, notes = getattr(transformers, name).from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    assert not notes["missing_keys"] and not notes["unexpected_keys"]
    return model.double()


SMOOTH = {"gemma4": {"head_dim": 4}}
"""Its scores are not scaled: wide heads amplify the fp32 of transformers' rotary tables."""
OFTEN = {"llama", "gemma3", "qwen3_moe", "gpt_oss"}
"""A plain family, one of other norms, and two of experts. The others are slow tests."""


@pytest.fixture(scope="module")
def peft() -> Any:
    """PEFT takes seconds to import, in every worker that collects this file."""
    return pytest.importorskip("peft")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in OFTEN else [pytest.mark.slow, pytest.mark.gate]) for kind in FAMILIES],
)
def test_peft_computes_the_logits_of_exported_adapters_and_of_the_merged_model(
    kind: str, tmp_path: Path, peft: Any
) -> None:
    folder = folder_of(kind, tmp_path / "hf", **SMOOTH.get(kind, {}))
    options = options_of(folder)
    stage = whole(options)
    store, commit = saved(stage, options, tmp_path / "store")
    assert verify_checkpoint(store, "run", 1) == []
    expected, plain = our_logits(stage), their_logits(loaded(folder))
    assert (expected - plain).abs().max() > 0.1, "the adapters change nothing"

    export_adapter(store, commit, DirectoryStore(tmp_path / "adapter"))
    adapted = peft.PeftModel.from_pretrained(loaded(folder), tmp_path / "adapter")
    torch.testing.assert_close(their_logits(adapted), expected, rtol=1e-5, atol=1e-5)

    export_hf(store, commit, DirectoryStore(tmp_path / "merged"), shard_bytes=30_000)
    torch.testing.assert_close(their_logits(loaded(tmp_path / "merged")), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(their_logits(adapted.merge_and_unload()), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "also", "grown"),
    [("llama", ["embed_tokens", "norms"], 0), ("gemma3", ["norms", "lm_head"], 3), ("qwen3_moe", ["lm_head"], 3)],
)
def test_peft_takes_what_was_trained_beside_adapters(
    kind: str, also: list[str], grown: int, tmp_path: Path, peft: Any
) -> None:
    tied, folder = kind == "gemma3", folder_of(kind, tmp_path / "hf", tie_embeddings=kind == "gemma3")
    lora = LoraOptions(**LORA, targets=["q_proj"], also_train=also)
    options = hf_options(DecoderOptions(from_hf=str(folder), lora=lora, vocab_size=97 + grown))
    stage = whole(options)
    store, commit = saved(stage, options, tmp_path / "store")
    expected = our_logits(stage)
    export_adapter(store, commit, DirectoryStore(tmp_path / "adapter"))
    named = set(json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["modules_to_save"])
    assert {word for word in named if "norm" not in word} == ({"embed_tokens", "lm_head"} if tied else {also[0]})
    base = loaded(folder)
    base.resize_token_embeddings(97 + grown)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(their_logits(adapted), expected, rtol=1e-5, atol=1e-5)
    export_hf(store, commit, DirectoryStore(tmp_path / "merged"))
    torch.testing.assert_close(their_logits(loaded(tmp_path / "merged")), expected, rtol=1e-5, atol=1e-5)


def test_a_folder_with_adapters_is_given_to_transformers_as_a_model(tmp_path: Path, peft: Any) -> None:
    folder_of("llama", tmp_path / "hf", vocab_size=300)
    options = options_of(tmp_path / "hf")
    store, commit = saved(whole(options), options, tmp_path / "store")
    job = {"data": {"tokenizer": "bytes", "seq_len": 64}}
    done = export_adapter(store, commit, DirectoryStore(tmp_path / "adapter"), job=job)
    assert set(done.files) == {
        "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json", "adapter_config.json"
    }  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "adapter")
    batch = tokenizer("In the beginning", return_tensors="pt")
    found = []
    for model in (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "adapter"),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf"),
    ):
        with torch.no_grad():
            found.append(model.generate(**batch, max_new_tokens=6, do_sample=False, pad_token_id=256).tolist())
    assert len(found[0][0]) > 16 and found[0] != found[1], "the adapters change nothing"


def test_targets_of_some_matrices_are_exported_as_peft_names_them(tmp_path: Path, peft: Any) -> None:
    folder = folder_of("llama", tmp_path / "hf")
    options = options_of(folder, targets=("q_proj", "layers.1.mlp.down_proj"), dropout=0.25)
    stage = whole(options)
    store, commit = saved(stage, options, tmp_path / "store")
    export_adapter(store, commit, DirectoryStore(tmp_path / "adapter"))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_dropout"]) == (3, 0.25), "which changes no logits"
    assert config["target_modules"] == ["q_proj", "layers.1.mlp.down_proj"]
    adapted = peft.PeftModel.from_pretrained(loaded(folder), tmp_path / "adapter")
    trained = [name for name, _ in adapted.named_parameters() if "lora_B" in name]
    assert len(trained) == 3 and sum("down_proj" in name for name in trained) == 1
    torch.testing.assert_close(their_logits(adapted), our_logits(stage), rtol=1e-5, atol=1e-5)


def test_frozen_weights_that_were_drawn_cannot_be_merged(tmp_path: Path) -> None:
    sizes = {name: size for name, size in SIZES.items() if name in DecoderOptions.model_fields}
    options = DecoderOptions(**sizes, lora=LoraOptions(**LORA))
    store, commit = saved(whole(options), options, tmp_path / "store")
    with pytest.raises(JobError, match=r"drawn from train\.seed"):
        export_hf(store, commit, DirectoryStore(tmp_path / "merged"))
    done = export_adapter(store, commit, DirectoryStore(tmp_path / "adapter"))
    assert done.tensors == 2 * 7 * options.num_layers


def test_the_command_asks_for_the_form_and_refuses_one_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAYPP_HOME", str(tmp_path / "home"))
    options = options_of(folder_of("llama", tmp_path / "hf"))
    saved(whole(options), options, tmp_path / "store")
    export = ["checkpoints", "export", f"{tmp_path}/store/run"]
    assert run([*export, f"{tmp_path}/out"]) == 2
    assert "use --adapter for PEFT, or --merged for a whole model" in capsys.readouterr().err
    assert run([*export, f"{tmp_path}/out", "--merged", "--adapter"]) == 2
    assert run([*export, f"{tmp_path}/out", "--adapter", "--dtype", "bf16"]) == 2
    assert run([*export, f"{tmp_path}/out", "--adapter"]) == 0
    written = {path.name for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert written == {"adapter_config.json", "adapter_model.safetensors"}
    named = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(tmp_path / "hf"), "the name of the base, without a mark that others wrote it"
    capsys.readouterr()
    assert run([*export, f"{tmp_path}/out", "--merged"]) == 2
    assert "already contains a model (adapter_model.safetensors)" in capsys.readouterr().err
    assert run([*export, f"{tmp_path}/whole", "--merged"]) == 1
    assert "--trust uses it" in capsys.readouterr().err
    assert run([*export, f"{tmp_path}/whole", "--merged", "--trust", "--json"]) == 0
    assert "model.safetensors" in json.loads(capsys.readouterr().out)["files"]
    imported = options.model_copy(update={"lora": None})
    import_hf(
        HfFiles(str(tmp_path / "hf")),
        DirectoryStore(tmp_path / "full"),
        "run",
        imported,
        {"model": imported.model_dump(mode="json")},
    )
    assert run(["checkpoints", "export", f"{tmp_path}/full/run", f"{tmp_path}/no", "--adapter"]) == 2
    assert "trained all weights and has no adapters" in capsys.readouterr().err


def test_the_state_of_a_run_is_its_adapters_and_fits_no_other_rank_or_targets(tmp_path: Path) -> None:
    options = options_of(folder_of("qwen3", tmp_path / "hf"))
    stage = whole(options)
    store, _ = saved(stage, options, tmp_path / "store")
    names = set(gather_state([stage], None))
    assert names == {name for name, parameter in stage.named_parameters() if parameter.requires_grad}
    assert names and all(".lora_" in name for name in names)
    again = whole(options)
    with torch.no_grad():
        next(p for p in again.parameters() if p.requires_grad).zero_()
    load_checkpoint(store, "run", 1, [again], None)
    assert torch.equal(our_logits(again), our_logits(stage))
    with pytest.raises(CheckpointError, match=r"lora_A\.weight: has shape \[4, 32\] here and \[3, 32\]"):
        load_checkpoint(store, "run", 1, [whole(options_of(tmp_path / "hf", rank=4))], None)


def test_a_run_with_another_rank_alpha_targets_or_base_is_refused_by_name(tmp_path: Path) -> None:
    options = options_of(folder_of("llama", tmp_path / "one"))
    folder_of("llama", tmp_path / "other", seed=1)

    def differing(new: DecoderOptions) -> list[str]:
        old, changed = ({"model": each.model_dump(mode="json")} for each in (options, new))
        return [problem.key for problem in check_resume(old, changed)]

    assert differing(options) == []
    assert differing(options_of(tmp_path / "one", rank=4)) == ["model.lora.rank"]
    assert differing(options_of(tmp_path / "one", alpha=3.0)) == ["model.lora.alpha"]
    assert differing(options_of(tmp_path / "one", targets=("q_proj",))) == ["model.lora.targets"]
    assert differing(options_of(tmp_path / "other")) == ["model.from_hf"]
    assert differing(hf_options(DecoderOptions(from_hf=str(tmp_path / "one")))) == ["model.lora"]


def test_the_identity_of_a_base_is_that_of_its_weights(tmp_path: Path) -> None:
    one, copy, other = (folder_of("llama", tmp_path / name, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    found = [base_identity(HfFiles(str(folder))) for folder in (one, copy, other)]
    assert found[0] == found[1] != found[2]
    known = options_of(one)
    with pytest.raises(JobError, match="holds other weights"):
        hf_options(known.model_copy(update={"from_hf": str(other)}))
    stage = whole(known)
    store, commit = saved(stage, known, tmp_path / "store")
    (tmp_path / "a" / "model.safetensors").write_bytes((tmp_path / "c" / "model.safetensors").read_bytes())
    with pytest.raises(JobError, match="holds other weights"):
        export_hf(store, commit, DirectoryStore(tmp_path / "merged"))
    assert not (tmp_path / "merged").exists() or not list((tmp_path / "merged").iterdir())


def test_a_run_of_adapters_is_not_imported(tmp_path: Path) -> None:
    options = options_of(folder_of("llama", tmp_path / "hf"))
    with pytest.raises(JobError, match=r"set model\.from_hf"):
        import_hf(HfFiles(str(tmp_path / "hf")), DirectoryStore(tmp_path / "store"), "run", options, {})


def test_adapters_begin_as_peft_draws_them() -> None:
    sizes = {name: size for name, size in SIZES.items() if name in DecoderOptions.model_fields}
    options = DecoderOptions(**sizes, lora=LoraOptions(**{**LORA, "rank": 16}))
    stage = build_stage(options, range(2), first=True, last=True).to_empty(device="cpu")
    initialise(stage, options, 7, local_rows)
    for name, parameter in stage.named_parameters():
        if ".lora_B." in name:
            assert not parameter.any()
        if ".lora_A." in name:
            bound = parameter.shape[1] ** -0.5
            assert 0.9 * bound < parameter.abs().max() <= bound
            assert float(parameter.detach().std()) == pytest.approx(bound / np.sqrt(3), rel=0.15)


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("qwen3_moe", ("q_proj", "up_proj")),
        ("qwen2_moe", ("layers.1.mlp.experts.gate_proj",)),
        ("qwen2_moe", ("shared_expert.up_proj", "v_proj")),
        ("gpt_oss", ("o_proj", "layers.1.mlp.experts.down_proj")),
        ("gpt_oss", ("gate_up_proj",)),
        ("lfm2_moe", ("k_proj", "layers.1.feed_forward.experts.w1")),
    ],
)
def test_peft_computes_the_logits_of_some_adapters_of_layers_with_experts(
    kind: str, targets: tuple[str, ...], tmp_path: Path, peft: Any
) -> None:
    folder = folder_of(kind, tmp_path / "hf", dense_layers=0)
    options = options_of(folder, targets=targets)
    stage = whole(options)
    store, commit = saved(stage, options, tmp_path / "store")
    export_adapter(store, commit, DirectoryStore(tmp_path / "adapter"))
    adapted = peft.PeftModel.from_pretrained(loaded(folder), tmp_path / "adapter")
    expected = our_logits(stage)
    assert (expected - their_logits(loaded(folder))).abs().max() > 1e-3, "the adapters change nothing"
    torch.testing.assert_close(their_logits(adapted), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("grown", "older"), [(0, False), (4, False), (0, True)])
def test_a_merged_export_has_the_config_of_its_base_and_peft_hears_of_rows_that_its_base_lacks(
    grown: int, older: bool, tmp_path: Path
) -> None:
    base = folder_of("llama", tmp_path / "base")
    config = json.loads((base / "config.json").read_text()) | {"max_position_embeddings": 4096, "max_window_layers": 9}
    (base / "config.json").write_text(json.dumps(config))
    rows = config["vocab_size"] + grown
    options = hf_options(DecoderOptions(from_hf=str(base), lora=LoraOptions(**LORA), vocab_size=rows))
    if older:  # a run of a version that did not keep config.json
        options = options.model_copy(update={"original": None})
    store, commit = saved(whole(options), options, tmp_path / "store")
    export_hf(store, commit, DirectoryStore(tmp_path / "merged"))
    assert json.loads((tmp_path / "merged" / "config.json").read_text()) == {**config, "vocab_size": rows}
    contexts = {
        find_source(str(place), trust=True).context for place in (tmp_path / "store" / "run", tmp_path / "merged", base)
    }
    assert contexts == {4096}
    remarks = export_adapter(store, commit, DirectoryStore(tmp_path / "adapter")).remarks
    assert any("4 more rows than" in remark for remark in remarks) == bool(grown)
