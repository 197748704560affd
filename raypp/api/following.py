"""Follows a run: its records again and again, until it has ended."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raypp.api.find_run import present_status
from raypp.clusters.known_runs import RunPlace
from raypp.observe.reader import RunReader
from raypp.observe.status import is_final
from raypp.records import Event
from raypp.storage import StoreError

POLL_S = 0.5
_STORE_PATIENCE_S = 60.0
_ETA_STEPS = 20


@dataclass(frozen=True)
class Records:
    """A run's records as last read.

    Attributes:
        status: As `present_status` returns it.
        rows: The lines of its history.
        events: All its events.
        trouble: Why these are not the present ones; empty if they are.
    """

    status: dict[str, Any]
    rows: Sequence[Mapping[str, Any]]
    events: Sequence[Event]
    trouble: str = ""

    @classmethod
    def read(cls, place: RunPlace, reader: RunReader) -> Records:
        """Reads them, the status first, so that the others contain everything it refers to.

        Raises:
            StoreError: The store does not answer.
        """
        status = present_status(place, reader)
        return cls(status, reader.history(), reader.events())

    @property
    def step(self) -> int:
        """The last finished step. The history was read after the status, so it is not behind it."""
        return int(self.rows[-1]["step"] if self.rows else self.status["step"])

    @property
    def seconds_left(self) -> float | None:
        """The time that the remaining steps take, from the last ones; None if unknown."""
        if not self.rows or not self.status["steps"]:
            return None
        per_step = statistics.median(float(row["step_s"]) for row in self.rows[-_ETA_STEPS:])
        return per_step * max(0, int(self.status["steps"]) - self.step)


def follow(
    place: RunPlace, reader: RunReader, over: Callable[[], bool] | None = None, poll_s: float = POLL_S
) -> Iterator[Records]:
    """Yields a run's records at intervals until it has ended.

    While the store does not answer, these are the last ones, with the trouble.

    Args:
        place: The run.
        reader: Its records.
        over: Called before each look. After it returns True, the records are read once more.
        poll_s: Seconds between two looks.

    Raises:
        StoreError: The store did not answer for a minute. With `over`: did not when that was True.
    """
    heard, last = time.monotonic(), None
    while True:
        ends = over is not None and over()
        try:
            last, heard = Records.read(place, reader), time.monotonic()
        except StoreError as error:
            if ends or (over is None and time.monotonic() - heard > _STORE_PATIENCE_S):
                raise
            trouble = f"cannot read the run's records at the moment: {error.problems[0].fault}"
            last = last and replace(last, trouble=trouble)
        if last is not None:
            yield last
            if not last.trouble and (ends or is_final(last.status)):
                return
        time.sleep(poll_s)
