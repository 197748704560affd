"""Takes the reports of ranks in any thread, answers them, and queues them for the leader."""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from collections.abc import Iterator, Sequence

from raypp.control.protocol import BatchAnswer, ReportBatch
from raypp.records import Requests

Item = ReportBatch | Requests


class ReportIntake:
    """The queue between the controller's callers and its leader, and the data of their answers.

    Args:
        incarnation: Identifies this controller process.
    """

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.stop: Requests | None = None
        """The stop request for all ranks."""
        self.save_wanted = False
        """Rank 0 is asked to save with the next answer."""
        self.trace_wanted = 0
        """Rank 0 is asked to trace so many steps with the next answer."""
        self.relay_reports = 0
        """How many times relays have reported."""
        self._queue: queue.Queue[Item] = queue.Queue()
        self._attempt = 0
        self._processed: dict[int, int] = {}
        self._durable: dict[int, int] = {}
        self._unwritten: deque[tuple[int, int, int]] = deque()

    # In any thread --------------------------------------------------------------------------------

    def report(self, batch: ReportBatch) -> BatchAnswer:
        """Takes a rank's batch; returns what the operator wants, and which of its batches are in
        the store."""
        self._queue.put(batch)
        durable = self._durable.get(batch.rank, 0) if self._attempt == batch.attempt else 0
        save, trace = False, 0
        if batch.rank == 0:  # the ranks take the maximum over all of them: one is enough, and they act once
            save, self.save_wanted = self.save_wanted, False
            trace, self.trace_wanted = self.trace_wanted, 0
        stop = self.stop
        if stop is None:
            return BatchAnswer(Requests(save=save, trace=trace), self.incarnation, durable)
        requests = Requests(save=save, stop=True, save_before_stop=stop.save_before_stop)
        return BatchAnswer(requests, self.incarnation, durable)

    def relayed(self, batches: Sequence[ReportBatch]) -> list[BatchAnswer]:
        """Takes the batches that a relay forwards."""
        self.relay_reports += 1
        return [self.report(batch) for batch in batches]

    def request_stop(self, save: bool) -> None:
        """Takes the operator's stop request."""
        self._queue.put(Requests(stop=True, save_before_stop=save))

    def add(self, batch: ReportBatch) -> None:
        """Queues the reports that an ended rank left."""
        self._queue.put(batch)

    # In the leading thread ------------------------------------------------------------------------

    def items(self, wait_s: float) -> Iterator[Item]:
        """Yields everything queued, waiting up to `wait_s` for the first."""
        with contextlib.suppress(queue.Empty):
            yield self._queue.get(timeout=wait_s) if wait_s else self._queue.get_nowait()
            while True:
                yield self._queue.get_nowait()

    def start_attempt(self, number: int, keep_stop: bool = True) -> None:
        """Answers for this attempt from now on.

        Args:
            keep_stop: False withdraws the stop request that ended the last attempt for a larger
                one.
        """
        for numbers in (self._processed, self._durable, self._unwritten):
            numbers.clear()
        if not keep_stop:
            self.stop = None
        self._attempt = number

    def end_attempt(self) -> None:
        """Answers for no attempt until the next one starts."""
        self._attempt = 0

    def is_new(self, batch: ReportBatch) -> bool:
        """Returns whether a batch is newer than all of its rank: it may come directly and through a
        slow relay."""
        if batch.number <= self._processed.get(batch.rank, 0):
            return False
        self._processed[batch.rank] = batch.number
        return True

    def recorded(self, batch: ReportBatch, count: int) -> None:
        """Notes that a batch is in the store once `count` steps and events are."""
        self._unwritten.append((count, batch.rank, batch.number))

    def acknowledge(self, written: int) -> None:
        """Lets answers acknowledge the batches that are in the store, given how many steps and
        events are."""
        while self._unwritten and self._unwritten[0][0] <= written:
            _, rank, number = self._unwritten.popleft()
            self._durable[rank] = number
