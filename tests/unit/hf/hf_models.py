"""Tiny random models of every family, written by transformers; and checkpoints in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 97, "use_cache": False, "attn_implementation": "eager",
}  # fmt: skip
_MORE: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 5e5, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 12, "tie_word_embeddings": True},
    "qwen3_moe": {
        "head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None, "tie_word_embeddings": False},
}  # fmt: skip
_CLASSES = {
    "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral",
}  # fmt: skip


def their_model(kind: str, **changed: Any) -> Any:
    """A random model of transformers, with weights large enough that every part shows in the logits."""
    import transformers

    name = _CLASSES[kind]
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **_MORE[kind], **changed})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def written(kind: str, folder: Path, shard: str = "5GB", **changed: Any) -> Any:
    """The same, saved by `save_pretrained`."""
    model = their_model(kind, **changed)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the safetensors in a directory."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    return found
