"""The text of multimodal models: read alone, exported within what it was taken from."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import tensors_of
from lazily import Lazily
from safetensors.torch import save_file
from test_adapters import TOKENS, our_logits, saved, their_logits, whole
from their_models import loaded, options_in, run

from raypp.errors import CheckpointError, JobError
from raypp.job.lora import also_trained
from raypp.job.models import DecoderOptions, LoraOptions
from raypp.state.checkpoint.commit import Commit, read_commit
from raypp.state.hf.from_hf import hf_options
from raypp.state.hf.import_model import import_hf
from raypp.state.hf.model_files import HfFiles
from raypp.state.hf.unused_tensors import unused_weights
from raypp.storage.directory import DirectoryStore
from raypp.tools.export.export_adapter import export_adapter
from raypp.tools.export.export_model import export_hf

transformers: Any = Lazily("transformers")
TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 300, "sliding_window": 8, "max_position_embeddings": 64,
}  # fmt: skip
SIGHT: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
WHOLES: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": TEXT, "vision_config": SIGHT, "mm_tokens_per_image": 4, "eos_token_id": [1, 7]},
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
        "vision_config": {**SIGHT, "model_type": "pixtral"},
    },
    "mistral4": {
        "model_type": "mistral3",
        "text_config": {
            **{key: value for key, value in TEXT.items() if key not in ("sliding_window", "head_dim")},
            "model_type": "mistral4", "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 16, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 4, "v_head_dim": 8,
        },
        "vision_config": {**SIGHT, "model_type": "pixtral"},
    },
    "qwen3_5": {
        "text_config": {
            **{key: value for key, value in TEXT.items() if key != "sliding_window"}, "num_hidden_layers": 4,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        "vision_config": {
            "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [],
        },
    },
}  # fmt: skip
LAYOUTS = ("language_model.model.", "model.language_model.")
"""What the text's names begin with in files of transformers 4 and 5."""


def written(kind: str, folder: Path, layout: str = LAYOUTS[0], **changed: Any) -> Path:
    torch.manual_seed(3)
    keys = {"model_type": kind, **WHOLES[kind], "image_token_index": 299, **changed}
    config = transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tensors = tensors_of(folder)
    if not any(name.startswith(layout) for name in tensors):
        inside = {name: name.replace(LAYOUTS[0], layout) for name in tensors if name.startswith("language_model")}
        inside["language_model.lm_head.weight"] = "lm_head.weight"
        tensors = {inside.get(name, f"model.{name}"): value for name, value in tensors.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "preprocessor_config.json").write_text('{"do_resize":  true}')
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def logits(folder: Path) -> torch.Tensor:
    model, notes = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    assert not notes["missing_keys"] and not notes["unexpected_keys"] and "ForConditional" in type(model).__name__
    return their_logits(model.eval())


def imported(source: Path, folder: Path, **model: Any) -> tuple[DirectoryStore, Commit]:
    store, options = DirectoryStore(folder / "store"), hf_options(DecoderOptions(from_hf=str(source), **model))
    job = {"model": options.model_dump(mode="json"), "data": {"seq_len": 16, "tokenizer": "bytes"}}
    import_hf(HfFiles(str(source)), store, "run", options, job)
    return store, read_commit(store, "run", 0)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *(("gemma3", layout) for layout in LAYOUTS), ("qwen3_5", LAYOUTS[1]),
        *(
            pytest.param(kind, layout, marks=[pytest.mark.slow, pytest.mark.gate])
            for kind, layout in zip(("mistral3", "mistral4"), LAYOUTS, strict=True)
        ),
    ],
)  # fmt: skip
def test_the_text_is_read_and_the_rest_comes_back_byte_for_byte(kind: str, layout: str, tmp_path: Path) -> None:
    source = written(kind, tmp_path / "theirs", layout)
    options = options_in(source)
    count = sum("language_model" not in name and name != "lm_head.weight" for name in tensors_of(source))
    said = unused_weights(HfFiles(str(source)), options)
    assert f"{count} tensors of {source}, " in said and "an export puts them back" in said
    ours = run([stage.double() for stage in loaded(source)], TOKENS)
    torch.testing.assert_close(ours, logits(source), rtol=1e-5, atol=1e-5)

    done = export_hf(*imported(source, tmp_path), DirectoryStore(tmp_path / "out"), shard_bytes=50_000)
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert any(f"{count} tensors beside the text" in remark for remark in done.remarks)
    assert config_of(tmp_path / "out") == config_of(source)
    name = "preprocessor_config.json"
    assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert torch.equal(logits(tmp_path / "out"), logits(source))


def test_a_half_precision_copy_with_more_rows_says_so_where_transformers_reads_it(tmp_path: Path) -> None:
    source = written("gemma3", tmp_path / "theirs")
    export_hf(*imported(source, tmp_path, vocab_size=304), DirectoryStore(tmp_path / "out"), dtype="BF16")
    config, before = config_of(tmp_path / "out"), config_of(source)
    assert config["text_config"].pop("vocab_size") == 304 and config.pop("dtype") == "bfloat16"
    del before["text_config"]["vocab_size"], before["dtype"]
    assert config == before
    theirs, ours = tensors_of(source), tensors_of(tmp_path / "out")
    sight = [name for name in theirs if not name.startswith("language_model")]
    assert all(torch.equal(ours[name], theirs[name]) for name in sight), "other dtypes are for what was trained"
    assert logits(tmp_path / "out").shape[-1] == 304


@pytest.mark.slow
@pytest.mark.gate
@pytest.mark.parametrize(("kind", "layout"), [*zip(WHOLES, LAYOUTS, strict=False)])
def test_adapters_of_the_text_alone_are_merged_and_given_to_peft(kind: str, layout: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    source = written(kind, tmp_path / "theirs", layout)
    lora = LoraOptions(rank=3, alpha=12.0, base="fp32", targets=("q_proj", "mlp.up_proj"), also_train=("norms",))
    options = hf_options(DecoderOptions(from_hf=str(source), lora=lora))
    stage = whole(options)
    store, commit = saved(stage, options, tmp_path / "store")
    expected = our_logits(stage)
    assert (expected - logits(source)).abs().max() > 0.1
    export_hf(store, commit, DirectoryStore(tmp_path / "merged"))
    torch.testing.assert_close(logits(tmp_path / "merged"), expected, rtol=1e-5, atol=1e-5)
    done = export_adapter(store, commit, DirectoryStore(tmp_path / "adapter"))
    assert done.tensors == 2 * 2 * 3 + len(also_trained(options)), "none of the tower's"
    model = transformers.AutoModelForImageTextToText.from_pretrained(source, attn_implementation="eager")
    adapted = peft.PeftModel.from_pretrained(model.double(), tmp_path / "adapter")
    assert sum("lora_A" in name for name, _ in adapted.named_parameters()) == 2 * 3
    torch.testing.assert_close(their_logits(adapted.eval()), expected, rtol=1e-5, atol=1e-5)


def test_a_config_of_few_keys_means_what_transformers_takes_for_the_others(tmp_path: Path) -> None:
    """As the hub's Gemma 3 has it: only the sizes that differ from the class's defaults."""
    text = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {}, "eos_token_id": [1, 106]}
    config |= {"architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours, theirs = options_in(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path).text_config
    assert (ours.num_heads, ours.kv_heads, ours.dim_per_head) == (8, 4, 256)
    assert (theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim) == (8, 4, 256)
    assert ours.vocab_size == theirs.vocab_size and ours.sliding_window == theirs.sliding_window
    assert [ours.slides(i) for i in range(8)] == [kind == "sliding_attention" for kind in theirs.layer_types]
    assert ours.rope is not None and ours.rope.factor == theirs.rope_parameters["full_attention"]["factor"]


def test_what_is_not_known_or_no_longer_there_is_refused_by_name(tmp_path: Path) -> None:
    source = written("mistral3", tmp_path / "theirs")
    store, commit = imported(source, tmp_path)
    config = config_of(source)
    (source / "config.json").write_text(json.dumps({**config, "model_type": "mllama"}))
    with pytest.raises(JobError, match=r"'mllama'.*multimodal, with a text of model_type 'mistral'.*gemma3 \(gemma3_"):
        options_in(source)
    text = {**config["text_config"], "hidden_act": "gelu"}
    (source / "config.json").write_text(json.dumps({**config, "text_config": text}))
    with pytest.raises(JobError, match="hidden_act 'gelu' is not supported"):
        options_in(source)
    (source / "config.json").write_text(json.dumps({**config, "long": "x" * 40_000}))
    with pytest.raises(JobError, match="characters, of which a run keeps"):
        options_in(source)
    other = {name: value + 1 for name, value in tensors_of(source).items()}
    save_file(other, source / "model.safetensors")
    with pytest.raises(JobError, match="does not hold the weights that the run began with"):
        export_hf(store, commit, DirectoryStore(tmp_path / "out"))
    shutil.rmtree(source)
    with pytest.raises((JobError, CheckpointError), match="theirs"):
        export_hf(store, commit, DirectoryStore(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
