"""Small random models of each family, as transformers configures, builds and saves them.

`tests/unit/families/cases/KIND.yaml` has a family's cases: keys of config.json by case. A family
without that file fails the tests that are parametrised by `FAMILY_CASES`.
"""

import inspect
import sys
from collections.abc import Collection, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from raypp.job.known_families import FAMILIES
from raypp.job.models import DecoderOptions
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.stage import build_stage
from raypp.state.hf.from_hf import hf_options
from raypp.state.hf.initial_weights import load_from_hf

FOLDER = Path(__file__).parents[1] / "unit" / "families" / "cases"
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": 1,
    "eos_token_id": 2, "use_cache": False, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
}  # fmt: skip
"""Keys of a small model's config.json. A family takes those that its config class has."""


@cache
def described(kind: str) -> dict[str, Any]:
    """Returns the content of a family's file of cases; empty without one."""
    path = FOLDER / f"{kind}.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}


FAMILY_CASES = [(kind, case) for kind in FAMILIES for case in described(kind).get("cases", {"no file of cases": None})]


def family_cases(slow: Collection[str] = ()) -> pytest.MarkDecorator:
    """Parametrises by `kind` and `case`. For every family but Llama, `slow` names slow cases."""
    marks = pytest.mark.gate
    marked = [
        pytest.param(kind, case, marks=marks if case in slow and kind != "llama" else ()) for kind, case in FAMILY_CASES
    ]
    # Grouped by case: the tests of one share its model.
    return pytest.mark.parametrize(("kind", "case"), marked, scope="module")


def keys_of(kind: str, case: str) -> dict[str, Any]:
    """Returns the keys of config.json that a case changes."""
    cases = described(kind).get("cases")
    assert cases, f"write the cases of {kind} to {FOLDER / kind}.yaml; docs/tasks/add_a_family.md says how"
    return dict(cases[case] or {})


@cache
def known_sizes(model_type: str) -> dict[str, Any]:
    """Returns those of `SIZES` that the config class of a family has."""
    import transformers

    plain = transformers.AutoConfig.for_model(model_type)
    known = {*vars(plain), *plain.attribute_map}
    return {key: value for key, value in SIZES.items() if key in known}


def their_config(kind: str, keys: Mapping[str, Any]) -> Any:
    import transformers

    model_type = FAMILIES[kind].hf.model_type
    return transformers.AutoConfig.for_model(model_type, **{**known_sizes(model_type), **keys})


def their_instance(kind: str, config: Any) -> Any:
    """Returns transformers' model of a config. No two of its gains and biases are alike."""
    import transformers

    torch.manual_seed(3)
    # It does not know that of Mistral 4.
    causal = getattr(transformers, FAMILIES[kind].hf.architecture)
    transformers.AutoModelForCausalLM.register(type(config), causal, exist_ok=True)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    assert type(model) is causal
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
    return model


def options_in(folder: Path) -> DecoderOptions:
    return hf_options(DecoderOptions(from_hf=str(folder)))


def loaded(folder: Path, *cut: int) -> list[torch.nn.Module]:
    """Returns a saved model's stages with weights; `cut` has their first layers but the first."""
    options = options_in(folder)
    borders = [0, *cut, options.num_layers]
    stages = []
    for first, last in pairwise(borders):
        ends = {"first": first == 0, "last": last == options.num_layers}
        stages.append(build_stage(options, range(first, last), **ends).to_empty(device="cpu"))
    load_from_hf(str(folder), stages)
    return stages


def run(stages: list[torch.nn.Module], tokens_BT: torch.Tensor, **other: Any) -> torch.Tensor:
    """Runs rows `[B, T]` of one document each through all stages. Returns what the last returns."""
    rows, length = tokens_BT.shape
    positions = torch.arange(length).expand(rows, length)
    documents = PackedDocuments.of_rows([[length]] * rows, length)
    x = tokens_BT
    for stage in stages[:-1]:
        x = stage(x, positions, documents)
    out: torch.Tensor = stages[-1](x, positions, documents, **other)
    return out


@cache
def rule_in_fp64(module: str) -> bool:
    """Makes transformers compute a module's delta rule in fp64, too, if it has one. In fp32 its
    differences of sums lose digits: 1.4e-5 in small logits."""
    if (rule := getattr(sys.modules[module], "torch_chunk_gated_delta_rule", None)) is not None:
        code = inspect.getsource(rule).replace("torch.float32", "torch.promote_types(x.dtype, torch.float32)")
        exec(code, vars(sys.modules[module]))
    return rule is not None
