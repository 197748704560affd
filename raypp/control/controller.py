"""The controller: a detached, restartable, named actor that others call. `leader` leads."""

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import ray

from raypp.control.credentials import forget, load_private_environment
from raypp.control.protocol import BatchAnswer, ReportBatch, RunRequest
from raypp.state.checkpoint.run_spec import RunEnd

_UNREAD_OUTCOME_S = 20.0
_UNWATCHED_S = 5.0


class Controller:
    """Leads one run from its first attempt to its end. Ray calls the methods in several threads;
    one separate thread makes all decisions. Ray restarts the actor with the same one."""

    def __init__(self, request: RunRequest) -> None:
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", force=True)
        load_private_environment()
        # Imported here: the driver imports this module, too, and does not need the leader.
        from raypp.control.leader import Leader

        context = ray.get_runtime_context()
        self._request = request
        self._read = threading.Event()
        self._watched_at = time.monotonic()  # followers of a killed process look for this one now
        self._handle = context.current_actor
        self._leader = Leader(request, self._handle, context.was_current_actor_reconstructed)
        self._thread = threading.Thread(target=self._lead, name="raypp-controller", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"raypp/{self._request.cluster_name}"

    def report(self, batch: ReportBatch) -> BatchAnswer:
        return self._leader.reports.report(batch)

    def alive(self) -> None:
        """Answers: an idle worker checks whether the controller is there."""

    def follow(self, cursor: int, patience_s: float = 1.0) -> tuple[list[str], int, RunEnd | None]:
        """Returns the lines since `cursor`, the next cursor, and the outcome once there is one."""
        self._watched_at = time.monotonic()
        outcome = self._leader.outcome
        lines, after = self._leader.record.lines_since(cursor, patience_s if outcome is None else 0.0)
        outcome = self._leader.outcome if not lines else None
        if outcome is not None:
            self._read.set()
        return lines, after, outcome

    def save(self, patience_s: float, pending: Sequence[int] | None = None) -> dict[str, Any]:
        """Requests a checkpoint of the current step and waits for its commit. `pending`: as in an
        earlier answer: waits for that checkpoint, and requests none. Returns `committed` (a step or
        None) and `what`, a message. While it is saved also `pending`: step and attempt."""
        leader = self._leader
        end = time.monotonic() + patience_s
        leader.begun.wait(patience_s)
        at, attempt = pending or (leader.record.step, leader.machine.attempt)
        if pending is None:
            if not leader.machine.training:
                return {"committed": None, "what": f"the run is {leader.machine.state}, no rank is training"}
            if at == 0 and leader.machine.committed_step is None:
                at = 1
            if (leader.machine.committed_step or 0) < at:
                leader.reports.save_wanted = True
        while (leader.machine.committed_step or 0) < at:
            at = min(at, max(1, leader.record.step))  # the attempt may have resumed before that step
            answer = {"committed": None, "what": f"no checkpoint was committed; the run is {leader.machine.state}"}
            if not leader.machine.training or leader.machine.attempt != attempt:
                return answer
            if time.monotonic() > end:
                return {**answer, "pending": (at, attempt)}
            time.sleep(0.05)
        return {"committed": leader.machine.committed_step, "what": leader.record.checkpoint_url()}

    def timeline(self, patience_s: float, steps: int) -> dict[str, Any]:
        """Asks the ranks to trace their next steps; returns at once, when the run is led. Returns
        `traced`: whether ranks are training, and `what`, a message."""
        leader = self._leader
        leader.begun.wait(patience_s)
        if not leader.machine.training:
            return {"traced": False, "what": f"the run is {leader.machine.state}, no rank is training"}
        leader.reports.trace_wanted = steps
        return {"traced": True, "what": f"from about step {leader.record.step + 1} on"}

    def stop(self, patience_s: float, save: bool) -> dict[str, Any]:
        """Requests the run's end, and waits. Returns `RunEnd`'s fields; `state: None`: not yet."""
        self._leader.reports.request_stop(save)
        end = time.monotonic() + patience_s
        while (outcome := self._leader.outcome) is None and time.monotonic() < end:
            self._watched_at = time.monotonic()
            time.sleep(0.05)
        return {"state": None} if outcome is None else asdict(outcome)

    def facts(self, _patience_s: float) -> dict[str, Any]:
        """Returns the current status and this process' id."""
        return {**self._leader.record.status().as_dict(), "controller_pid": os.getpid()}

    def for_line(self) -> dict[str, Any]:
        """Returns what the line must know of the run: see `Leader.for_line`."""
        return self._leader.for_line()

    def give_way(self, ranks: int, why: str) -> None:
        """Makes the run go on with so many ranks, or with 0 wait in the line, after a save."""
        self._leader.give_way(ranks, why)

    def take_turn(self) -> None:
        """Tells the run, which gave way, that it has its turn."""
        self._leader.take_turn()

    def over_for_another(self, submission_id: str) -> bool:
        """Exits if it has ended its run and the caller is a newer submission; returns whether."""
        over = self._leader.outcome is not None and submission_id != self._request.submission_id
        if over:
            self._read.set()
        return over

    def _lead(self) -> None:
        """Leads the run; exits once a follower has read the outcome, soon when nobody follows."""
        self._leader.run()
        if self._leader.outcome is None:
            os._exit(1)  # another process of this actor leads the run
        watched = time.monotonic() - self._watched_at < _UNWATCHED_S
        self._read.wait(_UNREAD_OUTCOME_S if watched else _UNWATCHED_S / 5)
        forget()
        time.sleep(0.2)  # let the answer get out
        ray.kill(self._handle, no_restart=True)
