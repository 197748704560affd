"""Context parallelism: each rank of a cp group computes on a share of every row.

All ranks of the group read the same rows. All layers except attention treat each token separately.
Attention reaches the tokens of other ranks through `PackedDocuments.across`.

Legend: B rows, T tokens of a padded row, R ranks of the cp group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from raypp.job.layer_rules import NO_RULE, AttentionRule
from raypp.stages.models.attention import PLAIN, packed_attention
from raypp.stages.models.attention_kernel import AttentionKernel
from raypp.stages.models.documents import Move, PackedDocuments
from raypp.stages.parallel.expert import all_to_all
from raypp.stages.parallel.ring import Ring, ring_attention
from raypp.stages.parallel.ring_hops import BlockHops, FlashHops, RingHops, hop_segments
from raypp.stages.parallel.states import StatesOverRanks
from raypp.stages.parallel.zigzag import RingPlan, plan_ring, zigzag


class ContextShare(Protocol):
    """The tokens of every row that a rank computes on, and how its attention reaches the others."""

    @property
    def size(self) -> int:
        """R. A padded row is cut into R equal parts."""

    def columns(self, length: int) -> NDArray[np.int64]:
        """Returns the indices of this rank's tokens in a padded row, int64 `[length / R]`. They are
        in the order in which the rank holds them. `length` is T."""

    def documents(self, rows: Sequence[Sequence[int]], length: int, kernel: AttentionKernel = PLAIN) -> PackedDocuments:
        """Returns the documents of whole rows padded to `length`, with attention across the ranks.
        `rows`: the document lengths of each of the B rows, in tokens. All
        tensors of the documents are on the host."""


@dataclass(frozen=True)
class WholeRows:
    """No context parallelism: the rank holds whole rows."""

    size = 1

    def columns(self, length: int) -> NDArray[np.int64]:
        return np.arange(length)

    def documents(self, rows: Sequence[Sequence[int]], length: int, kernel: AttentionKernel = PLAIN) -> PackedDocuments:
        return PackedDocuments.of_rows(rows, length, kernel=kernel)


@dataclass(frozen=True)
class _RingAcross:
    """Ring attention of one microbatch. `lengths`: lengths of all documents of whole rows. `hops`:
    the hops of layers without a window and without a soft cap. `plans`: the plans by window, made
    when a layer first needs them."""

    ring: Ring
    lengths: Sequence[int]
    row_len: int
    hops: RingHops
    plans: dict[int | None, RingPlan] = field(default_factory=dict)

    def __call__(
        self, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, rule: AttentionRule, sinks_H: Tensor | None
    ) -> Tensor:
        return ring_attention(q_SHD, k_SKD, v_SKD, self.ring, self._hops(rule.within(max(self.lengths))), sinks_H)

    def states(self) -> StatesOverRanks:
        size = self.ring.size
        held = [zigzag(rank, size) for rank in range(size)]
        return StatesOverRanks(self.lengths, self.row_len, held, self.ring.up)

    def _hops(self, rule: AttentionRule) -> RingHops:
        """Returns the hops of a layer. No flash kernel has soft caps, or windows between chunks."""
        if rule.window is None and rule.soft_cap is None and isinstance(self.hops, FlashHops):
            return replace(self.hops, scale=rule.scale)
        if rule.window not in self.plans:
            rank, size = self.ring.rank, self.ring.size
            self.plans[rule.window] = plan_ring(self.lengths, self.row_len, rank, size, window=rule.window)
        return BlockHops(self.plans[rule.window], rule)

    def moved(self, move: Move) -> _RingAcross:
        return replace(self, hops=self.hops.moved(move))


@dataclass(frozen=True)
class RingShare:
    """Ring attention: a rank holds one chunk from the front of each row and one from its back. See
    `zigzag`."""

    ring: Ring

    @property
    def size(self) -> int:
        return self.ring.size

    def columns(self, length: int) -> NDArray[np.int64]:
        chunks = np.arange(length).reshape(2 * self.size, -1)
        return chunks[list(zigzag(self.ring.rank, self.size))].reshape(-1)

    def documents(self, rows: Sequence[Sequence[int]], length: int, kernel: AttentionKernel = PLAIN) -> PackedDocuments:
        whole = PackedDocuments.of_rows(rows, length, kernel=kernel)
        plan = plan_ring(whole.lengths, length, self.ring.rank, self.size)
        blocks = kernel.blocks
        hops = BlockHops(plan) if blocks is None else FlashHops(hop_segments(plan), blocks)
        across = _RingAcross(self.ring, whole.lengths, length, hops, {None: plan})
        return whole.reaching(across, self.columns(length), len(rows))


@dataclass(frozen=True)
class _UlyssesAcross:
    """Ulysses attention of one microbatch of `rows` rows."""

    rows: int
    group: dist.ProcessGroup
    whole: PackedDocuments

    def __call__(
        self, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, rule: AttentionRule, sinks_H: Tensor | None
    ) -> Tensor:
        return ulysses_attention(q_SHD, k_SKD, v_SKD, self.rows, self.group, self.whole, rule, sinks_H)

    def states(self) -> StatesOverRanks:
        lengths = self.whole.lengths
        held = [[rank] for rank in range(self.group.size())]
        return StatesOverRanks(lengths, sum(lengths) // self.rows, held, self.group)

    def moved(self, move: Move) -> _UlyssesAcross:
        return replace(self, whole=self.whole.moved(move))


@dataclass(frozen=True)
class UlyssesShare:
    """Ulysses attention: a rank holds part `rank` of the R contiguous parts of every row."""

    rank: int
    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        return self.group.size()

    def columns(self, length: int) -> NDArray[np.int64]:
        part = length // self.size
        return np.arange(self.rank * part, (self.rank + 1) * part)

    def documents(self, rows: Sequence[Sequence[int]], length: int, kernel: AttentionKernel = PLAIN) -> PackedDocuments:
        whole = PackedDocuments.of_rows(rows, length, kernel=kernel)
        across = _UlyssesAcross(len(rows), self.group, whole)
        return whole.reaching(across, self.columns(length), len(rows))


# Ulysses attention: exchanges tokens for heads before attention, and heads for tokens after it.
#
# In between, each rank has whole rows for its share of the heads, so any attention can be used
# (DeepSpeed-Ulysses, arXiv:2309.14509). If R does not divide K, each key/value head is sent to all
# ranks whose queries need it. Autograd sums the gradients that come back.
#
# Legend: t = T / R tokens of a row on this rank, H query heads, K key/value heads, D head width.


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
    Collective over the group, in the forward and in the backward. `q_SHD`: this rank's queries
    `[B·t, H, D]`, rotary encoding applied. R divides H. `sinks_H`: the scores of the sinks of all
    heads, `[H]`. None: there are none. Returns the output `[B·t, H, D]`."""
    ranks = group.size()
    copies = math.lcm(k_SKD.shape[1], ranks) // k_SKD.shape[1]
    if copies > 1:
        k_SKD, v_SKD = k_SKD.repeat_interleave(copies, 1), v_SKD.repeat_interleave(copies, 1)
    heads = [x.shape[1] // ranks for x in (q_SHD, k_SKD, v_SKD)]
    # One exchange for all three: [R, B·t, heads of a rank, D], ordered by receiving rank.
    per_rank = [x.reshape(len(x), ranks, -1, x.shape[-1]) for x in (q_SHD, k_SKD, v_SKD)]
    gathered = torch.cat(per_rank, dim=2).transpose(0, 1)
    theirs = all_to_all(gathered, group)
    row_wise = theirs.view(ranks, rows, -1, *theirs.shape[2:]).transpose(0, 1).flatten(0, 2)
    q, k, v = torch.split(row_wise, heads, dim=1)
    if sinks_H is not None:
        sinks_H = sinks_H.chunk(ranks)[group.rank()]
    out = packed_attention(q, k, v, whole, rule, sinks_H)
    by_rank = out.reshape(rows, ranks, -1, *out.shape[1:]).transpose(0, 1)
    back = all_to_all(by_rank.flatten(1, 2), group)
    return back.transpose(0, 1).flatten(1, 2)
