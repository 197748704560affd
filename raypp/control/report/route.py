"""Chooses how a rank's reports reach the controller: through its relay, or directly when the relay
fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray

from raypp.control.process_log import say
from raypp.control.protocol import BatchAnswer, ReportBatch

HEARTBEAT_S = 1.0
"""Seconds between two reports of a rank that has a relay, when it has only a heartbeat to
report."""
_RELAY_TIMEOUT_S = 3.0
_FIRST_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 300.0


class ReportRoute:
    """Sends batches through the relay; when that fails, directly, and leaves the relay alone for a
    while.

    The pause doubles with every failure, from 5 s to 5 min.

    Args:
        direct: Sends a batch to the controller; raises when the controller does not take it.
        relayed: Sends it to the rank's relay, in the same manner; None without a relay.
        direct_pace_s: Seconds between two direct reports.
    """

    def __init__(
        self,
        direct: Callable[[ReportBatch], BatchAnswer],
        relayed: Callable[[ReportBatch], BatchAnswer] | None,
        direct_pace_s: float,
    ) -> None:
        self._direct = direct
        self._relayed = relayed
        self._direct_pace_s = direct_pace_s
        self._relay_again_at = 0.0
        self._next_pause_s = _FIRST_PAUSE_S
        self.pace_s = direct_pace_s
        """Seconds until the next report, unless something happens before."""

    def send(self, batch: ReportBatch) -> BatchAnswer:
        """Sends a batch. When it arrives over both routes, the controller recognises the second one
        by its number.

        Raises:
            Exception: Whatever the direct route raised; nobody is known to have taken the batch.
        """
        failure: Exception | None = None
        if self._relayed is not None and time.monotonic() >= self._relay_again_at:
            try:
                answer = self._relayed(batch)
            except Exception as error:  # noqa: BLE001  dead, frozen, cut off, or not started yet
                failure = error
            else:
                self._next_pause_s = _FIRST_PAUSE_S
                self.pace_s = HEARTBEAT_S
                return answer
        self.pace_s = self._direct_pace_s
        answer = self._direct(batch)
        if failure is not None:  # the controller is there, so it is the relay that failed
            self._relay_again_at = time.monotonic() + self._next_pause_s
            self._next_pause_s = min(2 * self._next_pause_s, _LONGEST_PAUSE_S)
            say(f"reporting directly: the relay does not answer ({type(failure).__name__})")
        return answer


def report_route(controller: Any, relay: Any, rank: int, direct_pace_s: float, timeout_s: float) -> ReportRoute:
    """Returns a rank's route through Ray.

    Rank 0 reports the steps and receives save requests, so it always reports directly: a relay that
    died could lose a save request.

    Args:
        relay: Handle of the rank's relay; None in a run without relays.
        timeout_s: For the controller's answer.
    """

    def direct(batch: ReportBatch) -> BatchAnswer:
        answer: BatchAnswer = ray.get(controller.report.remote(batch), timeout=timeout_s)
        return answer

    def relayed(batch: ReportBatch) -> BatchAnswer:
        answer: BatchAnswer = ray.get(relay.report.remote(batch), timeout=_RELAY_TIMEOUT_S)
        return answer

    if relay is None:
        return ReportRoute(direct, None, direct_pace_s)
    if rank == 0:
        return ReportRoute(direct, None, min(HEARTBEAT_S, direct_pace_s))
    return ReportRoute(direct, relayed, direct_pace_s)
