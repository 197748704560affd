"""Context parallelism: each rank of a cp group computes on a share of every row.

All ranks of the group read the same rows. All layers except attention treat each token separately.
Attention reaches the tokens of other ranks through `PackedDocuments.across`.

Legend: B rows, T tokens of a padded row, R ranks of the cp group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from raypp.models.documents import PackedDocuments
from raypp.parallel.ring import Ring, ring_attention
from raypp.parallel.ulysses import ulysses_attention
from raypp.parallel.zigzag import plan_ring, zigzag


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

    def documents(self, rows: Sequence[Sequence[int]], length: int, device: torch.device) -> PackedDocuments:
        """Returns the documents of whole rows padded to `length`, with attention across the ranks.

        Args:
            rows: The document lengths of each of the B rows, in tokens.
            length: T.
            device: The device of `cu_seqlens`.
        """
        ...


@dataclass(frozen=True)
class WholeRows:
    """No context parallelism: the rank holds whole rows."""

    size = 1

    def columns(self, length: int) -> NDArray[np.int64]:
        return np.arange(length)

    def documents(self, rows: Sequence[Sequence[int]], length: int, device: torch.device) -> PackedDocuments:
        return PackedDocuments.of_rows(rows, length, device)


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

    def documents(self, rows: Sequence[Sequence[int]], length: int, device: torch.device) -> PackedDocuments:
        whole = PackedDocuments.of_rows(rows, length, device)
        plan = plan_ring(whole.lengths, length, self.ring.rank, self.size)
        return whole.reaching(partial(ring_attention, ring=self.ring, plan=plan))


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

    def documents(self, rows: Sequence[Sequence[int]], length: int, device: torch.device) -> PackedDocuments:
        whole = PackedDocuments.of_rows(rows, length, device)
        return whole.reaching(partial(ulysses_attention, rows=len(rows), group=self.group, whole=whole))
