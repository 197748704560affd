"""The thread that leads a run: collects events, asks the state machine, and carries out its
commands."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from raypp.checkpoint.commit import claim_next_attempt, list_checkpoints, newest_attempt
from raypp.checkpoint.layout import spec_key
from raypp.checkpoint.run_spec import RunEnd, newest_number, read_end, write_end
from raypp.control import machine as m
from raypp.control import run_events
from raypp.control.attempt import Attempt
from raypp.control.cleanup import end_actor, end_workers, find_workers, remove_snapshots
from raypp.control.elastic import ElasticSizing
from raypp.control.hang_watch import HangWatch
from raypp.control.metrics import RunGauges
from raypp.control.placement import Placement, choose_device, remove_groups_of
from raypp.control.postmortem import collect_stacks
from raypp.control.preemption import LAST_SAVE_S, PreemptionNotices
from raypp.control.protocol import RunRequest
from raypp.control.report.intake import ReportIntake
from raypp.control.report.processing import Preempted, ReportProcessing, StepDone
from raypp.control.run_record import RunRecord
from raypp.control.takeover import Found, Takeover
from raypp.control.worker_group import WorkerGroup
from raypp.errors import EXIT_RUN_FAILED, JobError, Problem, RayppError, in_words
from raypp.failure_kinds import FailureKind
from raypp.memory.files import life_of
from raypp.observe.status import RunStatus
from raypp.planning.resolve import resolve_pipeline
from raypp.records import Event, Requests, RunState
from raypp.recovery.policy import policy_of
from raypp.retry import Backoff
from raypp.spec.job import Job
from raypp.storage import StoreError, open_store

log = logging.getLogger(__name__)

_POLL_S = 0.1
_POLL_S_PER_RANK = 0.0005
_LONGEST_POLL_S = 1.0
_PAUSED_S = 5.0  # a turn takes at most a second or two
_STORE_RETRY = Backoff(timeout_s=150.0, first_s=2.0, longest_s=2.0)

T = TypeVar("T")


class Leader:
    """Leads one run to its end. `run` is the thread; other threads use `intake`, and read `record`
    and `outcome`.

    Args:
        request: The run.
        handle: The controller actor.
        restarted: An earlier process of that actor was killed.
    """

    def __init__(self, request: RunRequest, handle: Any, restarted: bool) -> None:
        self.outcome: RunEnd | None = None
        self.begun = threading.Event()
        """Set once the ranks of an earlier controller process, if any, are taken over."""
        self.machine = m.Machine()
        self.intake = ReportIntake(secrets.token_hex(4))
        self._request = request
        self._handle = handle
        self._restarted = restarted
        self._job = Job.model_validate(request.job)
        self._attempt: Attempt | None = None
        self._preemption = PreemptionNotices()
        self._launch_now = False
        self._has_resources = False
        """`_workers` and `_placement` are set."""
        self._number = request.number
        self._end_is_recorded = False
        """An earlier controller process recorded how the run ended."""
        self._wake_at: float | None = None
        self._listened_at = time.monotonic()
        """When this thread last looked for reports."""
        # A turn's cost grows with the ranks, so turns are taken less often: for 1,000 ranks twice a
        # second.
        self._poll_s = min(max(_POLL_S, _POLL_S_PER_RANK * self._job.mesh.world), _LONGEST_POLL_S)
        self._store = open_store(self._job.checkpoint.url)
        # Giving up ends the ranks, which may be healthy: a restarted controller waits at least as
        # long as they would without one.
        patience_s = max(_STORE_RETRY.timeout_s, self._job.recovery.orphan_timeout_s)
        self._store_retry = replace(_STORE_RETRY, timeout_s=patience_s) if restarted else _STORE_RETRY
        self.record = RunRecord(self._store, self._job, f"c-{self.intake.incarnation}", request.submission_id)
        self._gauges = RunGauges(request.run)
        self._reports = ReportProcessing(self.intake, self.record, self._gauges)
        self._sizing = ElasticSizing(self._job, self.record.event)

    def run(self) -> None:
        """Leads the run until it has ended."""
        try:
            self._begin()
            self._store_retry = _STORE_RETRY
            self.begun.set()
            while self.outcome is None:
                self._turn()
        except Exception as error:
            log.exception("the controller failed")
            reason = f"the controller failed: {in_words(error)}"
            code = error.exit_code if isinstance(error, RayppError) else EXIT_RUN_FAILED
            self._finish(m.Finish(RunState.FAILED, reason, code))
        finally:
            self.begun.set()

    def _turn(self) -> None:
        """Carries out what is due, and processes what has happened."""
        if self._launch_now:
            self._launch_now = False
            self._launch()
        attempt = self._attempt
        if attempt is not None:
            events = attempt.poll(self._poll_s)
            self._notice_pause()
            self._process_reports(wait_s=0.0)
            for event in events:
                self._process_event(event)
            self._check_hang(attempt)
            self._check_preemption(attempt)
            reshape = self._sizing.check(self.machine, attempt, self._placement)
            if reshape is not None:
                self._apply(reshape)
        else:
            self._process_reports(wait_s=_POLL_S)
        for kind, message in self._placement.spares.take_events():
            self.record.event(Event(kind, message, attempt=self.machine.attempt))
        self.intake.acknowledge(self.record.durable)
        if self._wake_at is not None and time.monotonic() >= self._wake_at:
            self._wake_at = None
            self._apply(m.DelayOver())
        if self.outcome is None:
            self.record.update_status(self.machine, self._attempt.ranks if self._attempt else ())
            self._gauges.status(self.record.status(), self.machine.committed_step)

    # Beginning, and taking over from a killed controller ------------------------------------------

    def _begin(self) -> None:
        # A process that was killed before it recorded this submission left nothing to take over.
        self._restarted = self._restarted and self._ask_store(self.record.is_begun)
        run = self._request.run
        self._number = self._request.number or self._ask_store(lambda: newest_number(self._store, run))
        if end := self._ask_store(lambda: read_end(self._store, run, self._number)) if self._restarted else None:
            self._end_by_name()
            self.outcome = end
            return
        earlier = self._ask_store(self.record.earlier_status) if self._restarted else None
        if not self._restarted:
            self._end_by_name()  # an earlier submission whose controller is gone for good
        self.machine = replace(self.machine, policy=policy_of(self._job.recovery))
        # Not chosen again after a restart: the devices counted at first may be gone with a lost
        # node.
        chosen = run_events.last_device(self._ask_store(self.record.earlier_events)) if self._restarted else None
        device = choose_device(self._job, chosen, self.record.event)
        self._sizing.gpu_bytes = self._request.gpu_bytes if device == "cuda" else 0
        self._placement = Placement.of(self._job, self._request.cluster_name, self._sizing.largest().world, device)
        self._workers = WorkerGroup(self._request, self._job, self._handle, device)
        self._has_resources = True
        checkpoints = self._ask_store(lambda: list_checkpoints(self._store, run))
        last = self._ask_store(lambda: newest_attempt(self._store, run))
        newest = checkpoints[-1].step if checkpoints else None
        if self._restarted:
            self._take_over(last, newest, earlier)
            return
        if self._ask_store(lambda: self._store.head(spec_key(run))) is None:
            raise self._not_shared()
        self.record.begin(newest)
        self.record.event(Event("submitted", f"submitted as Ray job {self._request.submission_id or '–'}"))
        self._apply(m.Start(last, newest, shape=self._sizing.largest()))

    def _not_shared(self) -> JobError:
        what = f"{self._store.url} on the head, {socket.gethostname()}, does not hold what `raypp submit` wrote there"
        fix = "use s3://…, or a directory that the submitting machine and all nodes share"
        return JobError(Problem("checkpoint.url", what, fix))

    def _take_over(self, last: int, newest: int | None, earlier: RunStatus | None) -> None:
        """Takes over the living ranks of the last attempt; without any, starts the next attempt or
        ends the run."""
        events = self._ask_store(lambda: self.record.resume(newest, earlier))
        self.machine = replace(self.machine, error=earlier.error if earlier else None)
        finish = run_events.recorded_end(events)
        if finish is not None:
            self._end_is_recorded = True
            self._end_by_name()
        found = Takeover(last, events, [] if finish is not None else find_workers(self._request.cluster_name))
        if found.workers and found.is_over_without_all_ranks(newest, self._job.train.steps):
            self._end_by_name()
            found = Takeover(last, events, [])
        shape = found.shape(self._sizing)
        self._sizing.resume(shape)
        self._placement.world = shape.world
        self._placement.take_over()
        self._workers.relays.take_over()
        self._adopt_standbys(found.others)
        if found.needs_commits():
            self._ask_store(lambda: self.record.recover_from_commits(events))
        if not found.workers:
            if finish is None:
                message = "the controller restarted; no rank was left"
                self.record.event(Event("controller_restarted", message, attempt=last))
                finish = found.finish_without_ranks(newest, self._job.train.steps, self.record.step)
            history = found.history
            self._apply(m.Start(last, newest, interrupted=True, history=history, shape=shape, finish=finish))
            return
        self.machine = replace(self.machine, shape=shape)
        attempt = self._new_attempt(last)
        attempt.adopt(found.workers, found.seated, self.record.step)
        self._attempt = attempt
        self.intake.start_attempt(last)
        self.record.event(run_events.adoption_event(last, attempt.ranks))
        self._start_watch(attempt)
        self._apply(m.Start(last, newest, adopted=True, history=found.history, shape=shape))
        if found.stop is not None:
            self._apply(m.StopAsked(found.stop.save_before_stop))

    def _adopt_standbys(self, others: list[Found]) -> None:
        """Keeps one standby per node; ends the other workers without a seat, which would hold
        resources."""
        for actor, status in others:
            node = status.info.facts.node_id
            if status.standby and status.seat is None and node not in self._workers.standbys:
                self._workers.adopt_standby(actor, node)
            else:
                end_actor(actor)

    def _ask_store(self, question: Callable[[], T]) -> T:
        """Asks the store, and retries while it does not answer."""
        return self._store_retry.call(question, lambda error: isinstance(error, StoreError))

    # Processing reports and events ----------------------------------------------------------------

    def _process_reports(self, wait_s: float) -> None:
        for found in self._reports.process(self._attempt, wait_s):
            match found:
                case StepDone():
                    self._workers.start_standbys()  # not before the first step: starting ranks need the processors
                    if self._sizing.is_full_size(self.machine):
                        self._placement.hold_spares()
                case Preempted():
                    deadline = time.monotonic() + LAST_SAVE_S
                    self._preemption.add(found.rank, "it received SIGTERM", deadline, self.machine.committed_step)
                    self.intake.save_wanted = True
                case m.Committed():
                    self._apply(found)
                case Requests():
                    self._process_stop(found)

    def _process_stop(self, requests: Requests) -> None:
        if not self.machine.stop:
            self.record.event(run_events.stop_event(requests, self.machine.attempt))
            self.record.flush()  # before the ranks obey: a restarted controller must know why they ended
        self._apply(m.StopAsked(requests.save_before_stop))

    def _process_event(self, event: m.MachineEvent) -> None:
        attempt = self._attempt
        if isinstance(event, m.RankFailed):
            self.record.event(run_events.failure_event(event.failure, self.machine.attempt))
        elif isinstance(event, m.Seated) and attempt is not None:
            for seated in run_events.seat_events(attempt.ranks, attempt.number):
                self.record.event(seated)
            self._start_watch(attempt)
        elif isinstance(event, m.AttemptEnded):
            if attempt is not None:
                lost = {one.rank for one in self.machine.failures if one.kind.traits.node_lost}
                self._placement.lost_nodes.add({rank.node_id for rank in attempt.ranks if rank.rank in lost})
            self._attempt = None
            self._reports.watch = None
            self.intake.end_attempt()
            if self._preemption.reset():
                self._workers.empty_bundles()
                self._placement.remove()
        self._apply(event)

    @property
    def training(self) -> bool:
        """Whether ranks are training."""
        return self.machine.phase is m.RunPhase.RUNNING

    # Watching the attempt -------------------------------------------------------------------------

    def _start_watch(self, attempt: Attempt) -> None:
        rank_of_stage = resolve_pipeline(attempt.job).rank_of_stage
        timeout_s = self._job.recovery.hang_timeout_s
        self._listened_at = now = time.monotonic()
        self._reports.watch = HangWatch(attempt.ranks, timeout_s, now, rank_of_stage)

    def _notice_pause(self) -> None:
        """Leaves a time in which this thread took no reports out of the watch for hangs: everything
        was paused, or this process, or it waited for the store."""
        now = time.monotonic()
        gap_s, self._listened_at = now - self._listened_at, now
        if self._reports.watch is not None and gap_s > _PAUSED_S:
            log.warning("took no reports for %.1f s, which do not count as a hang", gap_s)
            self._reports.watch.skip(gap_s, now)

    def _check_hang(self, attempt: Attempt) -> None:
        now = time.monotonic()
        if now - self._listened_at > _PAUSED_S:
            return  # paused within this turn: the next one notices it first
        stall = self._reports.watch.stalled(now) if self._reports.watch is not None else None
        if stall is None or not self.training:
            return
        self._reports.watch = None
        for rank, text in collect_stacks(attempt.ranks, self._workers, stall.rank or 0).items():
            self.record.event(run_events.stack_event(attempt.ranks[rank], text, attempt.number))
        failure = attempt.ranks[stall.rank or 0].failure(FailureKind.HUNG, stall.cause, stall.details)
        if stall.rank is None:
            failure = replace(failure, rank=-1, label="", node="", pid=0)
        self._process_event(m.RankFailed(failure))

    def _check_preemption(self, attempt: Attempt) -> None:
        """Asks for a last checkpoint when a rank is preempted, then ends the attempt, without
        counting it as failed."""
        now = time.monotonic()
        notice = self._preemption.check_nodes(attempt.ranks, now)
        if notice is not None:
            rank, why, left_s = notice
            self.record.event(run_events.preemption_event(rank, why, attempt.number))
            self._preemption.add(rank, why, now + left_s, self.machine.committed_step)
            self.intake.save_wanted = True
        failure = self._preemption.due_failure(now, self.machine.committed_step)
        if failure is not None and self.training:
            self._process_event(m.RankFailed(failure))

    # Carrying out commands ------------------------------------------------------------------------

    def _apply(self, event: m.MachineEvent) -> None:
        self.machine, commands = m.step(self.machine, event)
        for command in commands:
            match command:
                case m.Launch():
                    self._launch_now = True
                case m.EndAttempt():
                    assert self._attempt is not None
                    if not command.keep:
                        self.record.flush()  # once the ranks are gone, their last reports exist nowhere else
                    suspects = {one.rank for one in self.machine.failures if one.kind.traits.ends_process}
                    self._attempt.end(command.keep, suspects)
                case m.SendRequests():
                    self.intake.stop = command.requests
                case m.Delay():
                    self._wake_at = time.monotonic() + command.seconds
                    kept, world = len(self._workers.seated), self._placement.world
                    memory = self._job.checkpoint.memory_tier
                    self.record.event(run_events.restart_event(self.machine, command.seconds, kept, world, memory))
                case m.Finish():
                    self._finish(command)

    def _launch(self) -> None:
        number = self._ask_store(lambda: claim_next_attempt(self._store, self._request.run))
        self._apply(m.Claimed(number))
        self._sizing.prepare(self.machine, self._placement, self._workers)
        message = f"attempt {number} asks for {self._placement.world} ranks"
        self.record.event(Event("attempt_started", message, attempt=number))
        self._attempt = self._new_attempt(number)
        self.intake.start_attempt(number, keep_stop=self.machine.stop)
        self._attempt.launch()

    def _new_attempt(self, number: int) -> Attempt:
        job = self._sizing.job(self.machine)
        self.record.set_mesh(job.mesh)
        return Attempt(job, number, self._workers, self._placement, self.intake.add)

    # The end --------------------------------------------------------------------------------------

    def _finish(self, finish: m.Finish) -> None:
        """Ends the run in an order that stays clear wherever this process is killed: the event and
        all records, then the processes, then the object that says how it ended and that nothing of
        it is left."""
        state, record, run = finish.state, self.record, self._request.run
        if not self._end_is_recorded:
            record.event(run_events.end_event(finish, self.machine.attempt, record.step))
            record.flush()
        self._end_processes()
        record.end_trackers(state)
        # Ranks that end normally remove those on their nodes; a mesh that shrank has left others.
        leaves = state is RunState.FAILED or self._sizing.options is not None
        if leaves and not m.save_may_help(self.machine):
            with contextlib.suppress(Exception):
                remove_snapshots(life_of(self._store, self._job))
        place, attempt = record.checkpoint_url(), self.machine.attempt
        end = RunEnd(run, state, finish.exit_code, record.step, place, finish.reason, attempt)
        if self._number:
            with contextlib.suppress(RayppError):  # without its store, the run's commands say that it is lost
                end = write_end(self._store, end, self._number)
        record.update_status(self.machine, (), state=state, error=finish.reason if state is RunState.FAILED else None)
        self._gauges.status(record.status(), self.machine.committed_step)
        record.close()
        self.outcome = end

    def _end_processes(self) -> None:
        """Ends every process of the run and releases its devices; when that fails, by the run's
        name."""
        self._attempt = None
        for end in (self._end_by_handle, self._end_by_name) if self._has_resources else (self._end_by_name,):
            try:
                end()
                return
            except Exception:
                log.exception("the processes of %s could not be ended", self._request.run)

    def _end_by_handle(self) -> None:
        self._workers.end()
        self._placement.remove()

    def _end_by_name(self) -> None:
        """Ends all processes that carry this run's name, and releases its devices."""
        end_workers(self._request.cluster_name)
        remove_groups_of(self._request.cluster_name)


def start_thread(leader: Leader, afterwards: Callable[[], None]) -> threading.Thread:
    """Runs a leader in its own thread, and calls `afterwards` there at its end."""

    def both() -> None:
        leader.run()
        afterwards()

    thread = threading.Thread(target=both, name="raypp-controller", daemon=True)
    thread.start()
    return thread
