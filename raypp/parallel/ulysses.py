"""Ulysses attention: before attention tokens are exchanged for heads, after it heads for tokens.

Each rank then has whole rows for its share of the heads, and any attention can be used (DeepSpeed-Ulysses,
arXiv:2309.14509). With fewer key/value heads than ranks, or a number that the ranks do not divide, each is sent to
all ranks whose queries need it; autograd sums what comes back.

Legend: B rows, T tokens of a row, t = T / R this rank's, R ranks, H query heads, K key/value heads, D head width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from raypp.models.attention import packed_attention
from raypp.models.documents import PackedDocuments


def ulysses_attention(
    q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, rows: int, group: dist.ProcessGroup, whole: PackedDocuments
) -> Tensor:
    """Causal attention within documents over whole rows, of which this rank holds a contiguous part.

    Collective over the group, forward and backward.

    Args:
        q_SHD: This rank's queries `[B·t, H, D]`, rotary positions applied; so are the keys. R divides H.
        k_SKD: Its keys `[B·t, K, D]`.
        v_SKD: Its values `[B·t, K, D]`.
        rows: B.
        group: The ranks that share the rows.
        whole: The documents of the whole rows.

    Returns:
        `[B·t, H, D]`.
    """
    ranks = group.size()
    copies = math.lcm(k_SKD.shape[1], ranks) // k_SKD.shape[1]
    if copies > 1:
        k_SKD, v_SKD = k_SKD.repeat_interleave(copies, 1), v_SKD.repeat_interleave(copies, 1)
    heads = [x.shape[1] // ranks for x in (q_SHD, k_SKD, v_SKD)]
    # One exchange for all three: [R, B·t, heads of a rank, D], by the rank that will have them.
    per_rank = [x.reshape(len(x), ranks, -1, x.shape[-1]) for x in (q_SHD, k_SKD, v_SKD)]
    mine = torch.cat(per_rank, dim=2).transpose(0, 1)
    theirs = _exchanged(mine, group)
    row_wise = theirs.view(ranks, rows, -1, *theirs.shape[2:]).transpose(0, 1).flatten(0, 2)
    q, k, v = torch.split(row_wise, heads, dim=1)
    out = packed_attention(q, k, v, whole)
    by_rank = out.reshape(rows, ranks, -1, *out.shape[1:]).transpose(0, 1)
    back = _exchanged(by_rank.flatten(1, 2), group)
    return back.transpose(0, 1).flatten(1, 2)


def _exchanged(x_R: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Part i of the first dim goes to rank i; part i of the result came from it."""
    out: Tensor = _Exchange.apply(x_R, group)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_R: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(x_R, group)

    @staticmethod
    def backward(ctx: Any, grad_R: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grad_R, ctx.group), None


def _all_to_all(x_R: Tensor, group: dist.ProcessGroup) -> Tensor:
    # Both contiguous: gloo fills a strided output with the right numbers in the wrong places, and does not say so.
    x_R = x_R.contiguous()
    out = torch.empty(x_R.shape, dtype=x_R.dtype, device=x_R.device)
    dist.all_to_all_single(out, x_R, group=group)
    return out
