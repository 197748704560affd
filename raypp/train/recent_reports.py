"""The latest steps' reports, saved in checkpoints: no committed step is missing from the history.

The process that writes the records buffers a report for about a second. If it dies when the step's
checkpoint is already durable, the step is not repeated, so the ranks that load the checkpoint
report the step again.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from raypp.records import Reporter, StepReport

_MOST = 256
"""Reports kept; far more than the steps between two writes of the records."""


class EncodedReports:
    """Reports of steps, oldest first, without the seconds of their parts. Each is encoded once.

    Args:
        most: How many are kept; None: all.
    """

    def __init__(self, most: int | None = None) -> None:
        self._reports: deque[StepReport] = deque(maxlen=most)
        self._texts: deque[str] = deque(maxlen=most)

    def __iter__(self) -> Iterator[StepReport]:
        return iter(self._reports)

    @property
    def newest(self) -> int:
        """The last step that has a report; 0: none."""
        return self._reports[-1].step if self._reports else 0

    def add(self, report: StepReport) -> None:
        """Appends a step's report."""
        self._reports.append(dataclasses.replace(report, parts_s={}))
        self._texts.append(json.dumps(dataclasses.asdict(self._reports[-1]), separators=(",", ":")))

    def clear(self) -> None:
        """Forgets all."""
        self._reports.clear()
        self._texts.clear()

    def json_text(self) -> str:
        """Returns the reports as a JSON text, needed every step."""
        return f"[{','.join(self._texts)}]"

    def document(self) -> list[dict[str, Any]]:
        """Returns the reports as plain JSON data, for a checkpoint."""
        return [dataclasses.asdict(report) for report in self._reports]


class RecentReports(EncodedReports):
    """The latest reports of a run, from any attempt.

    Attributes:
        own: Where replicas train apart, those of this one since the last outer step: after a
            restart they may be at different steps, and figures are gathered again from there on.
    """

    def __init__(self) -> None:
        super().__init__(_MOST)
        self.own = EncodedReports()

    def restore(self, reports: Iterable[StepReport], own: Iterable[StepReport] = ()) -> None:
        """Appends the reports that a state holds."""
        for report in reports:
            self.add(report)
        for report in own:
            self.own.add(report)

    def report_again(self, reporter: Reporter) -> None:
        """Reports all steps again. Readers of the records keep one report per step."""
        for report in self:
            reporter.step(report)
