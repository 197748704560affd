"""Causal attention within documents: no token attends across a document boundary.

On CPU, each document is a separate call (2.4× faster there than one call with a block mask). If all
documents have the same length, one batched call covers them. On CUDA in half precision, torch's
variable-length kernel takes all documents at once. That kernel does not support fp32, so fp32 on
CUDA also goes document by document.

Legend: B rows, T tokens, S = B · T tokens of the microbatch, H query heads, K key/value heads, D
head width, N documents.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from raypp.models.documents import PackedDocuments


# Not compiled: document lengths are Python ints, so every microbatch would trigger a recompilation.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_attention(q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, documents: PackedDocuments) -> Tensor:
    """Computes causal attention within every document of a microbatch.

    Collective over the cp group if `documents.across` is set.

    Args:
        q_SHD: Queries `[B·T, H, D]`, rotary encoding applied.
        k_SKD: Keys `[B·T, K, D]`, rotary encoding applied; K divides H.
        v_SKD: Values `[B·T, K, D]`.
        documents: The document boundaries, and how to reach the other ranks if rows are cut over
            several ranks. T is then this rank's share of a row.

    Returns:
        The output `[B·T, H, D]`.
    """
    if documents.across is not None:
        return documents.across(q_SHD, k_SKD, v_SKD)
    if q_SHD.is_cuda and q_SHD.dtype in (torch.bfloat16, torch.float16):
        return _varlen(q_SHD, k_SKD, v_SKD, documents)
    length = documents.uniform
    if length is not None:
        return _attend(*(t.view(-1, length, *t.shape[1:]) for t in (q_SHD, k_SKD, v_SKD))).flatten(0, 1)
    sizes = list(documents.lengths)
    # Use one split and one cat: their backwards are a cat and a split. The backward of each slice
    # would fill a full tensor with zeros.
    pieces = zip(*(torch.split(t, sizes) for t in (q_SHD, k_SKD, v_SKD)), strict=True)
    return torch.cat([_attend(q[None], k[None], v[None])[0] for q, k, v in pieces])


def _attend(q_NTHD: Tensor, k_NTKD: Tensor, v_NTKD: Tensor) -> Tensor:
    """Computes causal attention in N documents: `[N, T, H or K, D]` to `[N, T, H, D]`."""
    out_NHTD = F.scaled_dot_product_attention(
        q_NTHD.transpose(1, 2),
        k_NTKD.transpose(1, 2),
        v_NTKD.transpose(1, 2),
        is_causal=True,
        enable_gqa=q_NTHD.shape[2] != k_NTKD.shape[2],
    )
    return out_NHTD.transpose(1, 2)


def _varlen(q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, documents: PackedDocuments) -> Tensor:
    """`packed_attention` by torch's variable-length kernel: `[S, H or K, D]` to `[S, H, D]`."""
    from torch.nn.attention.varlen import varlen_attn

    parameters = inspect.signature(varlen_attn).parameters
    groups = q_SHD.shape[1] // k_SKD.shape[1]
    if groups > 1:  # torch 2.11 has no grouped queries in this kernel; repeating gives the same result
        k_SKD, v_SKD = k_SKD.repeat_interleave(groups, 1), v_SKD.repeat_interleave(groups, 1)
    cu, longest = documents.cu_seqlens, documents.max_len
    causal: dict[str, Any] = {"is_causal": True} if "is_causal" in parameters else {"window_size": (-1, 0)}
    out: Tensor = varlen_attn(q_SHD, k_SKD, v_SKD, cu, cu, longest, longest, **causal)  # type: ignore[assignment]
    return out
