"""Attention of one block of queries and keys, with the values needed to combine blocks.

A block returns its output and the log-sum-exp (lse) of the scores of each query. The outputs of
several blocks, weighted by their lse, give the attention over all of them (online softmax,
arXiv:1805.02867). Given the lse over *all* blocks, the gradients of each block are computed
separately and added.

On CPU, this calls the kernel behind torch's own attention. On other devices, attention is computed
with matrix products in fp32, one tile of queries at a time.

Legend: Q queries, N keys, S queries or keys, H query heads, K key/value heads (K divides H), G = H
/ K, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raypp.torch_private import flash_attention_for_cpu, flash_attention_for_cpu_backward

TILE = 1024
"""Queries per tile in attention with matrix products. Limits the scores held at once."""


def attend_block(q_QHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Computes the attention of one block.

    Args:
        q_QHD: Queries `[Q, H, D]`.
        k_NKD: Keys `[N, K, D]`.
        v_NKD: Values `[N, K, D]`.
        causal: True: query i sees keys 0 to i, and Q = N. False: every query sees every key.

    Returns:
        The output `[Q, H, D]` and the lse `[Q, H]`. The lse is fp32, or the output's dtype if
        wider.
    """
    if q_QHD.device.type != "cpu":
        block: tuple[Tensor, Tensor] = _by_products(q_QHD, k_NKD, v_NKD, causal)
        return block
    k_NHD, v_NHD = _per_query_head(k_NKD, q_QHD), _per_query_head(v_NKD, q_QHD)
    out, lse = flash_attention_for_cpu(_batch(q_QHD), _batch(k_NHD), _batch(v_NHD), 0.0, causal)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def block_gradients(
    grad_QHD: Tensor, q_QHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, out_QHD: Tensor, lse_QH: Tensor, *, causal: bool
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

    Returns:
        Gradients of queries `[Q, H, D]`, keys `[N, K, D]` and values `[N, K, D]`.
    """
    if q_QHD.device.type != "cpu":
        return _gradients_by_products(grad_QHD, q_QHD, k_NKD, v_NKD, out_QHD, lse_QH, causal)
    k_NHD, v_NHD = _per_query_head(k_NKD, q_QHD), _per_query_head(v_NKD, q_QHD)
    tensors = (_batch(t) for t in (grad_QHD, q_QHD, k_NHD, v_NHD, out_QHD))
    dq, dk, dv = (d[0].transpose(0, 1) for d in flash_attention_for_cpu_backward(*tensors, lse_QH.T[None], 0.0, causal))
    return dq, _per_kv_head(dk, k_NKD), _per_kv_head(dv, v_NKD)


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


def _grouped(x_QHD: Tensor, kv_heads: int) -> Tensor:
    """Groups `[Q, H, D]` by key/value head: `[K, G, Q, D]`, in fp32 or wider."""
    wide = x_QHD.to(torch.promote_types(x_QHD.dtype, torch.float32))
    return wide.reshape(len(wide), kv_heads, -1, wide.shape[-1]).permute(1, 2, 0, 3)


def _scores(q_KGQD: Tensor, k_K1ND: Tensor, first: int, causal: bool) -> Tensor:
    """Computes the scores `[K, G, Q, N]` of a tile that starts at query `first` of the block.

    The queries are `[K, G, Q, D]`, the keys `[K, 1, N, D]`.
    """
    scores: Tensor = q_KGQD @ k_K1ND.transpose(-1, -2) * q_KGQD.shape[-1] ** -0.5
    if causal:
        rows = torch.arange(first, first + scores.shape[-2], device=scores.device)
        columns = torch.arange(scores.shape[-1], device=scores.device)
        return scores.masked_fill(columns > rows[:, None], float("-inf"))
    return scores


def _ungrouped(x_KGQD: Tensor) -> Tensor:
    """Undoes `_grouped`: `[K, G, Q, D]` to `[Q, H, D]`."""
    return x_KGQD.permute(2, 0, 1, 3).flatten(1, 2)


# A custom operator hides the products inside from selective checkpointing. It would keep their
# results, which are scores here.
@torch.library.custom_op("raypp::attention_block", mutates_args=())
def _by_products(q_QHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """`attend_block` with matrix products: output `[Q, H, D]`, lse `[Q, H]`, in fp32 or wider."""
    kv_heads = k_NKD.shape[1]
    k, v = _grouped(k_NKD, kv_heads), _grouped(v_NKD, kv_heads)
    outs, lses = [], []
    for first in range(0, len(q_QHD), TILE):
        scores = _scores(_grouped(q_QHD[first : first + TILE], kv_heads), k, first, causal)
        lse = scores.logsumexp(-1, keepdim=True)
        outs.append(_ungrouped((scores - lse).exp() @ v))
        lses.append(_ungrouped(lse)[..., 0])
    return torch.cat(outs), torch.cat(lses)


def _gradients_by_products(
    grad_QHD: Tensor, q_QHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, out_QHD: Tensor, lse_QH: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`block_gradients` with matrix products, in fp32 or wider: `[Q, H, D]` and twice `[N, K, D]`.

    This is FlashAttention's backward (arXiv:2205.14135, appendix B.4), one tile of queries at a
    time.
    """
    kv_heads = k_NKD.shape[1]
    k, v = _grouped(k_NKD, kv_heads), _grouped(v_NKD, kv_heads)
    dk, dv, dqs = torch.zeros_like(k), torch.zeros_like(v), []
    for first in range(0, len(q_QHD), TILE):
        tile = slice(first, first + TILE)
        q, out, grad = (_grouped(x[tile], kv_heads) for x in (q_QHD, out_QHD, grad_QHD))
        weights = (_scores(q, k, first, causal) - _grouped(lse_QH[tile, :, None], kv_heads)).exp()
        dv += (weights.transpose(-1, -2) @ grad).sum(1, keepdim=True)
        inner = grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)
        dscores = weights * inner * q.shape[-1] ** -0.5
        dqs.append(_ungrouped(dscores @ k))
        dk += (dscores.transpose(-1, -2) @ q).sum(1, keepdim=True)
    return torch.cat(dqs), _ungrouped(dk), _ungrouped(dv)
