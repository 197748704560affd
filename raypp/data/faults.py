"""Rows that cannot be used: the first, and how many."""

from __future__ import annotations

import time

from raypp.data.conversations import RowFault
from raypp.errors import DataError, Problem

_SHOWN = 5
_COUNTING_S = 10.0
"""How long rows are checked after one that cannot be used."""


class Faults:
    """Rows that cannot be used: the first, and how many.

    Args:
        key: The key of the job file that names the data.
    """

    def __init__(self, key: str) -> None:
        self._key, self._shown, self._more = key, list[Problem](), 0
        self._until = float("inf")

    def __bool__(self) -> bool:
        return bool(self._shown)

    def add(self, place: str, fault: RowFault) -> None:
        if len(self._shown) < _SHOWN:
            self._shown.append(Problem(self._key, f"{place}: {fault.what}", fault.fix))
        else:
            self._more += 1

    def take(self, others: Faults) -> None:
        """Adds those of later rows."""
        every = self._shown + others._shown
        self._shown = every[:_SHOWN]
        self._more += others._more + len(every) - len(self._shown)

    def end_in_time(self) -> None:
        """Raises them `_COUNTING_S` after the first. Call it now and then."""
        if self:
            self._until = min(self._until, time.monotonic() + _COUNTING_S)
            if time.monotonic() > self._until:
                raise DataError(self.problems(whole=False))

    def end(self) -> None:
        """Raises them, if there are any, after the last row."""
        if self:
            raise DataError(self.problems())

    def problems(self, whole: bool = True) -> list[Problem]:
        """Returns the first problems, and one that counts the others.

        Args:
            whole: All rows were looked at.
        """
        if not self._more:
            return self._shown
        what = f"{'' if whole else 'at least '}{self._more:,} more rows cannot be used"
        return [*self._shown, Problem(self._key, what, "repair or remove them")]
