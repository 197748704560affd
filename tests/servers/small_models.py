"""Builds a small model of any family, for tests over the registry. Names no family."""

from typing import Any

from raypp.job.known_families import FAMILIES
from raypp.job.models import DecoderOptions

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
    family = FAMILIES[kind]
    sizes = {name: value for name, value in SIZES.items() if name in family.options.model_fields}
    if "num_kv_heads" not in family.hf.settings:
        sizes.pop("num_kv_heads")
    if "head_dim" not in family.hf.settings:
        changed.pop("head_dim", None)
    return family.options(kind=kind, **{**sizes, **changed})
