"""What a rank computes in each hop of ring attention: block by block, or in one kernel call.

`BlockHops` is the reference and what CPUs use. `FlashHops` computes a hop by one call of a
variable-length kernel, on CUDA. Both add a hop to the running output and log-sum-exp (lse), and to
the running gradients.

Legend: S this rank's tokens of a microbatch, H query heads, K key/value heads, D head width, Q
queries of a block or hop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from raypp.job.layer_rules import NO_RULE, AttentionRule
from raypp.stages.models.attention import FlashBlocks, Segments
from raypp.stages.models.attention_products import attend_by_products, gradients_by_products
from raypp.stages.models.documents import Move
from raypp.stages.parallel.zigzag import Block, RingPlan, joined_spans
from raypp.torch_private import flash_attention_for_cpu, flash_attention_for_cpu_backward


@dataclass(frozen=True)
class BlockHops:
    """Each block of the plan by itself, with `attend_block`. `plan`: the blocks, made with the
    rule's window. `rule`: the layer's rule."""

    plan: RingPlan
    rule: AttentionRule = NO_RULE

    @property
    def count(self) -> int:
        """The number of hops, at least 1; the same on all ranks."""
        return self.plan.hops

    def attend(self, hop: int, q_SHD: Tensor, kv: Tensor, out_SHD: Tensor, lse_SH: Tensor) -> None:
        """Adds a hop's attention in place. Hop 0 overwrites: every query sees itself there. `kv`:
        keys and values of the hop, `[2, S, K, D]`."""
        for block in self.plan.blocks[hop]:
            k, v = kv[:, block.keys]
            out, lse = attend_block(q_SHD[block.queries], k, v, **self._how(block))
            if block.causal:  # the causal block of a query comes first
                out_SHD[block.queries], lse_SH[block.queries] = out, lse
            else:
                _add(out_SHD[block.queries], lse_SH[block.queries], out, lse)

    def add_gradients(
        self,
        hop: int,
        grad_SHD: Tensor,
        q_SHD: Tensor,
        kv: Tensor,
        out_SHD: Tensor,
        lse_SH: Tensor,
        dq_SHD: Tensor,
        dkv: Tensor,
    ) -> None:
        """Adds a hop's share of the gradients in place. `dkv`: running gradients of the hop's keys
        and values, `[2, S, K, D]`."""
        for block in self.plan.blocks[hop]:
            at = block.queries
            k, v = kv[:, block.keys]
            shares = block_gradients(grad_SHD[at], q_SHD[at], k, v, out_SHD[at], lse_SH[at], **self._how(block))
            for total, share in zip((dq_SHD[at], dkv[0, block.keys], dkv[1, block.keys]), shares, strict=True):
                total += share

    def _how(self, block: Block) -> dict[str, Any]:
        rule = replace(self.rule, window=block.window)
        return {"causal": block.causal, "offset": block.offset, "rule": rule}

    def moved(self, move: Move) -> BlockHops:
        """Returns the same with all its tensors moved, always in the same order."""
        return self


@dataclass(frozen=True)
class FlashHops:
    """All segments of a hop in one call of a variable-length kernel. `hops`: the segments of each
    hop, as many as all ranks need. `scale`: factor of the scores. None: head width ** -0.5."""

    hops: tuple[HopSegments, ...]
    kernel: FlashBlocks
    scale: float | None = None

    @property
    def count(self) -> int:
        return len(self.hops)

    def attend(self, hop: int, q_SHD: Tensor, kv: Tensor, out_SHD: Tensor, lse_SH: Tensor) -> None:
        at = self.hops[hop]
        if not at.queries:
            return
        k, v = (_taken(x, at.keys) for x in kv)
        out, lse_HQ = self.kernel.forward(_taken(q_SHD, at.queries), k, v, self._segments(at))
        if hop == 0:
            out_SHD.copy_(out)
            lse_SH.copy_(lse_HQ.T)
            return
        for span, part, lse in _parts(at.queries, out, lse_HQ.T):
            _add(out_SHD[span], lse_SH[span], part, lse)

    def add_gradients(
        self,
        hop: int,
        grad_SHD: Tensor,
        q_SHD: Tensor,
        kv: Tensor,
        out_SHD: Tensor,
        lse_SH: Tensor,
        dq_SHD: Tensor,
        dkv: Tensor,
    ) -> None:
        at = self.hops[hop]
        if not at.queries:
            return
        grad, q, out = (_taken(x, at.queries) for x in (grad_SHD, q_SHD, out_SHD))
        k, v = (_taken(x, at.keys) for x in kv)
        lse_HQ = _taken(lse_SH, at.queries).T.contiguous()
        dq, dk, dv = self.kernel.backward(grad, q, k, v, out, lse_HQ, self._segments(at))
        for span, share in _parts(at.queries, dq):
            dq_SHD[span] += share
        for span, dk_part, dv_part in _parts(at.keys, dk, dv):
            dkv[0, span] += dk_part
            dkv[1, span] += dv_part

    def _segments(self, at: HopSegments) -> Segments:
        return replace(at.segments, scale=self.scale)

    def moved(self, move: Move) -> FlashHops:
        return replace(self, hops=tuple(hop.moved(move) for hop in self.hops))


RingHops = BlockHops | FlashHops
"""A rank's work on one microbatch, hop by hop."""


def _add(so_far_QHD: Tensor, lse_so_far_QH: Tensor, out_QHD: Tensor, lse_QH: Tensor) -> None:
    """Adds output `[Q, H, D]` and lse `[Q, H]` of a part to the running ones, in place."""
    both = torch.logaddexp(lse_so_far_QH, lse_QH)
    share = out_QHD * (lse_QH - both).exp()[..., None]
    so_far_QHD.mul_((lse_so_far_QH - both).exp()[..., None]).add_(share)
    lse_so_far_QH.copy_(both)


def _taken(x_S: Tensor, spans: Sequence[slice]) -> Tensor:
    """Returns the spans of `[S, ...]` end to end; a view if there is one."""
    return x_S[spans[0]] if len(spans) == 1 else torch.cat([x_S[span] for span in spans])


def _parts(spans: Sequence[slice], *tensors: Tensor) -> list[tuple[Any, ...]]:
    """Undoes `_taken`: returns each span with its part of each tensor `[Q, ...]`."""
    sizes = [span.stop - span.start for span in spans]
    return list(zip(spans, *(torch.split(tensor, sizes) for tensor in tensors), strict=True))


# Attention of one block of queries and keys, with the values needed to combine blocks.
#
# A block returns its output and the log-sum-exp (lse) of the scores of each query. The outputs of
# several blocks, weighted by their lse, give the attention over all of them (online softmax,
# arXiv:1805.02867). Given the lse over *all* blocks, the gradients of each block are computed
# separately and added.
#
# On CPU, this calls the kernel behind torch's own attention. On other devices, and where a block
# has a window or a soft cap, attention is computed with matrix products
# (`raypp.stages.models.attention_products`).
#
# Legend: Q queries, N keys, S queries or keys, H query heads, K key/value heads (K divides H), D
# head width.


def attend_block(
    q_QHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    *,
    causal: bool,
    offset: int | None = None,
    rule: AttentionRule = NO_RULE,
) -> tuple[Tensor, Tensor]:
    """Computes the attention of one block. `causal`: True: query i sees keys 0 to i, and Q = N.
    False: every query sees every key. `offset`: position of the first query minus that of the first
    key, where the rule has a window that cuts the block. Every query sees a key. Returns the output
    `[Q, H, D]` and the lse `[Q, H]`. The lse is fp32, or the output's dtype if wider."""
    if _needs_products(q_QHD, rule):
        return attend_by_products(q_QHD, k_NKD, v_NKD, _offset(k_NKD, causal, offset), rule)
    k_NHD, v_NHD = _per_query_head(k_NKD, q_QHD), _per_query_head(v_NKD, q_QHD)
    tensors = _batch(q_QHD), _batch(k_NHD), _batch(v_NHD)
    out, lse = flash_attention_for_cpu(*tensors, 0.0, causal, scale=rule.scale)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def block_gradients(
    grad_QHD: Tensor,
    q_QHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    out_QHD: Tensor,
    lse_QH: Tensor,
    *,
    causal: bool,
    offset: int | None = None,
    rule: AttentionRule = NO_RULE,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes what one block contributes to the gradients. Returns gradients of queries
    `[Q, H, D]`, keys `[N, K, D]` and values `[N, K, D]`."""
    if _needs_products(q_QHD, rule):
        at = _offset(k_NKD, causal, offset)
        return gradients_by_products(grad_QHD, q_QHD, k_NKD, v_NKD, out_QHD, lse_QH, at, rule)
    k_NHD, v_NHD = _per_query_head(k_NKD, q_QHD), _per_query_head(v_NKD, q_QHD)
    tensors = (_batch(t) for t in (grad_QHD, q_QHD, k_NHD, v_NHD, out_QHD))
    gradients = flash_attention_for_cpu_backward(*tensors, lse_QH.T[None], 0.0, causal, scale=rule.scale)
    dq, dk, dv = (d[0].transpose(0, 1) for d in gradients)
    return dq, _per_kv_head(dk, k_NKD), _per_kv_head(dv, v_NKD)


def _needs_products(q_QHD: Tensor, rule: AttentionRule) -> bool:
    """Returns whether torch's kernel cannot compute a block of queries `[Q, H, D]`."""
    return q_QHD.device.type != "cpu" or rule.window is not None or rule.soft_cap is not None


def _offset(k_NKD: Tensor, causal: bool, given: int | None) -> int:
    """Returns the offset of a block of keys `[N, K, D]`; any from N on hides nothing."""
    if given is not None:
        return given
    return 0 if causal else len(k_NKD)


def _batch(x_SHD: Tensor) -> Tensor:
    """Views `[S, H, D]` as `[1, H, S, D]`, the layout of torch's kernels."""
    return x_SHD.transpose(0, 1)[None]


def _per_query_head(x_NKD: Tensor, q_QHD: Tensor) -> Tensor:
    """Repeats keys or values `[N, K, D]` for their query heads: `[N, H, D]`."""
    groups = q_QHD.shape[1] // x_NKD.shape[1]
    return x_NKD.repeat_interleave(groups, 1) if groups > 1 else x_NKD


def _per_kv_head(d_NHD: Tensor, like_NKD: Tensor) -> Tensor:
    """Sums gradients `[N, H, D]` over the query heads of each key/value head: `[N, K, D]`."""
    groups = d_NHD.shape[1] // like_NKD.shape[1]
    return d_NHD.reshape(len(d_NHD), -1, groups, d_NHD.shape[-1]).sum(2) if groups > 1 else d_NHD


# The hops as segments for a variable-length kernel: one call per hop.
#
# In hop 0, the pieces of a document that a rank holds lie end to end, so the hop is causal
# attention over them. In every other hop, each rectangle is one segment without a mask.


@dataclass(frozen=True)
class HopSegments:
    """The segments of one hop. `queries`: spans of this rank's tokens that hold the queries; empty
    if the hop has none. `keys`: spans of the tokens of the keys' rank that hold the keys.
    `segments`: how the tokens of the spans, end to end, are divided."""

    queries: tuple[slice, ...]
    keys: tuple[slice, ...]
    segments: Segments

    def moved(self, move: Move) -> HopSegments:
        """Returns the same with its tensors moved."""
        cu_queries, cu_keys = move(self.segments.cu_queries), move(self.segments.cu_keys)
        return replace(self, segments=replace(self.segments, cu_queries=cu_queries, cu_keys=cu_keys))


def hop_segments(plan: RingPlan) -> tuple[HopSegments, ...]:
    """Returns the segments of each hop of a plan of the zigzag layout, on the host."""
    first_documents = _documents(plan.blocks[0])
    first = _hop([(span, span) for span in first_documents], causal=True)
    later = ([(block.queries, block.keys) for block in blocks] for blocks in plan.blocks[1 : plan.hops])
    return first, *(_hop(spans, causal=False) for spans in later)


def _documents(blocks: Sequence[Block]) -> list[slice]:
    """Joins the blocks of hop 0 to the documents, in ascending order. A document in both chunks of
    a row has a causal block in each and the rectangle between them."""
    continues = {block.queries.start: block.keys for block in blocks if not block.causal}
    spans: list[slice] = []
    for span in sorted((block.queries for block in blocks if block.causal), key=lambda span: int(span.start)):
        before = continues.pop(span.start, None)
        if before is None:
            spans.append(span)
        elif spans and (before.start, before.stop) == (spans[-1].start, span.start):
            spans[-1] = slice(before.start, span.stop)
        else:
            raise ValueError(f"the keys {before} do not lie next to the queries {span}")
    if continues:
        raise ValueError(f"rectangles of hop 0 without a causal block: queries from {sorted(continues)}")
    return spans


def _hop(spans: Sequence[tuple[slice, slice]], *, causal: bool) -> HopSegments:
    """Returns the hop whose segments are the queries of each pair against its keys."""
    queries, keys = [queries for queries, _ in spans], [keys for _, keys in spans]
    cu_queries, cu_keys = _cumulative(queries), _cumulative(keys)
    segments = Segments(
        torch.tensor(cu_queries, dtype=torch.int32),
        torch.tensor(cu_keys, dtype=torch.int32),
        max(map(_size, queries), default=0),
        max(map(_size, keys), default=0),
        causal,
    )
    return HopSegments(tuple(joined_spans(queries)), tuple(joined_spans(keys)), segments)


def _size(span: slice) -> int:
    return int(span.stop - span.start)


def _cumulative(spans: Sequence[slice]) -> list[int]:
    return [0, *accumulate(map(_size, spans))]
