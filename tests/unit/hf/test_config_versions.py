"""config.json as transformers 4 wrote it, as 5 writes it, and what raypp exports for both."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lazily import Lazily
from their_models import keys_of, loaded, run, their_config, their_instance

from raypp.errors import JobError
from raypp.job.models import DecoderOptions
from raypp.job.rope import RopeOptions
from raypp.planning.sizes import sizes_of
from raypp.state.hf.config import config_from_options, options_from_config

transformers: Any = Lazily("transformers")

LLAMA3 = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
# Written by hand, as transformers 4.40 to 4.57 saved the models of the hub.
VERSION_4: dict[str, dict[str, Any]] = {
    "Llama 3.1 8B": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": LLAMA3, "rope_theta": 500000.0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.43.0", "use_cache": True,
        "vocab_size": 128256,
    },
    "Qwen2.5 7B with yarn": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
        "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2",
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.43.1", "use_cache": True, "use_sliding_window": False, "vocab_size": 152064,
    },
    "Qwen3 30B A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
        "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
}  # fmt: skip
LFM2 = {
    "block_auto_adjust_ff_dim": True, "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256,
    "conv_L_cache": 3, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "model_type": "lfm2",
    "norm_eps": 1e-05, "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "rope_theta": 1000000.0, "tie_embedding": True, "torch_dtype": "bfloat16", "vocab_size": 65536,
}  # fmt: skip
"""What LFM2 1.2B on the hub says of its sizes."""
every_model = pytest.mark.parametrize("name", VERSION_4)


def read(config: dict[str, Any]) -> DecoderOptions:
    return options_from_config(config, DecoderOptions(from_hf="there"), "there")


def saved_again(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the config.json that the installed transformers writes for a config."""
    transformers.AutoConfig.for_model(**config).save_pretrained(folder)
    again: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return again


@every_model
def test_both_versions_of_a_config_mean_the_same(name: str, tmp_path: Path) -> None:
    older = VERSION_4[name]
    newer = saved_again(older, tmp_path)
    assert "rope_theta" not in newer and newer["rope_parameters"]["rope_theta"] == older["rope_theta"]
    assert "torch_dtype" not in newer
    assert read(newer) == read(older)


def test_names_of_the_hub_mean_the_sizes_of_the_model(tmp_path: Path) -> None:
    assert sizes_of(read(LFM2)).whole == 1_170_340_608
    assert read(saved_again(LFM2, tmp_path)) == read(LFM2)
    assert not read({**LFM2, "tie_embedding": False, "tie_word_embeddings": True}).tie_embeddings


@every_model
def test_an_exported_config_means_the_same_to_raypp_and_to_transformers(name: str, tmp_path: Path) -> None:
    older = VERSION_4[name]
    options = read(older)
    written = config_from_options(options, dtype="bfloat16", context=4096, eos_id=older["eos_token_id"])
    training = {"aux_loss_weight", "z_loss_weight"}
    assert read(written).model_dump(exclude=training) == options.model_dump(exclude=training)
    ours, theirs = (saved_again(config, tmp_path / str(n)) for n, config in enumerate((written, older)))
    assert str(transformers.AutoConfig.for_model(**written).dtype) == "torch.bfloat16"
    free = {"max_position_embeddings", "max_window_layers", "sliding_window", "initializer_range", "head_dim",
            "bos_token_id", "pad_token_id", "router_aux_loss_coef", "pretraining_tp"}  # fmt: skip
    theirs["rope_parameters"].pop("type", None)  # beside rope_type, which has the same value
    differ = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
    assert differ <= free
    # Keys of transformers 4, in the files that raypp writes.
    assert {"rope_theta", "rope_scaling", "torch_dtype"} <= written.keys() and "rope_parameters" not in written
    experts = {"num_experts", "num_local_experts"}
    assert written.keys() & experts == older.keys() & experts


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (
            {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5},
            {"factor": 40, "original_context": 64, "attention_factor": 1.155722},
        ),
        (
            {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16},
            {"factor": 4, "original_context": 16},
        ),
        ({"rope_type": "dynamic", "factor": 2.0}, {"factor": 2, "original_context": 64}),
        (
            {"rope_type": "longrope", "original_max_position_embeddings": 16, "short_factor": [1.0] * 4,
             "long_factor": [2.0] * 4},
            {"factor": 4, "original_context": 16},
        ),
    ],
)  # fmt: skip
def test_values_that_transformers_derives_are_derived(scaling: dict[str, Any], expected: dict[str, Any]) -> None:
    config = {**their_config("llama", {}).to_dict(), "rope_parameters": None, "rope_scaling": scaling}
    rope = read(config).rope
    assert rope is not None
    assert {name: getattr(rope, name) for name in expected} == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"rope_type": "mrope", "mrope_section": [2, 3, 3]}, "raypp has no such scaling"),
        ({"rope_type": "proportional"}, "raypp has no such scaling; it has linear, dynamic"),
        ({"rope_type": "linear"}, "is not supported: factor is missing: kind linear needs it"),
        ({"rope_type": "linear", "factor": "four"}, "is not supported: factor"),
        (
            {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16},
            "transformers takes max_position_embeddings for the original context",
        ),
        (
            {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}},
            "raypp does not know full_attention, sliding_attention",
        ),
        ("yarn", "it is not a mapping"),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_other_scalings_are_refused_by_name(key: str, scaling: Any, said: str) -> None:
    config = {**their_config("llama", {}).to_dict(), "rope_parameters": None, key: scaling}
    with pytest.raises(JobError) as caught:
        read(config)
    assert f"there: {key} {scaling!r} is not supported" in str(caught.value) and said in str(caught.value)


def test_equal_parameters_of_all_types_of_layers_are_those_of_the_model() -> None:
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0}
    config = {**their_config("llama", {}).to_dict(), "rope_parameters": {"full_attention": linear, "other": linear}}
    options = read(config)
    assert (options.rope, options.rope_theta) == (RopeOptions(kind="linear", factor=2), 300)


@pytest.mark.parametrize("kind", ["gpt_oss", "gemma2", "gemma3"])
def test_an_exported_model_without_a_window_runs_in_transformers(kind: str, tmp_path: Path) -> None:
    """transformers computes the mask of a window for these families even if no layer uses it."""
    tokens = torch.arange(33).unsqueeze(0)
    plain = read(json.loads(their_config(kind, keys_of(kind, "plain")).to_json_string()))
    options = plain.model_copy(update={"sliding_window": None})
    written = config_from_options(options, dtype="float32", context=64, eos_id=None)
    assert read(written) == options
    logits = {}
    for name, config in (("none", written), ("narrow", {**written, "sliding_window": 5})):
        model = their_instance(kind, transformers.AutoConfig.for_model(**config))
        model.save_pretrained(tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        logits[name] = model(tokens).logits.detach()
        torch.testing.assert_close(run(loaded(tmp_path / name), tokens).detach(), logits[name], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits["none"], logits["narrow"], rtol=1e-3), "a window would be seen"
