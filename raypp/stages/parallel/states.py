"""States of the delta rule over the ranks of a cp group, of which each holds parts of every row.

Each rank reduces what it holds of a row to how it changes a state. All ranks get that of all, and
the last tokens for the convolution: messages whose size does not depend on the length of rows.

Legend: S tokens on this rank, B rows, R ranks, c parts of a row on a rank, P pieces on this rank,
H heads, D width of a key, V of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from raypp.stages.parallel.expert import all_to_all


@dataclass(frozen=True)
class StatesOverRanks:
    """States of one microbatch (`models.documents.StatesAcross`).

    Attributes:
        documents: Lengths of all documents of whole rows.
        row_len: Tokens of a row.
        held: The numbers of the parts of a row that each rank holds, in its order.
    """

    documents: Sequence[int]
    row_len: int
    held: Sequence[Sequence[int]]
    group: dist.ProcessGroup

    @property
    def _part(self) -> int:
        """Tokens of a part."""
        return self.row_len // sum(map(len, self.held))

    @cached_property
    def _borders(self) -> list[int]:
        """Where documents begin, in the rows end to end, and where the last one ends."""
        borders = [0]
        for length in self.documents:
            borders.append(borders[-1] + length)
        return borders

    def _cut(self, row: int, part: int) -> list[int]:
        """Returns the lengths of the pieces of a part of a row."""
        first = row * self.row_len + part * self._part
        inside = [border for border in self._borders if first < border < first + self._part]
        ends = [first, *inside, first + self._part]
        return [end - begin for begin, end in pairwise(ends)]

    def _behind(self, row: int, part: int) -> int:
        """Returns how many tokens of its first document are before a part of a row."""
        first = row * self.row_len + part * self._part
        return first - max(border for border in self._borders if border <= first)

    def _mine(self) -> Iterator[tuple[int, int]]:
        """Yields row and part of what this rank holds, in its order."""
        for row in range(self._borders[-1] // self.row_len):
            yield from ((row, part) for part in self.held[self.group.rank()])

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        return tuple(length for row, part in self._mine() for length in self._cut(row, part))

    def before(self, x_SC: Tensor, count: int) -> Tensor:
        """Returns the tokens before each piece, `[P, count, C]`. Collective, also its backward."""
        tails = x_SC.view(-1, self._part, x_SC.shape[1])[:, -count:]
        of_part, zeros = self._gathered(tails)
        found = []
        for row, part in self._mine():
            known = min(self._behind(row, part), count)
            first = zeros
            if known:
                first = torch.cat((zeros[: count - known], of_part(row, part - 1)[count - known :]))
            found += [first, *[zeros] * (len(self._cut(row, part)) - 1)]
        return torch.stack(found)

    def starts(self, summary: Callable[[], Tensor]) -> Tensor:
        """Returns the states before pieces, `[P, H, D, V]`. Collective, also its backward."""
        changes = summary()
        sizes = [len(self._cut(row, part)) for row, part in self._mine()]
        last = torch.stack([pieces[-1] for pieces in torch.split(changes, sizes)])
        of_part, zeros = self._gathered(last)
        width = changes.shape[-1] - changes.shape[-2]
        zero, found = zeros[..., :width], []
        for row, part in self._mine():
            # The document of the part's first token begins in the part `first`.
            state, first = zero, part - -(-self._behind(row, part) // self._part)
            for earlier in range(first, part):
                own, kept = of_part(row, earlier).tensor_split([width], dim=-1)
                state = own if earlier == first else kept @ state + own
            found += [state, *[zero] * (len(self._cut(row, part)) - 1)]
        return torch.stack(found)

    def _gathered(self, mine: Tensor) -> tuple[Callable[[int, int], Tensor], Tensor]:
        """Gathers values of all parts, of this rank's `[B · c, ...]`. Returns a function that gives
        that of a row and part, and zeros of its shape. The zeros depend on the gathered values as
        autograd sees it: the backward of every rank must come here."""
        ranks = len(self.held)
        copies = mine.expand(ranks, *mine.shape).flatten(0, 1)
        theirs = all_to_all(copies, self.group).view(ranks, -1, len(self.held[0]), *mine.shape[1:])
        place = {part: (rank, at) for rank, parts in enumerate(self.held) for at, part in enumerate(parts)}

        def of_part(row: int, part: int) -> Tensor:
            rank, at = place[part]
            return theirs[rank, row, at]

        return of_part, torch.zeros_like(theirs[0, 0, 0]) + theirs.flatten()[:0].sum()

    def ended(self, states: Tensor) -> None:
        """Does nothing: the other ranks have their states from the summaries."""
