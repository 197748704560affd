"""The contract of a variable-length attention kernel, computed plainly on any device.

It checks what the kernels of a GPU check, or silently rely on, and computes each segment with
matrix products in fp32, or in the dtype of the inputs if wider. So code that calls such a kernel
runs on a CPU, and its numbers are compared with attention over whole rows.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from raypp.job.layer_rules import AttentionRule
from raypp.stages.models.attention import AttentionKernel, Segments
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.varlen_attention import attend_with_sinks


class VarlenReference:
    """See `FlashBlocks`. Counts its calls."""

    def __init__(self) -> None:
        self.forwards = self.backwards = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        self.forwards += 1
        check(q, k, v, segments)
        out = torch.empty_like(q)
        lse = torch.empty((q.shape[1], len(q)), dtype=wide(q), device=q.device)
        for at, to in spans(segments):
            scores = scores_of(q[at], k[to], segments)
            lse[:, at] = scores.logsumexp(-1)
            out[at] = (scores.softmax(-1) @ per_query_head(v[to], q)).transpose(0, 1).to(q.dtype)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.backwards += 1
        check(q, k, v, segments)
        assert grad.dtype == out.dtype == q.dtype and grad.shape == out.shape == q.shape
        assert lse.shape == (q.shape[1], len(q)) and lse.dtype == wide(q) and lse.is_contiguous()
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide(x), device=x.device) for x in (q, k, v))
        for at, to in spans(segments):
            keys, values = per_query_head(k[to], q), per_query_head(v[to], q)
            queries, grads, outs = (x[at].transpose(0, 1).to(wide(q)) for x in (q, grad, out))
            weights = (scores_of(q[at], k[to], segments) - lse[:, at, None]).exp()
            inner = grads @ values.transpose(1, 2) - (grads * outs).sum(-1, keepdim=True)
            dscores = weights * inner * scale_of(q, segments)
            dq[at] = (dscores @ keys).transpose(0, 1)
            dk[to] = per_kv_head(dscores.transpose(1, 2) @ queries, k)
            dv[to] = per_kv_head(weights.transpose(1, 2) @ grads, v)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def reference_kernel() -> AttentionKernel:
    """Returns a kernel of attention that calls `VarlenReference`, with its backward."""
    blocks = VarlenReference()

    def attend(
        q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments, rule: AttentionRule, sinks: Tensor | None
    ) -> Tensor:
        assert rule.soft_cap is None
        cu, longest = documents.cu_seqlens, documents.max_len
        segments = Segments(cu, cu, longest, longest, True, rule.window, rule.scale)
        if sinks is not None:
            return attend_with_sinks(q, k, v, sinks, segments, blocks)
        out: Tensor = _Attend.apply(q, k, v, blocks, segments)  # type: ignore[no-untyped-call]
        return out

    return AttentionKernel("reference", attend, blocks)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: VarlenReference, segments: Segments) -> Tensor:
        out, lse = blocks.forward(q, k, v, segments)
        ctx.blocks, ctx.segments = blocks, segments
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return (*ctx.blocks.backward(grad, q, k, v, out, lse, ctx.segments), None, None)


def check(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> None:
    assert q.dtype == k.dtype == v.dtype and k.shape == v.shape
    assert q.dim() == k.dim() == 3 and q.shape[1] % k.shape[1] == 0 and q.shape[2] == k.shape[2]
    assert all(x.stride(-1) == 1 for x in (q, k, v)), "the last dim must be contiguous"
    for cu, tokens, longest in (
        (segments.cu_queries, len(q), segments.longest_queries), (segments.cu_keys, len(k), segments.longest_keys),
    ):  # fmt: skip
        assert cu.dtype == torch.int32 and cu.is_contiguous() and cu.device == q.device
        assert int(cu[0]) == 0 and int(cu[-1]) == tokens, "the segments must cover all tokens"
        assert cu.diff().min() > 0, "no segment is empty"
        assert cu.diff().max() <= longest, "a segment is longer than the bound says"
    assert segments.cu_queries.shape == segments.cu_keys.shape
    assert not segments.causal or torch.equal(segments.cu_queries, segments.cu_keys)
    assert segments.window is None or (segments.causal and segments.window > 0)


def spans(segments: Segments) -> Iterator[tuple[slice, slice]]:
    queries, keys = segments.cu_queries.tolist(), segments.cu_keys.tolist()
    for index in range(len(queries) - 1):
        yield slice(queries[index], queries[index + 1]), slice(keys[index], keys[index + 1])


def wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def per_query_head(x_NKD: Tensor, q_QHD: Tensor) -> Tensor:
    """Returns keys or values `[N, K, D]` for each query head: `[H, N, D]`."""
    return x_NKD.to(wide(x_NKD)).repeat_interleave(q_QHD.shape[1] // x_NKD.shape[1], 1).transpose(0, 1)


def per_kv_head(d_HND: Tensor, like_NKD: Tensor) -> Tensor:
    """Sums gradients `[H, N, D]` over the query heads of each key/value head: `[N, K, D]`."""
    return d_HND.unflatten(0, (like_NKD.shape[1], -1)).sum(1).transpose(0, 1)


def scale_of(q_QHD: Tensor, segments: Segments) -> float:
    return float(q_QHD.shape[-1] ** -0.5) if segments.scale is None else segments.scale


def scores_of(q_QHD: Tensor, k_NKD: Tensor, segments: Segments) -> Tensor:
    scores = q_QHD.transpose(0, 1).to(wide(q_QHD)) @ per_query_head(k_NKD, q_QHD).transpose(1, 2)
    scores = scores * scale_of(q_QHD, segments)
    if not segments.causal:
        return scores
    all_pairs = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device)
    hidden = all_pairs.triu(1)
    if segments.window is not None:
        hidden |= all_pairs.tril(-segments.window)
    return scores.masked_fill(hidden, float("-inf"))
