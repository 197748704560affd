"""A rank's reporter without a cluster: what it does when its log cannot be written."""

from __future__ import annotations

import io
import sys
import time
from typing import Any, cast

import pytest

from raypp.control.protocol import BatchAnswer, ReportBatch
from raypp.control.report import reporter as reporter_module
from raypp.control.report.reporter import ControllerReporter
from raypp.control.report.route import ReportRoute
from raypp.records import Coordinates, Event, Requests, Seat

SEAT = Seat("run", 1, 1, 2, Coordinates(), Coordinates(1, 1, 1, 1))


def test_a_rank_whose_log_is_on_a_full_disk_reports_on_after_its_controller_was_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """First nobody answers, then the controller without the relay; each is a line for the log."""
    tried: list[ReportBatch] = []
    taken: list[ReportBatch] = []

    def direct(batch: ReportBatch) -> BatchAnswer:
        tried.append(batch)
        if len(tried) == 1:
            raise ConnectionError("away")
        taken.append(batch)
        return BatchAnswer(Requests(), "second")

    def relayed(batch: ReportBatch) -> BatchAnswer:
        raise ConnectionError("gone")

    monkeypatch.setattr(reporter_module, "report_route", lambda *_: ReportRoute(direct, relayed, 0.01))
    monkeypatch.setattr(reporter_module, "_AWAY_S", 0.01)
    full = io.TextIOWrapper(cast(Any, io.FileIO("/dev/full", "w")), line_buffering=True)
    monkeypatch.setattr(sys, "stderr", full)
    monkeypatch.setattr(sys, "stdout", full)
    with ControllerReporter(None, SEAT, ()) as reporter:
        reporter.event(Event("lived", "here", attempt=1, rank=1))
        end = time.monotonic() + 60.0
        while len(taken) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        print("half a line", end="")
    assert len(taken) >= 3, "the thread that reports has ended"
    assert [event.kind for batch in taken for event in batch.events] == ["lived"]
