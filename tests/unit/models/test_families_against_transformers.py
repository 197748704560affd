"""For the same weights, each family's logits and gradients equal Hugging Face transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from reference import assert_equal_at_1e5
from small_models import CASES, small_options, their_model

from raypp.hf.config import config_from_options
from raypp.hf.from_hf import hf_options
from raypp.spec.families import FAMILIES
from raypp.spec.models import DecoderOptions

transformers: Any = pytest.importorskip("transformers")
every_family = pytest.mark.parametrize("kind", FAMILIES)
WIDER: dict[str, dict[str, Any]] = {
    **CASES,
    "odd widths": {"hidden_size": 48, "ffn_size": 80, "expert_ffn_size": 40, "head_dim": 20, "num_kv_heads": 1},
}


@every_family
@pytest.mark.parametrize("case", WIDER)
def test_logits_and_gradients_are_those_of_transformers(kind: str, case: str) -> None:
    changed = {name: value for name, value in WIDER[case].items() if name in FAMILIES[kind].options.model_fields}
    options = small_options(kind, **changed)
    assert_equal_at_1e5(options, their_model(options))


@every_family
@pytest.mark.parametrize("case", CASES)
def test_a_config_that_transformers_saved_is_read_as_the_section_it_came_from(
    kind: str, case: str, tmp_path: Path
) -> None:
    options = small_options(kind, **CASES[case])
    config = config_from_options(options, dtype="float32", context=64, eos_id=1)
    transformers.AutoConfig.for_model(**config).save_pretrained(tmp_path)
    found = hf_options(DecoderOptions(from_hf=str(tmp_path)))
    for name in {*FAMILIES[kind].hf.sizes, *FAMILIES[kind].hf.settings} - {"ffn_size", "num_kv_heads", "head_dim"}:
        assert getattr(found, name) == getattr(options, name), name
    assert (found.kv_heads, found.dim_per_head) == (options.kv_heads, options.dim_per_head)


@every_family
def test_a_config_without_optional_keys_means_what_transformers_takes_it_for(kind: str, tmp_path: Path) -> None:
    """A family has the same defaults as transformers' config class."""
    form = FAMILIES[kind].hf
    config = config_from_options(small_options(kind), dtype="float32", context=64, eos_id=1)
    left = {key: value for key, value in config.items() if key not in form.settings.values()}
    (tmp_path / "config.json").write_text(json.dumps(left))
    found = hf_options(DecoderOptions(from_hf=str(tmp_path)))
    theirs = transformers.AutoConfig.for_model(**left)
    for name in ("norm_eps", "tie_embeddings"):
        assert getattr(found, name) == getattr(theirs, form.settings[name]), name
    rope = getattr(theirs, "rope_parameters", None) or {
        "rope_theta": getattr(theirs, form.settings["rope_theta"], None)
    }
    assert found.rope_theta == rope["rope_theta"]
    head = getattr(theirs, form.settings["head_dim"], None) or theirs.hidden_size // theirs.num_attention_heads
    assert found.dim_per_head == head
