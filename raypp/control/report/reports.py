"""The reports of ranks: taken and answered in any thread, recorded in the leading one."""

import contextlib
import queue
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from raypp.control.attempt import Attempt
from raypp.control.hang_watch import HangWatch
from raypp.control.machine import Committed, RoomAsked, TurnCame
from raypp.control.protocol import BatchAnswer, ReportBatch
from raypp.control.run_record import RunRecord
from raypp.control.seats import Rank
from raypp.records import Event, Requests

Asked = Requests | RoomAsked | TurnCame
Item = ReportBatch | Asked
Notice = Committed | Asked


class Recovery:
    """Where the time between the last step before a failure and the first after it goes."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._parts: dict[str, float] = {}
        self._away_s = 0.0

    def was_away(self, seconds: float) -> None:
        """No controller was there for so long; a part of its own if no step precedes a failure."""
        self._away_s = max(0.0, seconds)

    def stepped(self) -> None:
        """A step is done; unless it is the first after a failure, the next would begin here."""
        if not self._parts:
            self._since, self._away_s = time.monotonic(), 0.0

    def over(self, part: str) -> None:
        """A part is over: noticed, ended or seated. The first failure of several is noticed."""
        if (part == "noticed") == bool(self._parts):
            return
        now = time.monotonic()
        if self._away_s:
            self._parts["controller away"], self._away_s = round(self._away_s, 4), 0.0
        self._parts[part] = round(self._parts.get(part, 0.0) + now - self._since, 4)
        self._since = now

    def told(self, event: Event) -> Event:
        """Returns the event of the first step, with what was before, if a failure was."""
        if not self._parts:
            return event
        seconds, self._parts = {**self._parts, **event.details.get("seconds", {})}, {}
        parts = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
        message = f"{event.message}, {sum(seconds.values()):.1f} s after the failed attempt's last: {parts}"
        return replace(event, message=message, details={**event.details, "recovery_s": seconds})


class Reports:
    """The queue between callers and the leader, the data of answers, and what becomes of reports.

    Args:
        incarnation: Identifies this controller process.

    Attributes:
        stop: The stop request for all ranks.
        save_wanted: Rank 0 is asked to save with the next answer.
        trace_wanted: Rank 0 is asked to trace so many steps with the next answer.
        watch: Gets the heartbeats of the running attempt; None without one.
        stepped: The ranks have finished a step in this turn; the leader resets it.
        preempted: A rank of the attempt whose process received SIGTERM.
    """

    def __init__(self, incarnation: str, record: RunRecord) -> None:
        self.incarnation = incarnation
        self.stop: Requests | None = None
        self.save_wanted = False
        self.trace_wanted = 0
        self.watch: HangWatch | None = None
        self.stepped = False
        self.preempted: Rank | None = None
        self.recovery = Recovery()
        self._record = record
        self._queue: queue.Queue[Item] = queue.Queue()
        self._attempt = 0
        self._processed: dict[int, int] = {}
        self._durable: dict[int, int] = {}
        self._unwritten: deque[tuple[int, int, int]] = deque()
        """Steps and events taken until then, rank and number of a batch."""

    # In any thread --------------------------------------------------------------------------------

    def report(self, batch: ReportBatch) -> BatchAnswer:
        """Takes a rank's batch; returns what the operator wants, and which batches are stored."""
        self._queue.put(batch)
        durable = self._durable.get(batch.rank, 0) if self._attempt == batch.attempt else 0
        requests = self.stop or Requests()
        if batch.rank == 0:  # the ranks take the maximum over all of them: one is enough, and they act once
            save, self.save_wanted = self.save_wanted, False
            trace, self.trace_wanted = self.trace_wanted, 0
            requests = replace(requests, save=save, trace=0 if requests.stop else trace)
        return BatchAnswer(requests, self.incarnation, durable)

    def request_stop(self, save: bool) -> None:
        self._queue.put(Requests(stop=True, save_before_stop=save))

    def add(self, item: Item) -> None:
        """Queues the reports that an ended rank left, or what the line asks for."""
        self._queue.put(item)

    # In the leading thread ------------------------------------------------------------------------

    def start_attempt(self, number: int, keep_stop: bool = True) -> None:
        """Answers for this attempt from now on. `keep_stop`: False withdraws the stop request that
        ended the last attempt for a larger one."""
        for numbers in (self._processed, self._durable, self._unwritten):
            numbers.clear()
        if not keep_stop:
            self.stop = None
        self._attempt = number

    def end_attempt(self) -> None:
        """Answers for no attempt until the next one starts."""
        self._attempt, self.watch, self.preempted = 0, None, None

    def process(self, attempt: Attempt | None, wait_s: float) -> Iterator[Notice]:
        """Records everything queued, waiting up to `wait_s` for the first report. Yields what the
        leader must react to, in order. Ignores reports of other attempts, and repeated ones."""
        if self.watch is not None:
            self.watch.listen(time.monotonic())
        for item in self._items(wait_s):
            if not isinstance(item, ReportBatch):
                yield item
            elif attempt is not None and item.attempt == attempt.number and self._is_new(item):
                yield from self._batch(attempt, item)
        while self._unwritten and self._unwritten[0][0] <= self._record.durable:
            _, rank, number = self._unwritten.popleft()
            self._durable[rank] = number

    def _is_new(self, batch: ReportBatch) -> bool:
        if batch.number <= self._processed.get(batch.rank, 0):
            return False
        self._processed[batch.rank] = batch.number
        return True

    def _items(self, wait_s: float) -> Iterator[Item]:
        with contextlib.suppress(queue.Empty):
            yield self._queue.get(timeout=wait_s) if wait_s else self._queue.get_nowait()
            while True:
                yield self._queue.get_nowait()

    def _batch(self, attempt: Attempt, batch: ReportBatch) -> Iterator[Notice]:
        rank = attempt.ranks[batch.rank] if attempt.ranks else None
        if rank is not None and not rank.ended:
            first = batch.phase.partition(" ")[0]
            rank.state = batch.phase if first == "load" else first
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
            self.recovery.stepped()
        for event in batch.events:
            if event.kind == "first_step":
                event = self.recovery.told(event)
            self._record.event(event)
            if event.kind == "committed" and event.step is not None:
                yield Committed(event.step)
            elif event.kind == "preemption_notice" and rank is not None:
                self.preempted = rank
        if batch.steps or batch.events:
            self._unwritten.append((self._record.taken, batch.rank, batch.number))
