"""Activation checkpointing: which intermediate results of a block are kept for the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from raypp.errors import RayppError
from raypp.models.moe import MixtureOfExperts
from raypp.models.once import forward_and_recomputation
from raypp.torch_private import ATTENTION_OPERATORS, GROUPED_MM_OPERATOR

_MATRIX_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", GROUPED_MM_OPERATOR})
_ATTENTION = (*ATTENTION_OPERATORS, "torch_attn::")


def recompute_blocks(stage: nn.Module, extent: Literal["selective", "full"]) -> None:
    """Makes each block recompute activations in its backward.

    "full" keeps only the input of a block. "selective" also keeps the results of matrix products
    and of attention, which are most of the work, and recomputes the rest: norms, rotary encoding,
    SiLU, elementwise products. Both give bitwise the same gradients as keeping everything.

    Selective checkpointing cannot contain experts that FSDP gathers by themselves (spread over
    ranks): gathering runs other operators in the backward than in the forward. There it surrounds
    attention and the experts, so that rows on their way are kept, and not sent again.

    Only `forward` is replaced. A wrapper module would change parameter names. FSDP's hooks belong
    to `__call__`, so they stay outside the recomputed part.
    """
    contexts = _selective if extent == "selective" else forward_and_recomputation
    for block in _blocks(stage):
        parts: list[Any] = [block]
        spread = [part.experts for part in _experts(block) if part.exchange is not None]
        if extent == "selective" and spread:
            parts = [block.get_submodule("self_attn"), *spread]
        for part in parts:
            part.forward = _recomputed(part.forward, contexts)


def recompute_within_compiled_blocks(stage: nn.Module) -> None:
    """Makes blocks recompute like "selective". Call it before they are compiled.

    Selective checkpointing watches every operator, which it cannot do in compiled code: there, the
    compiler must do it. The compiler does it only for a checkpoint that contains nothing it leaves
    uncompiled. So the checkpoint is put around the feed-forward of each block, the largest part
    without attention. Around it, the compiler recomputes norms and the rotary encoding by itself,
    because they are cheap, and attention keeps its inputs and results. Experts are not compiled;
    what they compute is recomputed as in `recompute_blocks`.

    Raises:
        RayppError: A block of an own model has no method `feed_forward`.
    """
    for block in _blocks(stage):
        if not hasattr(block, "feed_forward"):
            raise RayppError(
                f"{type(block).__name__} has no method feed_forward, which train.activation_checkpointing selective "
                "recomputes in compiled blocks",
                "use train.activation_checkpointing full or none, or train.compile false",
            )
        experts: list[Any] = [part.experts for part in _experts(block)]
        for part in experts:
            part.forward = _recomputed(part.forward, _selective)
        if not experts:
            block.feed_forward = _recomputed(block.feed_forward, _operators_kept)


def _blocks(stage: nn.Module) -> Iterator[Any]:
    yield from stage.get_submodule("model.layers").children()


def _experts(block: nn.Module) -> list[MixtureOfExperts]:
    return [part for part in block.modules() if isinstance(part, MixtureOfExperts)]


def _recomputed(forward: Callable[..., Any], contexts: Callable[[], Any]) -> Callable[..., Any]:
    # Nothing in a block draws random numbers, so their state need not be kept. On CUDA, keeping it
    # costs copies and makes the host wait.
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
    return partial(checkpoint, forward, **settings)


def _selective() -> Any:
    return forward_and_recomputation(_operators_kept())


def _policy(context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """Keeps the results of matrix products and attention."""
    name = operation.name().partition(".")[0]
    kept = name in _MATRIX_PRODUCTS or name.startswith(_ATTENTION)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


_operators_kept = partial(create_selective_checkpoint_contexts, _policy)
