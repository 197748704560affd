"""No field of a family's config.json changes the numbers unnoticed.

Walks the fields that transformers' config class declares, or its modeling code reads, and changes
each: raypp computes the same logits as transformers, or refuses the field by name.
"""

import copy
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from lazily import Lazily
from their_models import (
    FAMILY_CASES,
    described,
    keys_of,
    loaded,
    options_in,
    rule_in_fp64,
    run,
    their_config,
    their_instance,
)

from raypp.errors import JobError
from raypp.job.family import HfFormat
from raypp.job.known_families import FAMILIES

transformers: Any = Lazily("transformers")
ALIKE = {
    "gemma2", "glm", "granite", "mistral", "mixtral", "olmo2", "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3",
    "smollm3",
}  # fmt: skip
"""Families whose keys another one reads alike. Their walks take a minute and are slow tests."""
OFTEN = {"llama", "gpt_oss"}
"""The others are slow tests that CI runs."""
MARKS = {
    kind: [] if kind in OFTEN else [pytest.mark.slow] if kind in ALIKE else [pytest.mark.slow, pytest.mark.gate]
    for kind in FAMILIES
}
every_family = pytest.mark.parametrize("kind", [pytest.param(kind, marks=marks) for kind, marks in MARKS.items()])
TOKENS = torch.randint(0, 60, (1, 33), generator=torch.Generator().manual_seed(0))
WINDOW = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}
OF_IMAGES = {
    "get_text_config", "text_config", "vision_config", "image_token_id", "video_token_id", "vision_start_token_id",
    "mm_tokens_per_image",
}  # fmt: skip

VALUES: dict[str, list[Any]] = {
    "attention_dropout": [0.5],
    "bos_token_id": [5],
    "decoder_sparse_step": [2],
    "embd_pdrop": [0.5],
    "eos_token_id": [6],
    "head_dim": [12],
    "hidden_act": ["gelu_pytorch_tanh", "relu"],
    "hidden_size": [48],
    "initializer_range": [0.5],
    "intermediate_size": [40],
    "layer_types": [{"layer_types": ["full_attention", "sliding_attention", "full_attention"], **WINDOW}],
    "max_position_embeddings": [256],
    "max_window_layers": [WINDOW],
    "mlp_only_layers": [[1]],
    "moe_intermediate_size": [28],
    "num_attention_heads": [2],
    "num_experts": [3],
    "num_experts_per_tok": [1, 3],
    "num_hidden_layers": [2],
    "num_key_value_heads": [1, 4],
    "num_local_experts": [3],
    "pad_token_id": [3],
    "pretraining_tp": [2],
    "resid_pdrop": [0.5],
    "rms_norm_eps": [1e-2],
    "rope_parameters": [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, "max_position_embeddings": 16},
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
            }
        },
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
            }
        },
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ],
    "router_aux_loss_coef": [0.5],
    "router_jitter_noise": [0.5],
    "sliding_window": [4, WINDOW],
    "use_sliding_window": [WINDOW],
    "vocab_size": [101],
}  # fmt: skip
"""Other values of a field; a mapping changes several keys. A family's file of cases has `fields`
for those that it does not share; an empty list where transformers itself computes with one value
only. A flag gets its other value."""


def fields_of(kind: str) -> dict[str, Any]:
    """Returns the fields that config.json may have, with the values of a small model."""
    config = their_config(kind, keys_of(kind, "plain"))
    config.allow_global_per_layer_attribute_access = True  # of sizes that differ between layers
    model = getattr(transformers, FAMILIES[kind].hf.architecture)
    classes = re.split(r"^(?=class )", inspect.getsource(sys.modules[model.__module__]), flags=re.MULTILINE)
    code = "".join(part for part in classes if not re.match(r"class \w*Vision", part))
    read = set(re.findall(r"\bconfig\.([a-z]\w+)|getattr\((?:self\.)?config, \"([a-z]\w+)\"", code))
    declared = {name for cls in type(config).__mro__ for name in inspect.get_annotations(cls)}
    shared = set(transformers.PretrainedConfig.__annotations__)
    names = declared | {name for pair in read for name in pair if name}
    return {name: getattr(config, name, None) for name in sorted(names - shared - OF_IMAGES)}


def changes_of(kind: str, name: str, value: Any) -> list[dict[str, Any]]:
    own = described(kind).get("fields", {})
    if isinstance(value, bool) and name not in own and name not in VALUES:
        return [{name: not value}]
    others = own.get(name, VALUES.get(name))
    assert others is not None, (
        f"{name} of {kind}: add other values of it to VALUES, or to `fields` of the family's cases"
    )
    return [other if isinstance(other, Mapping) else {name: other} for other in others]


def verdict(kind: str, changed: Mapping[str, Any], folder: Path) -> str:
    """Returns what a change does: "equal", "refused", "not by transformers", or what is wrong."""
    try:
        config = their_config(kind, {**keys_of(kind, "plain"), **changed})
    except Exception:  # noqa: BLE001 - transformers has many
        return "not by transformers"
    config.save_pretrained(folder)
    return compared(kind, folder, changed)


def compared(kind: str, folder: Path, changed: Iterable[str]) -> str:
    """Returns the `verdict` on a config.json, of which some keys are unusual."""
    try:
        options_in(folder)
    except JobError as error:
        named = any(re.search(rf"\b{key}\b", str(error)) for key in changed)
        return "refused" if named else f"refused, but not by name: {error}"
    written = (folder / "config.json").read_bytes()
    try:
        model = their_instance(kind, transformers.AutoConfig.from_pretrained(folder))
        if exact := rule_in_fp64(type(model).__module__):
            model.set_experts_implementation("eager")  # torch's grouped products know no fp64
        with torch.no_grad():
            expected = (copy.deepcopy(model).double() if exact else model)(TOKENS).logits
    except Exception:  # noqa: BLE001 - transformers has many
        return "not by transformers"
    model.save_pretrained(folder)
    (folder / "config.json").write_bytes(written)
    try:
        with torch.no_grad():
            found = run([stage.double() if exact else stage for stage in loaded(folder)], TOKENS)
    except Exception as error:  # noqa: BLE001 - any is a finding
        return f"neither refused nor computed: {type(error).__name__}: {error}"
    apart = (found - expected).abs().max().item()
    return "equal" if apart < 1e-5 * max(1.0, expected.abs().max().item()) else f"logits differ by {apart:.2g}"


def verdicts(kind: str, names: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, dict[str, Any], str]]:
    # Messages name the folder, so a folder must not have the name of a field.
    numbers = count()
    for name, value in names.items():
        for change in changes_of(kind, name, value):
            keys = {key: other for key, other in change.items() if key in names}
            yield name, keys, verdict(kind, keys, folder / str(next(numbers)))


@every_family
def test_every_field_is_computed_as_transformers_does_or_refused_by_name(kind: str, tmp_path: Path) -> None:
    fields = fields_of(kind)
    assert len(fields) > 15
    assert verdict(kind, {}, tmp_path / "plain") == "equal"
    found = list(verdicts(kind, fields, tmp_path))
    wrong = [f"{keys}: {said}" for _, keys, said in found if said not in ("equal", "refused", "not by transformers")]
    assert not wrong, "\n".join(wrong)
    tried = {name for name, _, said in found if said != "not by transformers"}
    fixed = {name for name, others in described(kind).get("fields", {}).items() if not others}
    assert tried == set(fields) - fixed, "transformers accepts at least one other value of every field"


@every_family
def test_a_missing_key_means_what_transformers_takes_it_for(kind: str, tmp_path: Path) -> None:
    form = FAMILIES[kind].hf
    config = their_config(kind, keys_of(kind, "plain"))
    config.save_pretrained(tmp_path)
    whole = json.loads((tmp_path / "config.json").read_text())
    wrong = []
    keys = sorted(whole.keys() & {*form.settings.values(), *form.exact, "rope_parameters"})
    for number, key in enumerate(keys):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({name: whole[name] for name in whole if name != key}))
        said = compared(kind, folder, [key])
        if said not in ("equal", "refused", "not by transformers"):
            wrong.append(f"{key}: {said}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("kind", "case"), [pair for pair in FAMILY_CASES if pair[0] != "gemma4"])  # not in 4
def test_a_config_of_transformers_4_is_read_alike(kind: str, case: str, tmp_path: Path) -> None:
    config = their_config(kind, keys_of(kind, case))
    config.save_pretrained(tmp_path / "new")
    written = as_version_4(json.loads((tmp_path / "new" / "config.json").read_text()))
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text(json.dumps(written))
    again = transformers.AutoConfig.from_pretrained(tmp_path / "old")
    assert again.rope_parameters == config.rope_parameters, "transformers 5 reads it alike"
    old, new = (options_in(tmp_path / name).model_dump(exclude={"from_hf", "original"}) for name in ("old", "new"))
    assert old == new


def as_version_4(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json as transformers 4 wrote it."""
    found = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
    scaling = config["rope_parameters"]
    if "full_attention" in scaling:
        found["rope_local_base_freq"] = scaling["sliding_attention"]["rope_theta"]
        scaling = scaling["full_attention"]
    lifted = {key: scaling[key] for key in ("rope_theta", "partial_rotary_factor") if key in scaling}
    left = {key: value for key, value in scaling.items() if key not in lifted}
    plain = scaling.get("rope_type", "default") == "default"
    if config["model_type"] == "qwen3_moe":
        found["num_experts"] = found.pop("num_local_experts")
    return {**found, **lifted, "rope_scaling": None if plain else left, "torch_dtype": config.get("dtype")}


@pytest.mark.parametrize(("key", "value"), [("hidden_act", "relu"), ("attention_dropout", 0.5)])
def test_the_walk_notices_a_field_that_is_ignored(
    key: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verdict("llama", {key: value}, tmp_path / "as it is") == "refused"
    family = FAMILIES["llama"]
    exact = {name: only for name, only in family.hf.exact.items() if name != key}
    form: HfFormat = replace(family.hf, exact=exact)
    monkeypatch.setattr("raypp.job.families.llama.FAMILY", replace(family, hf=form))
    assert verdict("llama", {key: value}, tmp_path / "ignored").startswith("logits differ")


def test_the_walk_notices_a_refusal_that_does_not_name_the_field(tmp_path: Path) -> None:
    their_config("llama", {"hidden_act": "relu"}).save_pretrained(tmp_path / "0")
    assert compared("llama", tmp_path / "0", ["hidden_act"]) == "refused"
    assert compared("llama", tmp_path / "0", ["vocab_size"]).startswith("refused, but not by name")
