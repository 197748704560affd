"""Attention of one block of queries and keys, with the values needed to combine blocks.

A block returns its output and the log-sum-exp (lse) of the scores of each query. The outputs of
several blocks, weighted by their lse, give the attention over all of them (online softmax,
arXiv:1805.02867). Given the lse over *all* blocks, the gradients of each block are computed
separately and added.

On CPU, this calls the kernel behind torch's own attention. On other devices, and where a block has
a window or a soft cap, attention is computed with matrix products
(`raypp.models.attention_products`).

Legend: Q queries, N keys, S queries or keys, H query heads, K key/value heads (K divides H), D head
width.
"""

from __future__ import annotations

from torch import Tensor

from raypp.models.attention_products import attend_by_products, gradients_by_products
from raypp.spec.attention_rule import NO_RULE, AttentionRule
from raypp.torch_private import flash_attention_for_cpu, flash_attention_for_cpu_backward


def attend_block(
    q_QHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    *,
    causal: bool,
    offset: int | None = None,
    rule: AttentionRule = NO_RULE,
) -> tuple[Tensor, Tensor]:
    """Computes the attention of one block.

    Args:
        q_QHD: Queries `[Q, H, D]`.
        k_NKD: Keys `[N, K, D]`.
        v_NKD: Values `[N, K, D]`.
        causal: True: query i sees keys 0 to i, and Q = N. False: every query sees every key.
        offset: Position of the first query minus that of the first key, where the rule has a window
            that cuts the block. Every query sees a key.
        rule: The layer's rule; its sinks take part later.

    Returns:
        The output `[Q, H, D]` and the lse `[Q, H]`. The lse is fp32, or the output's dtype if
        wider.
    """
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
    """Computes what one block contributes to the gradients.

    Args:
        grad_QHD: Gradient of the output over all blocks, `[Q, H, D]`.
        q_QHD: Queries `[Q, H, D]`.
        k_NKD: Keys `[N, K, D]`.
        v_NKD: Values `[N, K, D]`.
        out_QHD: Output over all blocks, `[Q, H, D]`.
        lse_QH: Lse over all blocks, `[Q, H]`.
        causal: As in `attend_block`.
        offset: As there.
        rule: As there.

    Returns:
        Gradients of queries `[Q, H, D]`, keys `[N, K, D]` and values `[N, K, D]`.
    """
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
