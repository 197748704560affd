"""Activation checkpointing: which intermediate results of a block are kept for the backward."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from raypp.torch_private import ATTENTION_OPERATORS, GROUPED_MM_OPERATOR

_MATRIX_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", GROUPED_MM_OPERATOR})
_ATTENTION = (*ATTENTION_OPERATORS, "torch_attn::")


def recompute_blocks(stage: nn.Module, extent: Literal["selective", "full"]) -> None:
    """Makes each block recompute activations in its backward.

    "full" keeps only the input of a block. "selective" also keeps the results of matrix products
    and of attention, which are most of the work, and recomputes the rest: norms, rotary encoding,
    SiLU, elementwise products. Both give bitwise the same gradients as keeping everything.

    Only `forward` is replaced. A wrapper module would change parameter names. FSDP's hooks belong
    to `__call__`, so they stay outside the recomputed part.
    """
    settings: dict[str, Any] = {"use_reentrant": False}
    if extent == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for block in stage.get_submodule("model.layers").children():
        block.forward = partial(checkpoint, block.forward, **settings)


def _policy(context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """Keeps the results of matrix products and attention."""
    name = operation.name().partition(".")[0]
    kept = name in _MATRIX_PRODUCTS or name.startswith(_ATTENTION)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
