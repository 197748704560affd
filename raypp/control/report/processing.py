"""Processes the queued reports of ranks: heartbeats, steps, events and log lines."""

from __future__ import annotations

import time
from collections.abc import Iterator

from raypp.control.attempt import Attempt
from raypp.control.hang_watch import HangWatch
from raypp.control.machine import Committed
from raypp.control.protocol import ReportBatch
from raypp.control.report.intake import ReportIntake
from raypp.control.run_record import RunRecord
from raypp.control.seats import Rank
from raypp.observe.status import ENDED
from raypp.records import Requests

Finding = Committed | Requests


class ReportProcessing:
    """Records what ranks report, and returns what the leader must react to.

    Attributes:
        watch: Gets the heartbeats of the running attempt; None without one.
        stepped: The ranks have finished a step in this turn; the leader resets it.
        preempted: A rank of the attempt whose process received SIGTERM.
    """

    def __init__(self, intake: ReportIntake, record: RunRecord) -> None:
        self.watch: HangWatch | None = None
        self.stepped = False
        self.preempted: Rank | None = None
        self._intake = intake
        self._record = record

    def process(self, attempt: Attempt | None, wait_s: float) -> Iterator[Finding]:
        """Processes everything queued, waiting up to `wait_s` for the first report.

        Yields findings in the order of the reports. Reports of other attempts are ignored.
        """
        if self.watch is not None:
            self.watch.listen(time.monotonic())
        for item in self._intake.items(wait_s):
            if isinstance(item, Requests):
                yield item
            elif attempt is not None and item.attempt == attempt.number and self._intake.is_new(item):
                yield from self._batch(attempt, item)

    def _batch(self, attempt: Attempt, batch: ReportBatch) -> Iterator[Finding]:
        rank = attempt.ranks[batch.rank] if attempt.ranks else None
        if rank is not None and rank.state not in ENDED:
            rank.state = batch.phase.partition(" ")[0]
        if self.watch is not None:
            now = time.monotonic()
            self.watch.add_heartbeat(batch.rank, batch.phase, batch.idle_s, now, batch.inside, batch.reached)
        for line in batch.logs:
            self._record.log(line)
        for report in batch.steps:
            if self.watch is not None:
                self.watch.add_step(report.step_s)
            if self._record.add_step(report, batch.attempt):
                for one in attempt.ranks:
                    one.step = report.step
            self.stepped = True
        for event in batch.events:
            self._record.event(event)
            if event.kind == "committed" and event.step is not None:
                yield Committed(event.step)
            elif event.kind == "preemption_notice" and rank is not None:
                self.preempted = rank
        if batch.steps or batch.events:
            self._intake.recorded(batch, self._record.taken)
