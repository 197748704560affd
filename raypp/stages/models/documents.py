"""The document boundaries of a packed microbatch.

Legend: B rows, T tokens of a padded row, N documents of the microbatch, S tokens of the microbatch
on this rank, H query heads, K key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raypp.job.layer_rules import AttentionRule

if TYPE_CHECKING:
    from raypp.stages.models.attention import AttentionKernel

Move = Callable[[Tensor], Tensor]
"""Returns a tensor's copy elsewhere, of the same shape."""


class StatesAcross(Protocol):
    """What a layer with a state (`state_rule`) gets of tokens that are not here. A layer calls each
    method once, in this order, without `starts` if its last tokens are its state. Over cp ranks all
    are collective."""

    @property
    def lengths(self) -> Sequence[int]:
        """The tokens of each piece: of each part of a document that this rank holds, P in all."""

    def before(self, x_SC: Tensor, count: int) -> Tensor:
        """Returns the `count` tokens before each piece, `[P, count, C]`; 0 before a document."""

    def starts(self, summary: Callable[[], Tensor]) -> Tensor | None:
        """Returns the state before each piece, `[P, H, D, V]`; None: all are 0. `summary`: computes
        how each piece changes the state S before it, to M · S + U: U and M, `[P, H, D, V + D]`."""

    def ended(self, states: Tensor) -> None:
        """Takes the state after each piece, `[P, H, D, V]`."""


class AttentionAcross(Protocol):
    """Attention to keys that this forward does not compute on this rank. They are on other ranks,
    where rows are cut over several (then it is collective over these ranks, in the forward and in
    the backward), or of earlier tokens (`kv_cache`)."""

    def __call__(
        self, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, rule: AttentionRule, sinks_H: Tensor | None
    ) -> Tensor:
        """Computes causal attention within documents, for this rank's tokens.

        Args:
            q_SHD: Queries `[S, H, D]`.
            k_SKD: Keys `[S, K, D]`.
            v_SKD: Values `[S, K, D]`.
            sinks_H: The scores of the sinks of all heads, `[H]`; given if the rule has sinks.

        Returns:
            The output `[S, H, D]`.
        """

    def states(self) -> StatesAcross:
        """Returns how a layer without attention, with a state, reaches those tokens."""

    def moved(self, move: Move) -> AttentionAcross:
        """Returns the same with all its tensors moved, always in the same order."""


@dataclass(eq=False)  # not frozen: torch 2.11 would compile blocks again for each number of documents
class PackedDocuments:
    """The documents of a microbatch of B rows of T tokens, rows end to end.

    Attributes:
        lengths: Document lengths in tokens. They sum to B · T, and no document crosses the end of a
            row. They are always those of whole rows.
        cu_seqlens: Cumulative lengths, int32 `[N + 1]`, where attention runs.
        lengths_S: Length of the document of each token that this rank holds, without padding, int64
            `[S]`.
        kernel: Computes attention over whole rows. None: the plain version.
        across: Computes attention over the cp group when this rank holds a share of every row, or
            to the tokens so far in decoding. None: this rank holds whole rows.
        keys_S: The key of each token that this rank holds, for dropout of adapters
            (`raypp.stages.models.adapter_dropout`), int64 `[S]`. None: nothing is dropped.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    lengths_S: Tensor
    kernel: AttentionKernel | None = None
    across: AttentionAcross | None = None
    keys_S: Tensor | None = None

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], *, kernel: AttentionKernel | None = None) -> PackedDocuments:
        """Builds it from the lengths of all documents, on the host."""
        return cls.of_rows([lengths], sum(lengths), kernel=kernel)

    @classmethod
    def of_rows(
        cls, rows: Sequence[Sequence[int]], target: int, *, kernel: AttentionKernel | None = None
    ) -> PackedDocuments:
        """Builds it from the document lengths of each row, padded to `target`, on the host. The
        last document of a row grows over the padding. A separate one would only add a kernel
        launch. In causal attention, padding does not affect what is before."""
        lengths: list[int] = []
        for row in rows:
            if sum(row) > target:
                raise ValueError(f"a row of {sum(row)} tokens does not fit into {target}")
            lengths += [*row[:-1], target - sum(row[:-1])]
        real = np.array([length for row in rows for length in row or [target]], dtype=np.int64)
        cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(tuple(lengths), cu_seqlens, torch.from_numpy(np.repeat(real, lengths)), kernel)

    def reaching(self, across: AttentionAcross, columns: NDArray[np.int64], rows: int) -> PackedDocuments:
        """Returns the same documents for a rank that holds these columns of each of the rows."""
        share_S = self.lengths_S.view(rows, -1)[:, columns].flatten()
        return replace(self, across=across, lengths_S=share_S)

    def moved(self, move: Move) -> PackedDocuments:
        """Returns the same documents with all tensors moved, always in the same order."""
        across = None if self.across is None else self.across.moved(move)
        cu_seqlens, lengths_S = move(self.cu_seqlens), move(self.lengths_S)
        keys_S = None if self.keys_S is None else move(self.keys_S)
        return replace(self, cu_seqlens=cu_seqlens, lengths_S=lengths_S, across=across, keys_S=keys_S)

    @cached_property
    def uniform(self) -> int | None:
        """The common length of all documents, or None. With one, attention is one batched call."""
        return self.lengths[0] if len(set(self.lengths)) == 1 else None

    @cached_property
    def max_len(self) -> int:
        """The length of the longest document, in tokens."""
        return max(self.lengths)
