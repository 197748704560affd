"""Attention by torch's variable-length flash kernels: one call for all documents of a microbatch.

CUDA only. FlashAttention 3 and 4 are the same calls: torch puts their kernels in place of its
own. The kernels take fewer key/value heads than query heads in torch 2.11 and 2.13; only the public
function of 2.13 has an argument for it.

Legend: S tokens of a microbatch, Q queries, N keys, H query heads, K key/value heads, D head width.
"""

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl, restore_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

from raypp.errors import RayppError
from raypp.job.layer_rules import AttentionRule
from raypp.stages.models.attention import AttentionKernel, FlashBlocks, Segments
from raypp.stages.models.attention_products import reaching_sinks, with_sinks
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.recomputed import attention
from raypp.torch_private import flash_attention_backward, flash_attention_forward

CAUSAL, ALL = (-1, 0), (-1, -1)
"""Windows of keys, to the left and to the right of a query; -1 is without a limit."""

_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def varlen_kernel(name: str) -> AttentionKernel:
    """Returns the kernel `varlen` (torch's own), or FlashAttention's `flash3` or `flash4`.

    Sets, for this process, which of them torch's flash operators run.

    Raises:
        ImportError: The package of `flash3` or `flash4` cannot be imported.
        RuntimeError: It does not have the kernels that torch looks for.
        ValueError: This torch does not know it.
    """
    if name != "varlen":
        activate_flash_attention_impl(name.replace("flash", "FA"))
    elif current_flash_attention_impl() is not None:
        restore_flash_attention_impl()
    return AttentionKernel(name, _attend, FlashKernel())


def _attend(
    q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, documents: PackedDocuments, rule: AttentionRule, sinks_H: Tensor | None
) -> Tensor:
    """Computes attention within documents: `[S, H, D]`, `[S, K, D]`, `[S, K, D]` to `[S, H, D]`."""
    if rule.soft_cap is not None:
        raise RayppError("variable-length attention has no soft cap", "set train.attention: flex or plain")
    cu, longest = documents.cu_seqlens, documents.max_len
    segments = Segments(cu, cu, longest, longest, True, rule.window, rule.scale)
    if sinks_H is not None:
        return attend_with_sinks(q_SHD, k_SKD, v_SKD, sinks_H, segments, FlashKernel())
    settings = {"window_size": _window(segments), "scale": rule.scale, **_GROUPED}
    compute: Any = partial(varlen_attn, **settings)
    out: Tensor = attention(lambda q, k, v: compute(q, k, v, cu, cu, longest, longest), q_SHD, k_SKD, v_SKD)
    return out


def attend_with_sinks(
    q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, sinks_H: Tensor, segments: Segments, kernel: FlashBlocks
) -> Tensor:
    """Computes attention with sinks `[H]`: `[S, H, D]`, `[S, K, D]`, `[S, K, D]` to `[S, H, D]`."""
    apply: Any = _WithSinks.apply
    out, lse = attention(lambda q, k, v: apply(q, k, v, sinks_H, segments, kernel), q_SHD, k_SKD, v_SKD)
    return reaching_sinks(out, lse, sinks_H)


class _WithSinks(torch.autograd.Function):
    """A kernel with sinks added. Neither the lse nor the sinks are reached by its backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, segments: Segments, kernel: FlashBlocks
    ) -> tuple[Tensor, Tensor]:
        """Returns output `[S, H, D]` and lse `[S, H]`, sinks included."""
        out, lse_HS = kernel.forward(q, k, v, segments)
        out, lse = with_sinks(out, lse_HS.T, sinks)
        out = out.to(q.dtype)
        ctx.segments, ctx.kernel = segments, kernel
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        """Returns the gradients of q `[S, H, D]`, k and v `[S, K, D]`."""
        q, k, v, out, lse = ctx.saved_tensors
        lse_HS = lse.T.contiguous()
        return (*ctx.kernel.backward(grad.contiguous(), q, k, v, out, lse_HS, ctx.segments), None, None, None)


class FlashKernel:
    """torch's flash kernels by parts; see `FlashBlocks`."""

    def forward(self, q_QHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        left, right = _window(segments)
        out, lse, *_ = flash_attention_forward(
            q_QHD,
            k_NKD,
            v_NKD,
            segments.cu_queries,
            segments.cu_keys,
            *_bounds(segments),
            0.0,
            (left, right) == CAUSAL,
            False,
            scale=segments.scale,
            window_size_left=left,
            window_size_right=right,
        )
        return out, lse

    def backward(
        self,
        grad_QHD: Tensor,
        q_QHD: Tensor,
        k_NKD: Tensor,
        v_NKD: Tensor,
        out_QHD: Tensor,
        lse_HQ: Tensor,
        segments: Segments,
    ) -> tuple[Tensor, Tensor, Tensor]:
        left, right = _window(segments)
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q_QHD.device)
        gradients: tuple[Tensor, Tensor, Tensor] = flash_attention_backward(
            grad_QHD,
            q_QHD,
            k_NKD,
            v_NKD,
            out_QHD,
            lse_HQ,
            segments.cu_queries,
            segments.cu_keys,
            *_bounds(segments),
            0.0,
            (left, right) == CAUSAL,
            no_dropout,
            torch.empty(0, device=q_QHD.device),
            scale=segments.scale,
            window_size_left=left,
            window_size_right=right,
        )
        return gradients


def _window(segments: Segments) -> tuple[int, int]:
    """Returns how many keys a query sees to its left and to its right."""
    if not segments.causal:
        return ALL
    return CAUSAL if segments.window is None else (segments.window - 1, 0)


def _bounds(segments: Segments) -> tuple[int, int]:
    """Returns bounds of the lengths of segments of queries and of keys."""
    # With a bound of one query and grouped heads the kernel takes a path for decoding, which orders
    # the lse differently.
    return max(2, segments.longest_queries), segments.longest_keys
