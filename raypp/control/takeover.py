"""What a restarted controller finds of its run: records, living workers, and how the run may have
ended meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raypp.checkpoint.commit import COMMITTING_RANK
from raypp.control import run_events
from raypp.control.elastic import ElasticSizing
from raypp.control.machine import Finish
from raypp.control.protocol import WorkerStatus
from raypp.mesh.shapes import Shape
from raypp.records import Event, Requests, RunState
from raypp.recovery.policy import AttemptEnd

Found = tuple[Any, WorkerStatus]


@dataclass(frozen=True)
class Takeover:
    """The state of a run whose controller was killed.

    Args:
        attempt: The last attempt that was claimed.
        events: The run's events so far.
        found: The run's living workers.
    """

    attempt: int
    events: Sequence[Event]
    found: Sequence[Found]

    @property
    def workers(self) -> list[Found]:
        """The workers that have a seat in the last attempt."""
        return [one for one in self.found if (seat := one[1].seat) is not None and seat.attempt == self.attempt]

    @property
    def others(self) -> list[Found]:
        """The other workers: standbys, and processes that must end."""
        return [one for one in self.found if (seat := one[1].seat) is None or seat.attempt != self.attempt]

    @property
    def stop(self) -> Requests | None:
        """The operator's stop request."""
        return run_events.requested_stop(self.events)

    @property
    def seated(self) -> dict[int, Event]:
        """The events that record the last attempt's seats, by rank."""
        return {
            event.rank: event
            for event in self.events
            if event.kind == "seated" and event.attempt == self.attempt and event.rank is not None
        }

    @property
    def history(self) -> tuple[AttemptEnd, ...]:
        """The failed attempts, without the last one while it is alive."""
        ends = run_events.failed_attempts(self.events)
        return tuple(end for end in ends if not self.workers or end.attempt != self.attempt)

    def shape(self, sizing: ElasticSizing) -> Shape:
        """Returns the mesh of the last attempt."""
        for _, status in self.workers:
            if status.seat is not None:
                return sizing.shape_of_seat(status.seat.mesh_sizes)
        recorded, largest = run_events.last_shape(self.events), sizing.largest()
        return recorded if recorded is not None and recorded.world <= largest.world else largest

    def needs_commits(self) -> bool:
        """Returns whether the records must be completed from the checkpoints: rank 0, which reports
        steps and commits, is gone or ends at once."""
        ranks = {status.seat.rank for _, status in self.workers if status.seat is not None}
        stop = self.stop
        return COMMITTING_RANK not in ranks or (stop is not None and not stop.save_before_stop)

    def is_over_without_all_ranks(self, newest: int | None, steps: int) -> bool:
        """Returns whether the last step is committed and a rank of the last attempt has gone.

        Args:
            newest: The newest committed step.
            steps: The job's number of steps.
        """
        return newest is not None and newest >= steps and len(self.workers) < len(self.seated)

    def finish_without_ranks(self, newest: int | None, steps: int, step: int) -> Finish | None:
        """Returns how a run without ranks ended while the controller was down; None when it must
        continue.

        Args:
            newest: The newest committed step.
            steps: The job's number of steps.
            step: The last step known to be done.
        """
        if newest is not None and newest >= steps:
            return Finish(RunState.SUCCEEDED)
        stop = self.stop
        if stop is None:
            return None
        saved = (newest or 0) >= step or not stop.save_before_stop
        if saved:
            return Finish(RunState.STOPPED)
        return Finish(RunState.STOPPED, "no rank was left to save the last checkpoint", exit_code=1)
