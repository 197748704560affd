"""The document boundaries of a packed microbatch.

Legend: B rows, T tokens of a padded row, N documents of the microbatch, S tokens of the microbatch
on this rank, H query heads, K key/value heads, D head width.
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
    """Extends the last document of a row over the padding.

    A separate document for the padding would have no labels and would only add a kernel launch. In
    causal attention, positions after the last real token do not affect those before.

    Args:
        cu_seqlens: Cumulative lengths of the row's documents, from 0.
        target: Padded length of the row, in tokens.
    """
    if cu_seqlens[-1] > target:
        raise ValueError(f"a row of {cu_seqlens[-1]} tokens does not fit into {target}")
    return [*cu_seqlens[:-1], target] if len(cu_seqlens) > 1 else [0, target]


class AttentionAcross(Protocol):
    """Attention over rows that are cut over several ranks.

    Collective over these ranks, in the forward and in the backward.
    """

    def __call__(self, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor) -> Tensor:
        """Computes causal attention within documents, for this rank's tokens.

        Args:
            q_SHD: Queries `[S, H, D]`.
            k_SKD: Keys `[S, K, D]`.
            v_SKD: Values `[S, K, D]`.

        Returns:
            The output `[S, H, D]`.
        """
        ...


@dataclass(frozen=True, eq=False)
class PackedDocuments:
    """The documents of a microbatch of B rows of T tokens, rows end to end.

    Attributes:
        lengths: Document lengths in tokens. They sum to B · T, and no document crosses the end of a
            row. They are always those of whole rows.
        device: The device of `cu_seqlens`.
        across: Computes attention over the cp group when this rank holds a share of every row.
            None: this rank holds whole rows.
    """

    lengths: tuple[int, ...]
    device: torch.device
    across: AttentionAcross | None = None

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[int]], target: int, device: torch.device) -> PackedDocuments:
        """Builds it from the document lengths of each row, padded to `target` tokens."""
        lengths: list[int] = []
        for documents in rows:
            ends = grow_last([0, *accumulate(documents)], target)
            lengths.extend(b - a for a, b in pairwise(ends))
        return cls(tuple(lengths), device)

    def reaching(self, across: AttentionAcross) -> PackedDocuments:
        """Returns the same documents for a rank that holds a share of every row."""
        return replace(self, across=across)

    @cached_property
    def uniform(self) -> int | None:
        """The common length of all documents, or None. With one, attention is one batched call."""
        return self.lengths[0] if len(set(self.lengths)) == 1 else None

    @cached_property
    def max_len(self) -> int:
        """The length of the longest document, in tokens."""
        return max(self.lengths)

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """Cumulative lengths, int32 `[N + 1]`, on the device."""
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=self.device)
