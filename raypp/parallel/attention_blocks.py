"""Attention of one block of queries and keys, together with what is needed to add blocks up.

A block gives its output and, per query, the logarithm of the sum of its exponentiated scores (lse). Outputs of
several blocks weighted by their lse are the output of all of them (online softmax, arXiv:1805.02867). With the lse of
*all* blocks, each block's gradients can be computed by itself and added.

On CPU this is the kernel behind torch's own attention. Elsewhere it is written out, in fp32, a tile of queries at a
time.

Legend: Q queries, N keys, H query heads, K key/value heads (K divides H), G = H / K, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raypp.torch_private import flash_attention_for_cpu, flash_attention_for_cpu_backward

TILE = 1024
"""Queries whose scores are held at once where attention is written out."""


def attend_block(q_QHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """One block.

    Args:
        q_QHD: Queries.
        k_NKD: Keys.
        v_NKD: Values.
        causal: Query i sees keys 0 to i, and Q = N; otherwise every query sees every key.

    Returns:
        The output `[Q, H, D]` and the lse `[Q, H]`, in fp32 or in the output's own wider dtype.
    """
    if q_QHD.device.type != "cpu":
        block: tuple[Tensor, Tensor] = _written_out(q_QHD, k_NKD, v_NKD, causal)
        return block
    k_NHD, v_NHD = _per_query_head(k_NKD, q_QHD), _per_query_head(v_NKD, q_QHD)
    out, lse = flash_attention_for_cpu(_batch(q_QHD), _batch(k_NHD), _batch(v_NHD), 0.0, causal)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def block_gradients(
    grad_QHD: Tensor, q_QHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, out_QHD: Tensor, lse_QH: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """One block's share of the gradients.

    Args:
        grad_QHD: Gradient of the output of all blocks.
        q_QHD: Queries.
        k_NKD: Keys.
        v_NKD: Values.
        out_QHD: Output of all blocks.
        lse_QH: Lse over all blocks.
        causal: As in `attend_block`.

    Returns:
        Gradients of queries `[Q, H, D]`, keys `[N, K, D]` and values `[N, K, D]`.
    """
    if q_QHD.device.type != "cpu":
        return _written_out_gradients(grad_QHD, q_QHD, k_NKD, v_NKD, out_QHD, lse_QH, causal)
    k_NHD, v_NHD = _per_query_head(k_NKD, q_QHD), _per_query_head(v_NKD, q_QHD)
    tensors = (_batch(t) for t in (grad_QHD, q_QHD, k_NHD, v_NHD, out_QHD))
    dq, dk, dv = (d[0].transpose(0, 1) for d in flash_attention_for_cpu_backward(*tensors, lse_QH.T[None], 0.0, causal))
    return dq, _per_kv_head(dk, k_NKD), _per_kv_head(dv, v_NKD)


def _batch(x_SHD: Tensor) -> Tensor:
    """`[1, H, S, D]`."""
    return x_SHD.transpose(0, 1)[None]


def _per_query_head(x_NKD: Tensor, q_QHD: Tensor) -> Tensor:
    groups = q_QHD.shape[1] // x_NKD.shape[1]
    return x_NKD.repeat_interleave(groups, 1) if groups > 1 else x_NKD


def _per_kv_head(d_NHD: Tensor, like_NKD: Tensor) -> Tensor:
    groups = d_NHD.shape[1] // like_NKD.shape[1]
    return d_NHD.reshape(len(d_NHD), -1, groups, d_NHD.shape[-1]).sum(2) if groups > 1 else d_NHD


def _grouped(x_QHD: Tensor, kv_heads: int) -> Tensor:
    """`[K, G, Q, D]`, at least fp32."""
    wide = x_QHD.to(torch.promote_types(x_QHD.dtype, torch.float32))
    return wide.reshape(len(wide), kv_heads, -1, wide.shape[-1]).permute(1, 2, 0, 3)


def _scores(q_KGQD: Tensor, k_K1ND: Tensor, first: int, causal: bool) -> Tensor:
    """`[K, G, Q, N]` of a tile whose first query is the `first`-th of the block."""
    scores: Tensor = q_KGQD @ k_K1ND.transpose(-1, -2) * q_KGQD.shape[-1] ** -0.5
    if causal:
        rows = torch.arange(first, first + scores.shape[-2], device=scores.device)
        columns = torch.arange(scores.shape[-1], device=scores.device)
        return scores.masked_fill(columns > rows[:, None], float("-inf"))
    return scores


def _ungrouped(x_KGQD: Tensor) -> Tensor:
    return x_KGQD.permute(2, 0, 1, 3).flatten(1, 2)


# One operation to whoever looks on: selective checkpointing keeps the results of products, and here they are scores.
@torch.library.custom_op("raypp::attention_block", mutates_args=())
def _written_out(q_QHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    kv_heads = k_NKD.shape[1]
    k, v = _grouped(k_NKD, kv_heads), _grouped(v_NKD, kv_heads)
    outs, lses = [], []
    for first in range(0, len(q_QHD), TILE):
        scores = _scores(_grouped(q_QHD[first : first + TILE], kv_heads), k, first, causal)
        lse = scores.logsumexp(-1, keepdim=True)
        outs.append(_ungrouped((scores - lse).exp() @ v))
        lses.append(_ungrouped(lse)[..., 0])
    return torch.cat(outs), torch.cat(lses)


def _written_out_gradients(
    grad_QHD: Tensor, q_QHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, out_QHD: Tensor, lse_QH: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention's backward (arXiv:2205.14135, appendix B.4), a tile of queries at a time."""
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
