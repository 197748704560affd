"""The last steps' reports, kept in every checkpoint: a step that is committed is never missing from the history.

A report is in the memory of the process that writes the records for a second or so. When that process dies while the
step's checkpoint is durable already, the step is not repeated, so whoever loads the checkpoint tells it again.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from raypp.observe.json_lines import report_of
from raypp.records import Reporter, StepReport

_MOST = 256
"""Of the newest steps; far more than are taken between two writes of the records."""


class RecentReports:
    """The newest reports of a run, oldest first, whichever attempts they are from."""

    def __init__(self) -> None:
        self._reports: deque[StepReport] = deque(maxlen=_MOST)
        self._texts: deque[str] = deque(maxlen=_MOST)

    def add(self, report: StepReport) -> None:
        self._append(dataclasses.replace(report, parts_s={}))

    def json_text(self) -> str:
        """The same as JSON text; each report is written out once, as this is wanted after every step."""
        return f"[{','.join(self._texts)}]"

    def document(self) -> list[dict[str, Any]]:
        """Plain JSON, for a checkpoint's extra."""
        return [dataclasses.asdict(report) for report in self._reports]

    def take_over(self, document: Iterable[Mapping[str, Any]]) -> None:
        """Goes on from what a checkpoint holds."""
        for entry in document:
            self._append(report_of(entry))

    def _append(self, report: StepReport) -> None:
        self._reports.append(report)
        self._texts.append(json.dumps(dataclasses.asdict(report), separators=(",", ":")))

    def tell_again(self, reporter: Reporter) -> None:
        """Tells all of them. Readers of the records keep one report of each step."""
        for report in self._reports:
            reporter.step(report)
