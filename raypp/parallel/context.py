"""Context parallelism: each rank of a cp group computes on a share of every row.

All ranks of the group read the same rows. All layers except attention treat each token separately.
Attention reaches the tokens of other ranks through `PackedDocuments.across`.

Legend: B rows, T tokens of a padded row, R ranks of the cp group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from raypp.models.attention import PLAIN
from raypp.models.attention_kernel import AttentionKernel
from raypp.models.documents import Move, PackedDocuments
from raypp.parallel.hop_segments import hop_segments
from raypp.parallel.ring import Ring, ring_attention
from raypp.parallel.ring_hops import BlockHops, FlashHops, RingHops
from raypp.parallel.ulysses import ulysses_attention
from raypp.parallel.zigzag import RingPlan, plan_ring, zigzag
from raypp.spec.attention_rule import AttentionRule


class ContextShare(Protocol):
    """The tokens of every row that a rank computes on, and how its attention reaches the others."""

    @property
    def size(self) -> int:
        """R. A padded row is cut into R equal parts."""
        ...

    def columns(self, length: int) -> NDArray[np.int64]:
        """Returns the indices of this rank's tokens in a padded row, int64 `[length / R]`.

        They are in the order in which the rank holds them. `length` is T.
        """
        ...

    def documents(self, rows: Sequence[Sequence[int]], length: int, kernel: AttentionKernel = PLAIN) -> PackedDocuments:
        """Returns the documents of whole rows padded to `length`, with attention across the ranks.

        Args:
            rows: The document lengths of each of the B rows, in tokens.
            length: T.
            kernel: Computes the attention.

        Returns:
            The documents, with all tensors on the host.
        """
        ...


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
    """Ring attention of one microbatch.

    Attributes:
        ring: The ranks.
        lengths: Lengths of all documents of whole rows.
        row_len: T.
        hops: The hops of layers without a window and without a soft cap.
        plans: The plans by window, made when a layer first needs them.
    """

    ring: Ring
    lengths: Sequence[int]
    row_len: int
    hops: RingHops
    plans: dict[int | None, RingPlan] = field(default_factory=dict)

    def __call__(
        self, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, rule: AttentionRule, sinks_H: Tensor | None
    ) -> Tensor:
        return ring_attention(q_SHD, k_SKD, v_SKD, self.ring, self._hops(rule.within(max(self.lengths))), sinks_H)

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
    """Ring attention: a rank holds one chunk from the front of each row and one from its back.

    See `zigzag`.
    """

    ring: Ring

    @property
    def size(self) -> int:
        return self.ring.size

    def columns(self, length: int) -> NDArray[np.int64]:
        if length % (2 * self.size):
            raise ValueError(f"rows of {length} tokens cannot be cut into {2 * self.size} equal chunks")
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
