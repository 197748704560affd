"""The latest steps' reports, saved in checkpoints: no committed step is missing from the history.

The process that writes the records buffers a report for about a second. If it dies when the step's
checkpoint is already durable, the step is not repeated, so the ranks that load the checkpoint
report the step again.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Iterable
from typing import Any

from raypp.records import Reporter, StepReport

_MOST = 256
"""Reports kept; far more than the steps between two writes of the records."""


class RecentReports:
    """The latest reports of a run, oldest first, from any attempt.

    Attributes:
        own: Where replicas train apart, those of this one since the last outer step: after a
            restart they may be at different steps, and figures are gathered again from there on.
    """

    def __init__(self) -> None:
        self._reports: deque[StepReport] = deque(maxlen=_MOST)
        self._texts: deque[str] = deque(maxlen=_MOST)
        self.own: list[StepReport] = []
        self._own_texts: list[str] = []

    @property
    def newest(self) -> int:
        """The last step that has a report; 0: none."""
        return self._reports[-1].step if self._reports else 0

    def add(self, report: StepReport) -> None:
        """Appends a step's report, without the seconds of its parts."""
        self._append(dataclasses.replace(report, parts_s={}))

    def add_own(self, report: StepReport) -> None:
        """Appends one of this replica alone, likewise."""
        self.own.append(dataclasses.replace(report, parts_s={}))
        self._own_texts.append(_text(self.own[-1]))

    def forget_own(self) -> None:
        """Forgets those of this replica: all have done their steps."""
        self.own.clear()
        self._own_texts.clear()

    def json_text(self) -> str:
        """Returns the reports as a JSON text, needed every step; encodes each report only once."""
        return f"[{','.join(self._texts)}]"

    def own_text(self) -> str:
        """Returns those of this replica likewise."""
        return f"[{','.join(self._own_texts)}]"

    def document(self) -> list[dict[str, Any]]:
        """Returns the reports as plain JSON data, for a checkpoint."""
        return [dataclasses.asdict(report) for report in self._reports]

    def restore(self, reports: Iterable[StepReport], own: Iterable[StepReport] = ()) -> None:
        """Appends the reports that a state holds."""
        for report in reports:
            self._append(report)
        for report in own:
            self.add_own(report)

    def _append(self, report: StepReport) -> None:
        self._reports.append(report)
        self._texts.append(_text(report))

    def report_again(self, reporter: Reporter) -> None:
        """Reports all steps again. Readers of the records keep one report per step."""
        for report in self._reports:
            reporter.step(report)


def _text(report: StepReport) -> str:
    return json.dumps(dataclasses.asdict(report), separators=(",", ":"))
