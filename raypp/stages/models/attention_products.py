"""Attention under any rule, with matrix products in fp32 or wider, one tile of queries at a time.

A part returns its output and the log-sum-exp (lse) of each query's scores. Given the output and the
lse over *all* parts, the gradients of each part are computed separately and added.

Legend: Q queries, N keys, S queries and keys of a document, H query heads, K key/value heads (K
divides H), G = H / K, D head width, n keys that a tile of queries sees.
"""

from typing import Any

import torch
from torch import Tensor

from raypp.job.layer_rules import AttentionRule
from raypp.stages.models.recomputed import attention

TILE = 1024
"""Queries per tile. Limits the scores held at once."""


def attend_by_products(
    q_QHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, offset: int, rule: AttentionRule
) -> tuple[Tensor, Tensor]:
    """Computes the attention of queries to keys of the same document, without sinks. `offset`:
    position of the first query minus that of the first key. Every query must see a key. Sinks take
    part later, see `with_sinks`. Returns the output `[Q, H, D]` and the lse `[Q, H]`, in fp32 or
    wider."""
    attended: tuple[Tensor, Tensor] = _attend(q_QHD, k_NKD, v_NKD, offset, rule.window, rule.soft_cap, rule.scale)
    return attended


def gradients_by_products(
    grad_QHD: Tensor,
    q_QHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    out_QHD: Tensor,
    lse_QH: Tensor,
    offset: int,
    rule: AttentionRule,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes what one part contributes to the gradients. This is FlashAttention's backward
    (arXiv:2205.14135, appendix B.4), one tile of queries at a time. Returns gradients of queries
    `[Q, H, D]`, keys and values `[N, K, D]`, in fp32 or wider."""
    kv_heads = k_NKD.shape[1]
    k, v = _grouped(k_NKD, kv_heads), _grouped(v_NKD, kv_heads)
    dk, dv, dqs = torch.zeros_like(k), torch.zeros_like(v), []
    scale = q_QHD.shape[-1] ** -0.5 if rule.scale is None else rule.scale
    for first in range(0, len(q_QHD), TILE):
        tile = slice(first, first + TILE)
        q, out, grad = (_grouped(x[tile], kv_heads) for x in (q_QHD, out_QHD, grad_QHD))
        seen = _seen(first + offset, q.shape[2], len(k_NKD), rule.window)
        scores, uncapped = _scores(q, k[:, :, seen], first + offset - seen.start, rule.window, rule.soft_cap, scale)
        weights = (scores - _grouped(lse_QH[tile, :, None], kv_heads)).exp()
        dv[:, :, seen] += (weights.transpose(-1, -2) @ grad).sum(1, keepdim=True)
        inner = grad @ v[:, :, seen].transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)
        dscores = weights * inner * scale
        if rule.soft_cap is not None:
            dscores *= 1 - (uncapped / rule.soft_cap).tanh().square()
        dqs.append(_ungrouped(dscores @ k[:, :, seen]))
        dk[:, :, seen] += (dscores.transpose(-1, -2) @ q).sum(1, keepdim=True)
    return torch.cat(dqs), _ungrouped(dk), _ungrouped(dv)


def document_by_products(
    q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, rule: AttentionRule, sinks_H: Tensor | None
) -> Tensor:
    """Computes causal attention within one document, `[S, H or K, D]` to `[S, H, D]`."""
    apply: Any = _Document.apply
    out, lse = attention(lambda q, k, v: apply(q, k, v, rule, sinks_H), q_SHD, k_SKD, v_SKD)
    return reaching_sinks(out, lse, sinks_H)


def with_sinks(out_QHD: Tensor, lse_QH: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Adds the sinks `[H]` to the softmax of an output `[Q, H, D]` and its lse `[Q, H]`. The
    backwards of parts then take the results as output and lse over all parts."""
    both = torch.logaddexp(lse_QH, sinks_H.to(lse_QH.dtype))
    return out_QHD * (lse_QH - both).exp()[..., None], both


def reaching_sinks(out_QHD: Tensor, lse_QH: Tensor, sinks_H: Tensor | None) -> Tensor:
    """Returns `out_QHD` unchanged, whose backward also gives the gradient of the sinks.

    The sinks have their own nodes in the graph: a split backward computes gradients of inputs and
    of weights at different times, and must not run the attention's backward twice.

    Args:
        out_QHD: The output of `with_sinks`, `[Q, H, D]`.
        lse_QH: The lse of `with_sinks`, `[Q, H]`.
        sinks_H: The sinks `[H]`; None: there are none.
    """
    if sinks_H is None or not (torch.is_grad_enabled() and sinks_H.requires_grad):
        return out_QHD
    shares_QH = (sinks_H.detach().to(lse_QH.dtype) - lse_QH).exp().to(out_QHD.dtype)
    slopes_QHD = -shares_QH[..., None] * out_QHD.detach()
    return out_QHD + slopes_QHD * (sinks_H - sinks_H.detach()).to(out_QHD.dtype)[:, None]


class _Document(torch.autograd.Function):
    """Attention within one document. Neither the lse nor the sinks are reached by its backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns output `[S, H, D]` and lse `[S, H]`, sinks included."""
        out, lse = attend_by_products(q, k, v, 0, rule)
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.rule = rule
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Returns the gradients of q `[S, H, D]`, k and v `[S, K, D]`."""
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = gradients_by_products(grad, q, k, v, out, lse, 0, ctx.rule)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


# A custom operator hides the products inside from selective checkpointing. It would keep their
# results, which are scores here.
@torch.library.custom_op("raypp::attention_by_products", mutates_args=())
def _attend(
    q_QHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    offset: int,
    window: int | None,
    soft_cap: float | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """`attend_by_products`: output `[Q, H, D]`, lse `[Q, H]`, in fp32 or wider."""
    kv_heads = k_NKD.shape[1]
    k, v = _grouped(k_NKD, kv_heads), _grouped(v_NKD, kv_heads)
    scale = q_QHD.shape[-1] ** -0.5 if scale is None else scale
    outs, lses = [], []
    for first in range(0, len(q_QHD), TILE):
        q = _grouped(q_QHD[first : first + TILE], kv_heads)
        seen = _seen(first + offset, q.shape[2], len(k_NKD), window)
        scores, _ = _scores(q, k[:, :, seen], first + offset - seen.start, window, soft_cap, scale)
        lse = scores.logsumexp(-1, keepdim=True)
        outs.append(_ungrouped((scores - lse).exp() @ v[:, :, seen]))
        lses.append(_ungrouped(lse)[..., 0])
    return torch.cat(outs), torch.cat(lses)


@_attend.register_fake
def _(
    q_QHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, offset: int, window: Any, soft_cap: Any, scale: Any
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q_QHD.dtype, torch.float32)
    return q_QHD.new_empty(q_QHD.shape, dtype=wide), q_QHD.new_empty(q_QHD.shape[:2], dtype=wide)


def _seen(first: int, queries: int, keys: int, window: int | None) -> slice:
    """Returns the keys that any query of a tile sees. Its first query is at position `first`."""
    return slice(0 if window is None else max(0, first - window + 1), min(keys, first + queries))


def _scores(
    q_KGQD: Tensor, k_K1nD: Tensor, offset: int, window: int | None, soft_cap: float | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Computes the scores `[K, G, Q, n]` of a tile, and those before cap and mask. Queries
    `[K, G, Q, D]`, keys `[K, 1, n, D]`; `offset` is as in `attend_by_products`, for the tile and
    its keys."""
    uncapped: Tensor = q_KGQD @ k_K1nD.transpose(-1, -2) * scale
    scores = uncapped if soft_cap is None else (uncapped / soft_cap).tanh() * soft_cap
    queries, keys = scores.shape[-2:]
    hides_later, hides_earlier = keys - 1 > offset, window is not None and offset + queries - 1 >= window
    if not hides_later and not hides_earlier:
        return scores, uncapped
    at_Q1 = torch.arange(offset, offset + queries, device=scores.device)[:, None]
    at_n = torch.arange(keys, device=scores.device)
    hidden = at_n > at_Q1
    if window is not None:
        hidden |= at_n <= at_Q1 - window
    return scores.masked_fill(hidden, float("-inf")), uncapped


def _grouped(x_QHD: Tensor, kv_heads: int) -> Tensor:
    """Groups `[Q, H, D]` by key/value head: `[K, G, Q, D]`, in fp32 or wider."""
    wide = x_QHD.to(torch.promote_types(x_QHD.dtype, torch.float32))
    return wide.reshape(len(wide), kv_heads, -1, wide.shape[-1]).permute(1, 2, 0, 3)


def _ungrouped(x_KGQD: Tensor) -> Tensor:
    """Undoes `_grouped`: `[K, G, Q, D]` to `[Q, H, D]`."""
    return x_KGQD.permute(2, 0, 1, 3).flatten(1, 2)
