"""Every family trains on a mesh as in one process; so do scalings that depend on the length of a
document, and layers without experts.

Documents have 3 to 50 tokens, so some are within the original context of 16 and some are longer.
"""

from typing import Any

import pytest
from comparison import assert_identical, assert_same_sums
from small_models import small_options
from training import document, numbers, thinned, trained

from raypp.job.known_families import FAMILIES

STEPS = 2
LONGROPE = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
VARIANTS: dict[str, dict[str, Any]] = {
    "dynamic": {"kind": "llama", "rope": {"kind": "dynamic", "factor": 4.0, "original_context": 16}},
    "longrope": {"kind": "llama", "rope": {"kind": "longrope", "factor": 4.0, "original_context": 16, **LONGROPE}},
    "dense layers": {"kind": "qwen3_moe", "mlp_only_layers": [0], "decoder_sparse_step": 2, "norm_topk_prob": False},
    "shared expert": {"kind": "qwen2_moe", "mlp_only_layers": [2]},
}
UNCUT = {
    "shared keys": {
        "kind": "gemma4",
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "num_kv_shared_layers": 2,
        "full_head_dim": 24,
        "per_layer_width": 8,
    }
}
"""Layers that no pipeline may part."""
MODELS = {**{kind: {"kind": kind} for kind in FAMILIES}, **VARIANTS, **UNCUT}
WITHOUT_EXPERTS = [kind for kind in FAMILIES if not hasattr(small_options(kind), "num_experts")]
"""`test_experts.py` has meshes of the others."""
SPREAD: dict[str, dict[str, Any]] = {
    **{kind: {"fsdp": 2, "cp": 2} for kind in WITHOUT_EXPERTS},
    "gemma4": {"fsdp": 2, "ep": 2},
    "mistral4": {"cp": 2, "ep": 2},
    "dynamic": {"cp": 2},
    "longrope": {"cp": 2, "cp_style": "ulysses"},
    "dense layers": {"fsdp": 2, "ep": 2},
    "shared expert": {"fsdp": 2, "ep": 2},
    "shared keys": {"fsdp": 2, "cp": 2},
}
QUICK = ["qwen3", "gemma3", "olmo2", "glm4", "starcoder2", "dense layers"]
"""Each has a part of layers that no family of `test_pairs_of_features.py` has."""


def job(name: str, **mesh: Any) -> dict[str, Any]:
    kind, changes = MODELS[name]["kind"], {key: value for key, value in MODELS[name].items() if key != "kind"}
    options = small_options(kind, num_layers=4).model_dump(mode="json", exclude_none=True)
    return {**document(microbatches=4, **mesh), "model": options | changes}


@pytest.mark.parametrize("name", thinned([name for name in MODELS if name not in UNCUT], QUICK))
def test_a_pipeline_gives_the_bits_of_one_process(name: str) -> None:
    assert_identical(trained(job(name, pp=2), STEPS), trained(job(name), STEPS))


@pytest.mark.parametrize("name", thinned(SPREAD, ["dynamic"], ["gemma3", "longrope"]))
def test_shared_weights_rows_and_experts_add_up_what_one_process_does(name: str) -> None:
    assert_same_sums(numbers(job(name, **SPREAD[name]), STEPS), numbers(job(name), STEPS))


def test_a_scaling_changes_the_numbers() -> None:
    assert trained(job("dynamic"), STEPS)["loss"] != trained(job("longrope"), STEPS)["loss"]
