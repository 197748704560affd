"""Causal attention within documents: no token attends across a document boundary.

A layer's rule (`AttentionRule`) may add a window, a soft cap, a scale and sinks.

`PLAIN` is the reference of every kernel, and what CPUs use. Each document is a separate call (on
CPU 2.4× faster than one call with a block mask). If all documents have the same length, one batched
call covers them. Soft caps, sinks and documents longer than a window are computed with matrix
products (`attention_products`).

Legend: B rows, T tokens, S = B · T tokens of the microbatch, H query heads, K key/value heads, D
head width, N documents.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from raypp.job.layer_rules import NO_RULE, AttentionRule
from raypp.stages.models.attention_kernel import AttentionKernel
from raypp.stages.models.attention_products import document_by_products
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.recomputed import attention


# Not compiled: document lengths are Python ints, so every microbatch would trigger a recompilation.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_attention(
    q_SHD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    documents: PackedDocuments,
    rule: AttentionRule = NO_RULE,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Computes causal attention within every document of a microbatch.

    Collective over the cp group if `documents.across` is set.

    Args:
        k_SKD: Keys `[B·T, K, D]`, rotary encoding applied; K divides H.
        documents: The document boundaries, the kernel, and how to reach the other ranks if rows are
            cut over several ranks. T is then this rank's share of a row.
        sinks_H: The scores of the sinks, `[H]`; given if the rule has sinks.

    Returns:
        The output `[B·T, H, D]`.
    """
    if documents.across is not None:
        return documents.across(q_SHD, k_SKD, v_SKD, rule, sinks_H)
    return (documents.kernel or PLAIN).attend(q_SHD, k_SKD, v_SKD, documents, rule.within(documents.max_len), sinks_H)


def _plain(
    q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, documents: PackedDocuments, rule: AttentionRule, sinks_H: Tensor | None
) -> Tensor:
    """Computes `packed_attention` document by document: `[S, H or K, D]` to `[S, H, D]`."""
    length = documents.uniform
    if length is not None and not rule.special:
        q, k, v = (t.view(-1, length, *t.shape[1:]) for t in (q_SHD, k_SKD, v_SKD))
        return _attend(q, k, v, rule.scale).flatten(0, 1)
    sizes = list(documents.lengths)
    # Use one split and one cat: their backwards are a cat and a split. The backward of each slice
    # would fill a full tensor with zeros.
    pieces = zip(*(torch.split(t, sizes) for t in (q_SHD, k_SKD, v_SKD)), strict=True)
    return torch.cat([_document(q, k, v, rule.within(len(q)), sinks_H) for q, k, v in pieces])


def _document(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, rule: AttentionRule, sinks_H: Tensor | None) -> Tensor:
    """Computes attention in one document: `[T, H or K, D]` to `[T, H, D]`."""
    if rule.special:
        return document_by_products(q_THD, k_TKD, v_TKD, rule, sinks_H)
    return _attend(q_THD[None], k_TKD[None], v_TKD[None], rule.scale)[0]


def _attend(q_NTHD: Tensor, k_NTKD: Tensor, v_NTKD: Tensor, scale: float | None) -> Tensor:
    """Computes causal attention in N documents: `[N, T, H or K, D]` to `[N, T, H, D]`."""
    heads, kv_heads = q_NTHD.shape[2], k_NTKD.shape[2]
    if q_NTHD.is_cuda and heads != kv_heads and q_NTHD.dtype == torch.float32:
        # No kernel for fp32 that keeps no scores of T × T takes fewer key/value heads than queries.
        k_NTKD, v_NTKD = (t.repeat_interleave(heads // kv_heads, dim=2) for t in (k_NTKD, v_NTKD))
    compute = partial(F.scaled_dot_product_attention, is_causal=True, scale=scale, enable_gqa=heads != k_NTKD.shape[2])
    out_NHTD = attention(compute, *(t.transpose(1, 2) for t in (q_NTHD, k_NTKD, v_NTKD)))
    return out_NHTD.transpose(1, 2)


PLAIN = AttentionKernel("plain", _plain)
"""Attention by torch's `scaled_dot_product_attention`, for every device, dtype and head width."""
