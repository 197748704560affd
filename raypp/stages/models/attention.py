"""Causal attention within documents: no token attends across a document boundary. What a kernel of
it must offer, and the plain one.

A layer's rule (`AttentionRule`) may add a window, a soft cap, a scale and sinks.

`PLAIN` is the reference of every kernel, and what CPUs use. Each document is a separate call (on
CPU 2.4× faster than one call with a block mask). If all documents have the same length, one batched
call covers them. Soft caps, sinks and documents longer than a window are computed with matrix
products (`attention_products`).

Legend: B rows, T tokens, S = B · T tokens of the microbatch, H query heads, K key/value heads, D
head width, N documents.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from raypp.job.layer_rules import NO_RULE, AttentionRule
from raypp.stages.models.attention_products import document_by_products
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.recomputed import attention

# Kernels. Legend: S tokens of a microbatch, Q queries, N keys, H query heads, K key/value heads (K
# divides H), D head width.


@dataclass(frozen=True, eq=False)
class Segments:
    """Which queries see which keys: segment i of the queries sees segment i of the keys.

    Attributes:
        cu_queries: Where the segments of queries begin, int32 `[segments + 1]`, from 0 to Q.
        cu_keys: Where the segments of keys begin, int32 `[segments + 1]`, from 0 to N.
        longest_queries: At least the length of the longest segment of queries, on the host.
        longest_keys: The same for keys.
        causal: True: a query sees the keys up to itself, and both sides have the same segments.
            False: it sees all keys of its segment.
        window: A query sees this many keys, itself included; only where `causal`. None: no limit.
        scale: Factor of the scores. None: head width ** -0.5.
    """

    cu_queries: Tensor
    cu_keys: Tensor
    longest_queries: int
    longest_keys: int
    causal: bool
    window: int | None = None
    scale: float | None = None


class FlashBlocks(Protocol):
    """Variable-length attention by parts: each part with the values needed to combine them. A
    part's output and log-sum-exp (lse) are over the keys given. Given the output and the lse over
    *all* parts, the gradients of each part are computed separately and added."""

    def forward(self, q_QHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        """Returns the output `[Q, H, D]` and the lse `[H, Q]`, fp32 or the output's if wider."""

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
        """Returns the gradients of queries `[Q, H, D]`, keys and values `[N, K, D]`."""


@dataclass(frozen=True)
class AttentionKernel:
    """One way to compute attention within the documents of a microbatch. `attend`: computes it for
    whole rows: `[S, H, D]`, `[S, K, D]`, `[S, K, D]` to `[S, H, D]`, under the layer's rule, with
    the scores `[H]` of its sinks if it has them. `blocks`: the same kernel by parts, for ring
    attention. None: ring attention uses `parallel.ring_hops.BlockHops`. `delta`: what layers with a
    delta rule have instead of attention, for whole rows, as `fla_delta_rule.chunked`. None: the
    operators of `delta_rule`."""

    name: str
    attend: Callable[[Tensor, Tensor, Tensor, PackedDocuments, AttentionRule, Tensor | None], Tensor]
    blocks: FlashBlocks | None = None
    delta: Callable[[PackedDocuments, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None


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
