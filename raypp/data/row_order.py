"""The rows of a run in their global order, from any position on: of one source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from raypp.data.corpus import Corpus, Piece
from raypp.data.packing import RowPlan

C = TypeVar("C")


@dataclass(frozen=True)
class Cursor:
    """The position of the next row in the global order: epoch, block and row in the block."""

    epoch: int = 0
    block: int = 0
    row: int = 0

    def document(self) -> dict[str, Any]:
        """Returns it as plain JSON data."""
        return {"epoch": self.epoch, "block": self.block, "row": self.row}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Cursor:
        """Reads what `document` returns; raises KeyError, TypeError or ValueError."""
        return cls(int(document["epoch"]), int(document["block"]), int(document["row"]))


class RowOrder(Protocol[C]):
    """All rows of a run, in order. `C` is a position in it, immutable.

    Attributes:
        corpus: The documents that the pieces of the rows refer to.
        start: The position of the first row.
    """

    corpus: Corpus
    start: C

    def rows(self, cursor: C) -> Iterator[tuple[list[Piece], C]]:
        """Yields all rows from a position on, each with the position after it."""
        ...

    def once(self) -> RowPlan:
        """Returns the plan of one epoch of all documents."""
        ...

    def document(self, cursor: C) -> dict[str, Any]:
        """Returns a position as plain JSON data."""
        ...

    def cursor(self, document: Mapping[str, Any]) -> C:
        """Reads what `document` returns; raises KeyError, TypeError or ValueError."""
        ...

    def differences(self, document: Mapping[str, Any]) -> list[str]:
        """Says in words what a position of other data was made with; empty if that is unknown."""
        ...

    def used(self, cursor: C) -> dict[str, float]:
        """Returns what was used of each part before a position, by the name in the history."""
        ...


class SingleOrder:
    """The rows of one source.

    Args:
        plan: Its rows.
    """

    def __init__(self, plan: RowPlan) -> None:
        self.plan, self.corpus, self.start = plan, plan.corpus, Cursor()

    def rows(self, cursor: Cursor) -> Iterator[tuple[list[Piece], Cursor]]:
        return rows_from(self.plan, cursor)

    def once(self) -> RowPlan:
        return self.plan

    def document(self, cursor: Cursor) -> dict[str, Any]:
        return cursor.document()

    def cursor(self, document: Mapping[str, Any]) -> Cursor:
        return Cursor.of(document)

    def differences(self, document: Mapping[str, Any]) -> list[str]:
        return []

    def used(self, cursor: Cursor) -> dict[str, float]:
        return {}


def rows_from(plan: RowPlan, cursor: Cursor) -> Iterator[tuple[list[Piece], Cursor]]:
    """Yields all rows from a cursor on, without end, each with the cursor after it."""
    epoch, block, first = cursor.epoch, cursor.block, cursor.row
    while True:
        following = Cursor(epoch, block + 1) if block + 1 < plan.blocks else Cursor(epoch + 1)
        rows = plan.block(epoch, block)
        for index in range(first, len(rows)):
            yield rows[index], Cursor(epoch, block, index + 1) if index + 1 < len(rows) else following
        epoch, block, first = following.epoch, following.block, 0
