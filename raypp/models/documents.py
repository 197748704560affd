"""Where the documents of a packed microbatch begin and end.

Legend: B rows, T tokens of a row (padded), N documents of the microbatch, S tokens of the microbatch on this rank,
H query heads, K key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor


def grow_last(cu_seqlens: Sequence[int], target: int) -> list[int]:
    """Stretches a row's documents over its padding.

    The padding joins the last document: a document of its own would be empty of labels and would
    only add a kernel launch, and positions after the last real token influence nothing before them.

    Args:
        cu_seqlens: Cumulative lengths of the row's documents, from 0.
        target: Padded length of the row, in tokens.
    """
    if cu_seqlens[-1] > target:
        raise ValueError(f"a row of {cu_seqlens[-1]} tokens does not fit {target}")
    return [*cu_seqlens[:-1], target] if len(cu_seqlens) > 1 else [0, target]


class AttentionAcross(Protocol):
    """Attention over rows that are cut over several ranks. Collective over them, forward and backward."""

    def __call__(self, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor) -> Tensor:
        """Causal attention within documents; `[S, H, D]`, of this rank's tokens in and out."""
        ...


@dataclass(frozen=True, eq=False)
class PackedDocuments:
    """The documents of a microbatch of B rows of T tokens, rows laid end to end.

    Attributes:
        lengths: Document lengths in tokens; they sum to B · T, and none crosses the end of a row.
        device: Where `cu_seqlens` is wanted.
        across: How attention reaches the rest of the rows when this rank computes on a share of them; None: they
            are here. The lengths are those of whole rows in either case.
    """

    lengths: tuple[int, ...]
    device: torch.device
    across: AttentionAcross | None = None

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[int]], target: int, device: torch.device) -> PackedDocuments:
        """From each row's document lengths, padded to `target` tokens."""
        lengths: list[int] = []
        for documents in rows:
            ends = grow_last([0, *accumulate(documents)], target)
            lengths.extend(b - a for a, b in pairwise(ends))
        return cls(tuple(lengths), device)

    def reaching(self, across: AttentionAcross) -> PackedDocuments:
        """The same documents, for a rank that has a share of every row."""
        return replace(self, across=across)

    @cached_property
    def uniform(self) -> int | None:
        """The length all documents share, if they do: then attention is one batched call."""
        return self.lengths[0] if len(set(self.lengths)) == 1 else None

    @cached_property
    def max_len(self) -> int:
        return max(self.lengths)

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """Cumulative lengths, int32 `[N + 1]`, on the device."""
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=self.device)
