"""Ulysses attention: exchanges tokens for heads before attention, and heads for tokens after it.

In between, each rank has whole rows for its share of the heads, so any attention can be used
(DeepSpeed-Ulysses, arXiv:2309.14509). If R does not divide K, each key/value head is sent to all
ranks whose queries need it. Autograd sums the gradients that come back.

Legend: B rows, T tokens of a row, t = T / R tokens of a row on this rank, R ranks, H query heads,
K key/value heads, D head width, N = B · t tokens on this rank, h heads (queries, keys and values)
per rank.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from raypp.models.attention import packed_attention
from raypp.models.documents import PackedDocuments
from raypp.spec.attention_rule import NO_RULE, AttentionRule


def ulysses_attention(
    q_SHD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    rows: int,
    group: dist.ProcessGroup,
    whole: PackedDocuments,
    rule: AttentionRule = NO_RULE,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Computes causal attention within documents over whole rows; this rank holds a part of each.

    Collective over the group, in the forward and in the backward.

    Args:
        q_SHD: This rank's queries `[B·t, H, D]`, rotary encoding applied. R divides H.
        k_SKD: This rank's keys `[B·t, K, D]`, rotary encoding applied.
        v_SKD: This rank's values `[B·t, K, D]`.
        rows: B.
        group: The ranks that share the rows.
        whole: The documents of the whole rows.
        rule: The layer's rule.
        sinks_H: The scores of the sinks of all heads, `[H]`. None: there are none.

    Returns:
        The output `[B·t, H, D]`.
    """
    ranks = group.size()
    copies = math.lcm(k_SKD.shape[1], ranks) // k_SKD.shape[1]
    if copies > 1:
        k_SKD, v_SKD = k_SKD.repeat_interleave(copies, 1), v_SKD.repeat_interleave(copies, 1)
    heads = [x.shape[1] // ranks for x in (q_SHD, k_SKD, v_SKD)]
    # One exchange for all three: [R, B·t, heads of a rank, D], ordered by receiving rank.
    per_rank = [x.reshape(len(x), ranks, -1, x.shape[-1]) for x in (q_SHD, k_SKD, v_SKD)]
    mine = torch.cat(per_rank, dim=2).transpose(0, 1)
    theirs = _exchanged(mine, group)
    row_wise = theirs.view(ranks, rows, -1, *theirs.shape[2:]).transpose(0, 1).flatten(0, 2)
    q, k, v = torch.split(row_wise, heads, dim=1)
    if sinks_H is not None:
        sinks_H = sinks_H.chunk(ranks)[group.rank()]
    out = packed_attention(q, k, v, whole, rule, sinks_H)
    by_rank = out.reshape(rows, ranks, -1, *out.shape[1:]).transpose(0, 1)
    back = _exchanged(by_rank.flatten(1, 2), group)
    return back.transpose(0, 1).flatten(1, 2)


def _exchanged(x_R: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sends part i of the first dim to rank i and returns what each rank sent, in rank order.

    Input and result are `[R, N, h, D]`, or `[R · N, h, D]`. Collective over the group.
    """
    out: Tensor = _Exchange.apply(x_R, group)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    """`_exchanged` with its backward, which is the same exchange."""

    @staticmethod
    def forward(ctx: Any, x_R: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Exchanges `x_R` `[R, N, h, D]`; keeps the shape. Collective over the group."""
        ctx.group = group
        return _all_to_all(x_R, group)

    @staticmethod
    def backward(ctx: Any, grad_R: Tensor) -> tuple[Tensor, None]:
        """Exchanges gradients `[R, N, h, D]` back. Collective over the group."""
        return _all_to_all(grad_R, ctx.group), None


def _all_to_all(x_R: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchanges the R parts of `[R, N, h, D]`; keeps the shape. Collective over the group."""
    # Input and output must be contiguous: gloo silently ignores the strides of the output.
    x_R = x_R.contiguous()
    out = torch.empty(x_R.shape, dtype=x_R.dtype, device=x_R.device)
    dist.all_to_all_single(out, x_R, group=group)
    return out
