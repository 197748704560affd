"""Activation checkpointing: which of a block's intermediate results are kept for the backward."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from raypp.torch_private import ATTENTION_OPERATORS, GROUPED_MM_OPERATOR

_MATRIX_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", GROUPED_MM_OPERATOR})
_ATTENTION = (*ATTENTION_OPERATORS, "torch_attn::")


def recompute_blocks(stage: nn.Module, extent: Literal["selective", "full"]) -> None:
    """Makes each block compute activations again in its backward.

    full keeps a block's input only. selective also keeps the results of matrix products and of attention, which are
    most of the work, and computes the rest again: norms, rotary encoding, SiLU, products by element. Both give the bits
    that keeping everything gives.

    Only `forward` is replaced: a wrapper module would change parameter names, and FSDP's hooks, which hang on the
    call, stay outside the recomputed part.
    """
    settings: dict[str, Any] = {"use_reentrant": False}
    if extent == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for block in stage.get_submodule("model.layers").children():
        block.forward = partial(checkpoint, block.forward, **settings)


def _policy(context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    name = operation.name().partition(".")[0]
    kept = name in _MATRIX_PRODUCTS or name.startswith(_ATTENTION)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
