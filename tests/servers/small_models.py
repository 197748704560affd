"""Builds a small model of any family, for tests over the registry. Names no family."""

from __future__ import annotations

from typing import Any

from raypp.hf.config import config_from_options
from raypp.spec.families import FAMILIES
from raypp.spec.models import DecoderOptions

SIZES: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 48, "vocab_size": 97,
    "num_experts": 6, "experts_per_token": 2, "expert_ffn_size": 20,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied, wide heads": {"tie_embeddings": True, "head_dim": 12, "rope_theta": 5e5, "norm_eps": 1e-6},
}
"""Settings that every family has, in addition to the sizes."""


def small_options(kind: str, **changed: Any) -> DecoderOptions:
    """Returns the `model:` section of a small model. Omits sizes that the family does not have."""
    cls = FAMILIES[kind].options
    sizes = {name: value for name, value in SIZES.items() if name in cls.model_fields}
    return cls(kind=kind, **{**sizes, **changed})


def their_model(options: DecoderOptions, **changed: Any) -> Any:
    """Returns the random model that transformers builds from the config.json of a section.

    Its weights are large enough that every part affects the logits.
    """
    import torch
    import transformers

    config = config_from_options(options, dtype="float32", context=64, eos_id=None)
    made = transformers.AutoConfig.for_model(**{**config, "use_cache": False, **changed})
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager")
    assert [type(model).__name__] == config["architectures"]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model
