"""The Ray job of a run, polled beside the run's records: are more records to come?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from raypp.checkpoint.run_end import RunEnd
from raypp.clusters import known_runs
from raypp.clusters.dashboard import FINAL_JOB_STATES
from raypp.clusters.find import Cluster
from raypp.clusters.known_runs import RunPlace
from raypp.errors import EXIT_RUN_FAILED, RayppError

_JOB_POLL_S = 2.0
_RECORDS_PATIENCE_S = 15.0
_LOG_PAUSE = 9.0
"""Pause between two looks at a job's log, which the dashboard always sends whole, in looks."""


class JobWatch:
    """The Ray job of a run, polled at intervals.

    Args:
        cluster: Where the run was submitted to.
        place: The run.
    """

    def __init__(self, cluster: Cluster, place: RunPlace) -> None:
        self._dashboard = cluster.dashboard
        self._place = place
        self._id = place.submission_id
        self._looked = 0.0
        self._ended: float | None = None
        self.job: dict[str, Any] | None = None

    def over(self) -> bool:
        """Whether no more records will come: the job ended a while ago and no controller runs.

        A controller can outlive its job's driver and lead the run to its end without it.
        """
        now = time.monotonic()
        if now - self._looked < _JOB_POLL_S:
            return False
        self._looked = now
        self._look()
        if self._ended is None or now - self._ended <= _RECORDS_PATIENCE_S:
            return False
        return known_runs.controller_alive(self._place) is False

    def _look(self) -> None:
        try:
            self.job = self._dashboard.job(self._id)
        except RayppError:
            return  # the records show the run's progress; a cluster that does not respond does not mean the end
        if self.job is not None and self.job["status"] in FINAL_JOB_STATES and self._ended is None:
            self._ended = time.monotonic()

    def exit_code(self, end: RunEnd | None, say: Callable[[str], None]) -> int:
        """Returns the run's exit code from its end; without one, that of its driver.

        Waits a little for the driver to end.

        Args:
            end: How the run ended; None if nobody recorded it.
            say: Gets what the user should know.
        """
        for _ in range(50):
            self._look()
            if self._ended is not None:
                break
            time.sleep(0.1)
        if end is not None:
            return end.exit_code
        message = (self.job or {}).get("message") or "it no longer exists"
        say(f"the run's Ray job ended before the run did: {message}")
        return self.driver_exit_code or EXIT_RUN_FAILED

    def new_log(self) -> Iterator[str]:
        """Yields what is new in the job's log until the job ends."""
        shown = 0
        while True:
            self._look()
            asked = time.monotonic()
            log = self._dashboard.job_logs(self._id)
            took_s = time.monotonic() - asked
            yield log[shown:]
            shown = len(log)
            if self._ended is not None:
                return
            time.sleep(max(_JOB_POLL_S / 2, _LOG_PAUSE * took_s))

    @property
    def driver_exit_code(self) -> int:
        """The exit code of the job's driver, after `new_log` has ended."""
        code = (self.job or {}).get("driver_exit_code")
        return code if isinstance(code, int) and 0 <= code < 128 else EXIT_RUN_FAILED
