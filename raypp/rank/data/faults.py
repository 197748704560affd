"""Rows that cannot be used: the first, and how many; and remarks on the others."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable
from itertools import islice

from raypp.errors import DataError, Problem
from raypp.untrusted.text import visible

_SHOWN = 3  # two lines each; with their number and a command's summary ten lines
_REMARKS, _FILES_APART = 12, 3
_ROW = re.compile(r"(:\d+|\[\d+\]( \(line \d+\))?)$")
"""What a place has after its file."""
_COUNTING_S = 10.0
"""How long rows are checked after one that cannot be used."""


class RowFault(Exception):
    """A row cannot be used. `reason`: what is wrong with it. `fix`: what the user can do."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason, fix)  # both: it travels between processes
        self.reason, self.fix = reason, fix

    def __str__(self) -> str:
        return self.reason


class Skipped(RowFault):
    """A row is left out, which is remarked and no error."""


class Faults:
    """Rows that cannot be used: the first, and how many. `remarks`: what was remarked, and of how
    many rows of each file."""

    def __init__(self, key: str) -> None:
        self._key, self._shown, self._more = key, list[Problem](), 0
        self._until = float("inf")
        self.remarks: dict[str, Counter[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._shown)

    def add(self, place: str, fault: RowFault) -> None:
        if isinstance(fault, Skipped):
            self.remark(place, [f"skipped: {fault.reason}"])
        elif len(self._shown) < _SHOWN:
            self._shown.append(Problem(self._key, f"{place}: {fault.reason}", fault.fix))
        else:
            self._more += 1

    def remark(self, place: str, remarks: Iterable[str]) -> None:
        """Adds what is not used of a row, and the like."""
        for words in sorted(remarks):
            if words in self.remarks or len(self.remarks) <= _REMARKS:
                self.remarks.setdefault(words, Counter())[_ROW.sub("", place)] += 1

    def remarked(self) -> tuple[str, ...]:
        """Returns the first remarks: of each file, or together for those of many files."""
        apart: dict[str, list[str]] = {}
        for words, files in islice(self.remarks.items(), _REMARKS):
            many = len(files) > _FILES_APART
            for file, count in {f"{len(files):,} files": files.total()}.items() if many else files.items():
                apart.setdefault(file, []).append(visible(f"{file}: {words} ({count:,} row{'s'[: count > 1]})"))
        more = ("and more",) if len(self.remarks) > _REMARKS else ()
        return (*(one for each in apart.values() for one in each), *more)

    def take(self, others: Faults) -> None:
        for words, files in others.remarks.items():
            self.remarks.setdefault(words, Counter()).update(files)
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
        """Returns the first problems, and one that counts the others. `whole`: of all rows."""
        if not self._more:
            return self._shown
        fault = f"{'' if whole else 'at least '}{self._more:,} more rows cannot be used"
        return [*self._shown, Problem(self._key, fault, "repair or remove them")]
