"""The controller: a detached, restartable, named actor that carries out what the state machine decides."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import sys
import threading
import time
from typing import Any, TypeAlias

import ray

from raypp.checkpoint.commit import claim_next_attempt, list_checkpoints, newest_attempt
from raypp.control import machine as m
from raypp.control.attempt import Attempt, Placement
from raypp.control.gauges import RunGauges
from raypp.control.messages import Batch, Outcome, RunRequest
from raypp.control.private import load_private_environment
from raypp.control.record import RunRecord
from raypp.control.watch import HangWatch
from raypp.records import Event, RankFailure, Requests, RunState
from raypp.recovery.policy import Policy, describe, root_cause
from raypp.spec.job import Job
from raypp.storage import StoreError, open_store

log = logging.getLogger(__name__)

_POLL_S = 0.1
_STORE_RETRY_S = 2.0
_STORE_TRIES = 15
_UNREAD_OUTCOME_S = 20.0

Inbox: TypeAlias = "Batch | Requests"


class Controller:
    """Leads one run from its first attempt to its end.

    Ray calls the methods in threads; one thread of its own does all the deciding.

    Args:
        request: The run. A later life of the actor gets the same one.
    """

    def __init__(self, request: RunRequest) -> None:
        logging.basicConfig(
            level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr, force=True
        )
        load_private_environment()
        self._request = request
        self._job = Job.model_validate(request.job)
        self._life = secrets.token_hex(4)
        self._inbox: queue.Queue[Inbox] = queue.Queue()
        self._stop: Requests | None = None
        self._save_wanted = False
        self._machine = m.Machine(policy=Policy(self._job.recovery.max_restarts))
        self._attempt: Attempt | None = None
        self._watch: HangWatch | None = None
        self._launch_now = False
        self._wake_at: float | None = None
        self._outcome: Outcome | None = None
        self._read = threading.Event()
        self._handle = ray.get_runtime_context().current_actor
        self._again = ray.get_runtime_context().was_current_actor_reconstructed
        self._store = open_store(self._job.checkpoint.url)
        self._record = RunRecord(self._store, self._job, f"c-{self._life}")
        self._gauges = RunGauges(request.run)
        self._thread = threading.Thread(target=self._live, name="raypp-controller", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"raypp/{self._request.run}"

    # What others call -----------------------------------------------------------------------------

    def report(self, batch: Batch) -> Requests:
        """A worker's news; the answer is what the operator wants of it."""
        if batch.life != self._life:
            return Requests()
        self._inbox.put(batch)
        save = False
        if batch.rank == 0:  # the ranks take the maximum over all of them: telling one is enough, and acts once
            save, self._save_wanted = self._save_wanted, False
        stop = self._stop
        if stop is None:
            return Requests(save=save)
        return Requests(save=save, stop=True, save_before_stop=stop.save_before_stop)

    def follow(self, cursor: int, patience_s: float = 1.0) -> tuple[list[str], int, Outcome | None]:
        """The lines told since `cursor`, the next cursor, and the outcome once there is one."""
        lines, after = self._record.lines_since(cursor, patience_s if self._outcome is None else 0.0)
        return lines, after, self._outcome if not lines else None

    def save(self, patience_s: float = 120.0) -> dict[str, Any]:
        """Asks for a checkpoint of the present step and waits for its commit.

        Returns:
            `committed` (a step or None) and `what`, for people.
        """
        at = self._record.step
        if self._machine.phase is not m.Phase.RUNNING:
            return {"committed": None, "what": f"the run is {self._machine.state}, no rank is training"}
        if at == 0 and self._machine.committed_step is None:
            at = 1
        if (self._machine.committed_step or 0) < at:
            self._save_wanted = True
        end = time.monotonic() + patience_s
        while (self._machine.committed_step or 0) < at:
            if self._outcome is not None or time.monotonic() > end:
                return {"committed": None, "what": f"no checkpoint was committed; the run is {self._machine.state}"}
            time.sleep(0.05)
        return {"committed": self._machine.committed_step, "what": self._record.checkpoint_url()}

    def stop(self, save: bool = True) -> None:
        """Asks the run to end; returns at once."""
        self._inbox.put(Requests(stop=True, save_before_stop=save))

    def outcome(self, patience_s: float = 0.0) -> Outcome | None:
        """How the run ended, waiting for it at most so long."""
        end = time.monotonic() + patience_s
        while self._outcome is None and time.monotonic() < end:
            time.sleep(0.05)
        return self._outcome

    def facts(self) -> dict[str, Any]:
        """The present status, and who this is."""
        return {**self._record.status().as_dict(), "controller_pid": os.getpid()}

    def over_for_another(self, submission_id: str) -> bool:
        """Whether this controller has ended its run, and the asker is the Ray job of a later one of that name."""
        return self._outcome is not None and submission_id != self._request.submission_id

    def dismiss(self) -> None:
        """The outcome has been read: the controller may go."""
        self._read.set()

    # Its own thread -------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            self._begin()
            while self._outcome is None:
                self._turn()
        except Exception as error:
            log.exception("the controller failed")
            reason = f"the controller failed: {type(error).__name__}: {error}"
            with contextlib.suppress(Exception):
                self._end_everything()
            self._finish(m.Finish(RunState.FAILED, reason, exit_code=getattr(error, "exit_code", 1)))
        self._read.wait(_UNREAD_OUTCOME_S)
        time.sleep(0.2)  # let the answer to `dismiss` get out
        ray.kill(self._handle, no_restart=True)

    def _begin(self) -> None:
        earlier = self._record.earlier_status() if self._again else None
        if earlier is not None and RunState(earlier["state"]).final:
            self._outcome = Outcome(self._request.run, earlier["state"], 1, earlier["step"], earlier["checkpoint"], "")
            return
        self._device = self._choose_device()
        bundle = {"CPU": float(self._job.resources.cpus_per_rank)}
        if self._device == "cuda":
            bundle["GPU"] = 1.0
        self._placement = Placement(f"raypp/{self._request.run}", self._job.mesh.world, bundle)
        checkpoints = self._patiently(lambda: list_checkpoints(self._store, self._request.run))
        last = self._patiently(lambda: newest_attempt(self._store, self._request.run))
        newest = checkpoints[-1].step if checkpoints else None
        self._record.begin(newest, earlier)
        if self._again:
            self._tell(
                Event("controller_restarted", "the controller was restarted; its workers are gone", attempt=last)
            )
        else:
            self._tell(Event("submitted", f"submitted as Ray job {self._request.submission_id or '–'}"))
        self._apply(m.Start(last, newest, interrupted=self._again))

    def _turn(self) -> None:
        """One round: carry out what is due, hear what happened."""
        if self._launch_now:
            self._launch_now = False
            self._launch()
        attempt = self._attempt
        if attempt is not None:
            events = attempt.poll(_POLL_S)
            self._take_inbox(block_s=0.0)
            for event in events:
                self._heard(event)
            self._look_for_a_stall(attempt)
        else:
            self._take_inbox(block_s=_POLL_S)
        if self._wake_at is not None and time.monotonic() >= self._wake_at:
            self._wake_at = None
            self._apply(m.DelayOver())
        self._show()

    def _take_inbox(self, block_s: float) -> None:
        with contextlib.suppress(queue.Empty):
            item = self._inbox.get(timeout=block_s) if block_s else self._inbox.get_nowait()
            while True:
                if isinstance(item, Batch):
                    self._take_batch(item)
                else:
                    self._take_stop(item)
                item = self._inbox.get_nowait()

    def _take_batch(self, batch: Batch) -> None:
        attempt = self._attempt
        if attempt is None or batch.attempt != attempt.number:
            return
        rank = attempt.ranks[batch.rank]
        if rank.state not in ("dead", "done"):
            rank.state = batch.phase.partition(" ")[0]
        if self._watch is not None:
            self._watch.heard(batch.rank, batch.phase, batch.idle_s, time.monotonic())
            for report in batch.steps:
                self._watch.step_took(report.step_s)
        for line in batch.logs:
            self._record.log(line)
        for report in batch.steps:
            for one in attempt.ranks:
                one.step = report.step
            self._record.took_step(report)
            self._gauges.step(report)
        for event in batch.events:
            self._tell(event)
            if event.kind == "committed" and event.step is not None:
                self._apply(m.Committed(event.step))

    def _look_for_a_stall(self, attempt: Attempt) -> None:
        stall = self._watch.stalled(time.monotonic()) if self._watch is not None else None
        if stall is None or self._machine.phase is not m.Phase.RUNNING:
            return
        self._watch = None
        rank = attempt.ranks[stall.rank]
        failure = RankFailure(
            rank=rank.rank,
            label=rank.label,
            node=rank.node,
            pid=rank.pid,
            kind="hung",
            cause=stall.cause,
            step=rank.step,
            details=stall.details,
        )
        self._heard(m.RankFailed(failure))

    def _take_stop(self, requests: Requests) -> None:
        if not self._machine.stop:
            how = "after a last checkpoint" if requests.save_before_stop else "at once, without a checkpoint"
            self._tell(Event("stop_requested", f"asked to stop {how}", attempt=self._machine.attempt))
        self._apply(m.StopAsked(requests.save_before_stop))

    def _heard(self, event: m.Happening) -> None:
        attempt = self._attempt
        if isinstance(event, m.RankFailed):
            self._tell_failure(event.failure)
        elif isinstance(event, m.Seated) and attempt is not None:
            self._tell_seats(attempt)
            labels = [rank.label for rank in attempt.ranks]
            self._watch = HangWatch(labels, self._job.recovery.hang_timeout_s, time.monotonic())
        elif isinstance(event, m.AttemptGone):
            self._attempt = None
            self._watch = None
        self._apply(event)

    # Carrying out ---------------------------------------------------------------------------------

    def _apply(self, event: m.Happening) -> None:
        before = self._machine
        self._machine, commands = m.step(before, event)
        for command in commands:
            match command:
                case m.Launch():
                    self._launch_now = True
                case m.EndAttempt():
                    assert self._attempt is not None
                    self._attempt.end()
                case m.Ask():
                    self._stop = command.requests
                case m.Wait():
                    self._wake_at = time.monotonic() + command.seconds
                    self._tell_restart(command.seconds)
                case m.Finish():
                    self._end_everything()
                    self._finish(command)

    def _launch(self) -> None:
        number = self._patiently(lambda: claim_next_attempt(self._store, self._request.run))
        self._apply(m.Claimed(number))
        self._tell(Event("attempt_started", f"attempt {number} asks for {self._job.mesh.world} ranks", attempt=number))
        self._attempt = Attempt(
            self._request, self._job, number, self._life, self._device, self._placement, self._handle
        )

    def _patiently(self, question: Any) -> Any:
        """Asks the store, again and again while it does not answer."""
        for left in reversed(range(_STORE_TRIES)):
            try:
                return question()
            except StoreError:
                if not left:
                    raise
                time.sleep(_STORE_RETRY_S)
        raise AssertionError("unreachable")

    def _choose_device(self) -> str:
        wanted = self._job.resources.device
        if wanted != "auto":
            return wanted
        gpus = ray.cluster_resources().get("GPU", 0)  # type: ignore[no-untyped-call]
        device = "cuda" if gpus >= self._job.mesh.world else "cpu"
        self._tell(
            Event(
                "device_chosen",
                f"ranks run on {device}: the cluster has {gpus:g} GPUs for {self._job.mesh.world} ranks",
            )
        )
        return device

    def _end_everything(self) -> None:
        if self._attempt is not None:
            self._attempt.end()
            self._attempt = None
        with contextlib.suppress(AttributeError):
            self._placement.remove()

    def _finish(self, finish: m.Finish) -> None:
        state, record = finish.state, self._record
        reason = finish.reason or f"after step {record.step}"
        self._tell(Event(str(state).lower(), reason, attempt=self._machine.attempt, step=record.step))
        record.show(self._machine, (), state=state, error=finish.reason if state is RunState.FAILED else None)
        self._gauges.status(record.status(), self._machine.committed_step)
        record.close()
        self._outcome = Outcome(
            self._request.run, str(state), finish.exit_code, record.step, record.checkpoint_url(), finish.reason
        )

    # Telling --------------------------------------------------------------------------------------

    def _show(self) -> None:
        if self._outcome is None:
            self._record.show(self._machine, self._attempt.ranks if self._attempt else ())
            self._gauges.status(self._record.status(), self._machine.committed_step)

    def _tell(self, event: Event) -> None:
        self._record.event(event)

    def _tell_failure(self, failure: RankFailure) -> None:
        details = {"kind": failure.kind, "cause": failure.cause, "pid": failure.pid, "label": failure.label}
        self._tell(
            Event(
                "rank_failed",
                f"{failure.label} (rank {failure.rank}) on {failure.node}: {failure.cause}",
                attempt=self._machine.attempt,
                step=failure.step,
                rank=failure.rank,
                node=failure.node,
                details={**details, "evidence": failure.details},
            )
        )

    def _tell_seats(self, attempt: Attempt) -> None:
        for seat, rank in zip(attempt.seats, attempt.ranks, strict=True):
            message = f"rank {seat.rank} is {seat.label} on {seat.node}, pid {rank.pid}, interface {seat.interface}"
            details = {"coordinates": seat.coordinates.as_dict(), "pid": rank.pid, "label": seat.label}
            self._tell(
                Event("seated", message, attempt=attempt.number, rank=seat.rank, node=seat.node, details=details)
            )

    def _tell_restart(self, delay_s: float) -> None:
        cause = describe(root_cause(self._machine.history[-1].failures))
        newest = self._machine.committed_step
        start = "the beginning" if newest is None else f"the checkpoint of step {newest}"
        pause = f" in {delay_s:g} s" if delay_s else ""
        self._tell(
            Event("restarting", f"a new attempt{pause}, from {start}, because {cause}", attempt=self._machine.attempt)
        )
