"""Attention by cuDNN: one call for all documents of a microbatch, on CUDA.

torch 2.13 has the operators, but not yet a public way to them for documents. cuDNN makes a plan for
each number of documents and bound of their lengths, so both are rounded up to powers of two, with
empty documents at the end.

Legend: S tokens of a microbatch, H query heads, K key/value heads, D head width, N documents.
"""

from typing import Any, cast

import torch
from torch import Tensor, autograd

from raypp.errors import RayppError
from raypp.job.layer_rules import AttentionRule
from raypp.stages.models.attention import AttentionKernel
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.recomputed import attention
from raypp.torch_private import cudnn_attention_backward, cudnn_attention_forward


def _attend(
    q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, documents: PackedDocuments, rule: AttentionRule, sinks_H: Tensor | None
) -> Tensor:
    """Computes attention within documents: `[S, H, D]`, `[S, K, D]`, `[S, K, D]` to `[S, H, D]`."""
    if rule.window is not None or rule.soft_cap is not None or sinks_H is not None:
        raise RayppError("attention by cuDNN has no windows, soft caps and sinks", "set train.attention: flex or plain")
    count, longest = documents.cu_seqlens.numel() - 1, documents.max_len
    empty = documents.cu_seqlens[-1:].expand((1 << (count - 1).bit_length()) - count)
    cu_N = torch.cat((documents.cu_seqlens, empty))
    bound = min(1 << (longest - 1).bit_length(), len(q_SHD))
    keys, values = (_per_query_head(x, q_SHD.shape[1]) for x in (k_SKD, v_SKD))
    apply: Any = _Cudnn.apply
    out: Tensor = attention(lambda q, k, v: apply(q, k, v, cu_N, bound, rule.scale), q_SHD, keys, values)
    return out


def _per_query_head(x_SKD: Tensor, heads: int) -> Tensor:
    """Returns `[S, H, D]`: each head as often as there are query heads for it."""
    tokens, own, width = x_SKD.shape
    return x_SKD[:, :, None].expand(tokens, own, heads // own, width).reshape(tokens, heads, width)


class _Cudnn(autograd.Function):
    """The operators of torch, of which the forward has no derivative for documents."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_N: Tensor, longest: int, scale: float | None) -> Tensor:
        """Returns the output `[S, H, D]`."""
        out, lse, *_, seed, offset, _ = cudnn_attention_forward(
            q, k, v, None, cu_N, cu_N, longest, longest, True, 0.0, True, False, scale=scale
        )
        ctx.longest, ctx.scale = longest, scale
        ctx.save_for_backward(q, k, v, out, lse, seed, offset, cu_N)
        return cast(Tensor, out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of q, k and v, each `[S, H, D]`."""
        q, k, v, out, lse, seed, offset, cu_N = ctx.saved_tensors
        gradients = cudnn_attention_backward(
            grad.contiguous(), q, k, v, out, lse, seed, offset, None, cu_N, cu_N, ctx.longest, ctx.longest, 0.0, True,
            scale=ctx.scale,
        )  # fmt: skip
        return (*gradients, None, None, None)


CUDNN = AttentionKernel("cudnn", _attend)
