"""The thread that leads a run: collects events, asks the state machine, runs its commands."""

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar

from raypp.control import machine as m
from raypp.control.attempt import Attempt, AttemptPhase, LivingWorker
from raypp.control.cleanup import end_actor, end_workers, find_workers, look_after_snapshots
from raypp.control.elastic import ElasticSizing
from raypp.control.hang_watch import HangWatch
from raypp.control.machine_log import MachineError
from raypp.control.node_test import examine_nodes
from raypp.control.on_end import tell_end
from raypp.control.placement import Placement
from raypp.control.protocol import RunRequest
from raypp.control.queue import rules
from raypp.control.queue.line import Need
from raypp.control.queue.ticket import Ticket
from raypp.control.ray_state import remove_groups_of
from raypp.control.recovery.policies.default import DefaultPolicy
from raypp.control.recovery.policy import Policy, policy_of, root_cause
from raypp.control.report.reports import Reports
from raypp.control.reshape import Decisions
from raypp.control.run_record import (
    RunRecord,
    adoption_event,
    end_event,
    failure_event,
    restart_event,
    room_event,
    seat_events,
    stop_event,
)
from raypp.control.watchers import Hangs, Preemptions, Spares, Turn, Watcher
from raypp.control.worker_group import WorkerGroup
from raypp.errors import EXIT_RUN_FAILED, CheckpointError, JobError, Problem, RayppError, origin_in_words
from raypp.failure_kinds import FailureKind
from raypp.job.job import Job
from raypp.planning.decision import Decision, Facts
from raypp.records import Event, Requests, RunState
from raypp.retry import Backoff
from raypp.state.checkpoint.commit import COMMITTING_RANK, claim_next_attempt, list_checkpoints, newest_attempt
from raypp.state.checkpoint.layout import gave_way_key, spec_key, step_folder
from raypp.state.checkpoint.run_spec import RunEnd, newest_number, read_decision, read_end, write_end
from raypp.state.memory.files import life_of
from raypp.storage import StoreError, open_store
from raypp.storage.store import WAIT_S

log = logging.getLogger(__name__)

_POLL_S = 0.1
_POLL_S_PER_RANK = 0.0005
_LONGEST_POLL_S = 1.0
_STORE_RETRY = Backoff(timeout_s=150.0, first_s=2.0, longest_s=2.0)

T = TypeVar("T")


class Leader:
    """Leads one run to its end. `run` is the thread; other threads use `reports`, and read `record`
    and `outcome`. `restarted`: an earlier process of that actor was killed."""

    def __init__(self, request: RunRequest, handle: Any, restarted: bool) -> None:
        self.outcome: RunEnd | None = None
        self.begun = threading.Event()
        """Set once the ranks of an earlier controller process, if any, are taken over."""
        self.machine = m.Machine()
        self._request = request
        self._handle = handle
        self._restarted = restarted
        self._job = Job.model_validate(request.job)
        self._attempt: Attempt | None = None
        self._launch_now = False
        self._number, self._life = request.number, ""
        self._wake_at: float | None = None
        # A turn's cost grows with the ranks, so turns are rarer: for 1,000 ranks two a second.
        self._poll_s = min(max(_POLL_S, _POLL_S_PER_RANK * self._job.mesh.world), _LONGEST_POLL_S)
        self._store = open_store(self._job.checkpoint.url)
        # Giving up ends ranks that may be healthy: a restarted controller waits for the store at
        # least as long as they wait for a controller.
        patience_s = max(_STORE_RETRY.timeout_s, self._job.recovery.orphan_timeout_s)
        self._store_retry = replace(_STORE_RETRY, timeout_s=patience_s) if restarted else _STORE_RETRY
        incarnation = secrets.token_hex(4)
        self.record = RunRecord(self._store, self._job, f"c-{incarnation}")
        self.reports = Reports(incarnation, self.record)
        self._decisions = Decisions(self._store, Facts.read(request.facts))
        self._sizing = ElasticSizing(self._job, self.record.event, self._others_wait)
        self._policy: Policy = DefaultPolicy()
        self._preemption = Preemptions()
        spares = Spares(self._sizing.is_full_size)
        self._watchers: tuple[Watcher, ...] = (Hangs(), self._preemption, self._sizing, spares)

    def run(self) -> None:
        """Leads the run until it has ended. Without an outcome, another process leads it."""
        try:
            self._begin()
            self._store_retry = replace(_STORE_RETRY, timeout_s=WAIT_S)
            self.begun.set()
            while self.outcome is None and not self.record.machines.overtaken:
                self._turn()
        except MachineError as error:
            self._refuse(error)
        except Exception as error:
            log.exception("the controller failed")
            reason = f"the controller failed: {origin_in_words(error)}"
            code = error.exit_code if isinstance(error, RayppError) else EXIT_RUN_FAILED
            finish = m.Finish(RunState.FAILED, reason, code)
            self.machine = m.finished(self.machine, finish)
            self.record.machine(self.machine)
            self._finish(finish)
        finally:
            self.begun.set()

    def _turn(self) -> None:
        if self._launch_now:
            self._launch_now = False
            self._launch()
        attempt = self._attempt
        if attempt is not None:
            events = attempt.poll(self._poll_s)
            self._process_reports(wait_s=0.0)
            for event in events:
                self._process_event(event)
            for watcher in self._watchers if self._attempt is attempt else ():
                workers, placement = self._workers, self._placement
                turn = Turn(self.machine, attempt, workers, placement, self.reports, self.record)
                if (seen := watcher.check(turn)) is not None:
                    self._process_event(seen)
            self.reports.stepped = False
            placing = attempt.phase is AttemptPhase.PLACING
            self.record.waits(self._placement.waits_for() if placing else None, attempt.number)
        else:
            self._process_reports(wait_s=_POLL_S)
            words = "gave way, and waits in the line; `raypp queue` shows its place" if self.machine.gives_way else None
            self.record.waits(words, self.machine.attempt)
        if self._wake_at is not None and time.monotonic() >= self._wake_at:
            self._wake_at = None
            self._apply(m.DelayOver())
        if self.outcome is None:
            self.record.update_status(self.machine, self._attempt.ranks if self._attempt else ())

    # For the line of the cluster, in any thread ---------------------------------------------------

    def for_line(self) -> dict[str, Any]:
        """Returns `priority`; `need`; `left_s`: how long the remaining steps take, None: unknown;
        `sizes`: with how many ranks it can go on for a run of higher priority, 0: none, it waits in
        the line; `gives`: it is about to."""
        machine, sizes = self.machine, list[int]()
        if machine.training and not (machine.stop or machine.reshaping):
            sizes = self._sizing.smaller(machine)
        more = {"need": asdict(self._need()), "priority": self._request.priority, "gives": machine.reshaping}
        return {"left_s": self.record.seconds_left(), "sizes": sizes, **more}

    def give_way(self, ranks: int, why: str) -> None:
        """Takes the line's request for room: see `Controller.give_way`."""
        self.reports.add(m.RoomAsked(self._sizing.best(ranks) if ranks else None, why))

    def take_turn(self) -> None:
        """Takes the run's turn in the line."""
        self.reports.add(m.TurnCame())

    def _need(self) -> Need:
        bundle = self._placement.bundle
        return Need(self._placement.world, bundle["CPU"], bundle.get("GPU", 0.0))

    def _join_line(self) -> None:
        """Releases the devices and puts the run into the line, behind those that wait there now."""
        # Imported here: most runs never wait in the line.
        from raypp.control.queue.cluster_view import join_again

        self._workers.empty_bundles()
        self._placement.remove()
        self._placement.held = rules.held_nodes
        join_again(self._ticket())
        with contextlib.suppress(RayppError):  # without its store, only the time that it waits is not known
            key = gave_way_key(self._request.run, self._number, self.machine.attempt)
            self._store.put(key, b"", if_absent=True)

    def _others_wait(self) -> bool:
        # Imported here: most runs keep their mesh.
        from raypp.control.queue.cluster_view import others_wait

        return others_wait(self._request.cluster_name, self._request.priority)

    def _ticket(self) -> Ticket:
        asked = self._request
        return Ticket(
            asked.run, asked.store, self._number, asked.user, asked.priority, self._need(), self.record.seconds_left(),
            {"submission_id": asked.submission_id}, gave_way=True,
        )  # fmt: skip

    # Beginning, and taking over from a killed controller ------------------------------------------

    def _begin(self) -> None:
        run = self._request.run
        self._number = self._request.number or self._ask_store(lambda: newest_number(self._store, run))
        left = self._ask_store(lambda: self.record.machines.open(self._number))
        if not self._restarted:
            left = None
        if end := self._ask_store(lambda: read_end(self._store, run, self._number)) if left else None:
            self._end_processes()
            self.outcome = end
            return
        if left is None:
            self._end_processes()  # what an earlier submission left whose controller is gone for good
        self._policy = policy_of(self._job.recovery)
        # Not chosen again after a restart: devices counted at first may be gone with a node.
        device = left.device if left else self._decisions.facts.device
        self._sizing.gpu_bytes = self._decisions.facts.memory
        shape = (left.shape if left else None) or self._sizing.largest()
        self._placement = Placement.of(self._job, self._request.cluster_name, shape.world, device)
        if self._request.queued:
            self._placement.held = rules.held_nodes
        self._workers = WorkerGroup(self._request, self._job, self._handle, device)
        checkpoints = self._ask_store(lambda: list_checkpoints(self._store, run))
        last = self._ask_store(lambda: newest_attempt(self._store, run))
        newest = checkpoints[-1].step if checkpoints else None
        if left is not None:
            self._take_over(left, last, newest)
            return
        if self._ask_store(lambda: self._store.head(spec_key(run))) is None:
            there = f"{self._store.url} on the head, {socket.gethostname()}"
            fix = "use s3://…, or a directory that the submitting machine and all nodes share"
            raise JobError(Problem("checkpoint.url", f"{there}, does not hold what `raypp submit` wrote there", fix))
        self.record.begin(newest)
        self.record.event(Event("submitted", f"submitted as Ray job {self._request.submission_id or '–'}"))
        if self._job.resources.device == "auto":
            self.record.event(Event("device_chosen", f"ranks run on {device}", details={"device": device}))
        self._apply(m.Start(last, newest, shape, device))

    def _take_over(self, left: m.Machine, last: int, newest: int | None) -> None:
        """Goes on from the machine that a killed process left."""
        self._ask_store(lambda: self.record.resume(left, newest))
        self.machine = left
        steps, over = self._job.train.steps, left.phase is m.RunPhase.DONE
        if over:
            self._end_processes()
        seated, others = self._find_workers(last, left)
        complete = newest is not None and newest >= steps
        if seated and complete and len(seated) < self._placement.world:
            self._end_processes()
            seated, others = [], []
        self._sizing.resume(left.shape)
        self._placement.take_over()
        for actor, _ in others:  # standbys, and what would hold resources without a seat
            end_actor(actor)
        ranks = {status.seat.rank for _, status in seated if status.seat is not None}
        if COMMITTING_RANK not in ranks or left.phase is m.RunPhase.ENDING:  # it reports steps and commits no more
            self._ask_store(self.record.recover_from_commits)
        if seated:
            attempt = self._new_attempt(last)
            attempt.decision = self._decision_of(last)
            attempt.adopt(seated, self.record.status().ranks, self.record.step)
            self._attempt = attempt
            self.reports.recovery.was_away(time.time() - self.record.status().updated_at)
            self.reports.start_attempt(last)
            self.record.event(adoption_event(last, attempt.ranks, self.record.status().updated_at))
            self._start_watch(attempt)
        elif not over:
            message = "the controller restarted; no rank was left"
            self.record.event(Event("controller_restarted", message, attempt=last))
        self._apply(m.TakenOver(last, newest, bool(seated), complete, self.record.step))

    def _decision_of(self, attempt: int) -> Decision:
        """Returns what was decided for an attempt whose ranks live."""
        try:
            return self._ask_store(lambda: read_decision(self._store, self._request.run, attempt))
        except CheckpointError as error:
            raise MachineError(error.problems) from error

    def _find_workers(self, last: int, left: m.Machine) -> tuple[list[LivingWorker], list[LivingWorker]]:
        """Returns the living workers with a seat in an attempt that goes on, and the others."""
        living = [] if left.phase is m.RunPhase.DONE else find_workers(self._request.cluster_name)
        over = left.attempt_is_over and left.attempt == last
        seated = [one for one in living if (seat := one[1].seat) is not None and seat.attempt == last and not over]
        return seated, [one for one in living if one not in seated]

    def _refuse(self, error: MachineError) -> None:
        """Says why a run cannot be led on, and what is known. Its ranks save and end alone."""
        log.error("the run is not taken over: %s", error)
        run, alive, place, last = self._request.run, "", None, 0
        with contextlib.suppress(Exception):
            alive = f"{len(find_workers(self._request.cluster_name))} processes are left alone"
            last = newest_attempt(self._store, run)
            checkpoints = list_checkpoints(self._store, run)
            if checkpoints:
                place = f"{self._store.url.rstrip('/')}/{step_folder(run, checkpoints[-1].step)}"
        known = f"attempt {last}, newest checkpoint {place or 'none'}, {alive}; they save and end in"
        reason = f"not taken over: {error}\nknown: {known} {self._job.recovery.orphan_timeout_s:g} s"
        self.record.event(Event("takeover_refused", reason, attempt=last))
        self.record.close()
        self.outcome = RunEnd(run, RunState.FAILED, error.exit_code, 0, place, reason, last)

    def _ask_store(self, question: Callable[[], T]) -> T:
        """Asks the store, and retries while it does not answer."""
        return self._store_retry.call(question, lambda error: isinstance(error, StoreError))

    # Processing reports and events ----------------------------------------------------------------

    def _process_reports(self, wait_s: float) -> None:
        for notice in self.reports.process(self._attempt, wait_s):
            match notice:
                case m.Committed():
                    self._apply(notice)
                case m.TurnCame():
                    self._apply(notice)
                case m.RoomAsked() if not self.machine.reshaping:
                    self._apply(notice)
                    if self.machine.reshaping:
                        self._sizing.why = notice.why
                        self.record.event(room_event(notice.why, self.machine))
                case Requests():
                    if not self.machine.stop:
                        self.record.event(stop_event(notice, self.machine.attempt))
                    self._apply(m.StopAsked(notice.save_before_stop))

    def _process_event(self, event: m.MachineEvent) -> None:
        attempt = self._attempt
        if isinstance(event, m.RankFailed):
            if event.failure.rank in {one.rank for one in self.machine.failures if one.rank >= 0}:
                return  # the ranks of a taken over attempt tell again how they ended
            told = {(one.kind, one.cause) for one in self.machine.failures if not one.kind.traits.node_lost}
            if (event.failure.kind, event.failure.cause) not in told:  # one error of all ranks is told once
                self.record.event(failure_event(event.failure, self.machine.attempt))
            self.reports.recovery.over("noticed")
        elif isinstance(event, m.Seated) and attempt is not None:
            self.reports.recovery.over("seated")
            for seated in seat_events(attempt.ranks, attempt.number):
                self.record.event(seated)
            self._start_watch(attempt)
        elif isinstance(event, m.AttemptEnded):
            if attempt is not None:
                lost = {one.rank for one in self.machine.failures if one.kind.traits.node_lost}
                self._placement.lost_nodes.add({rank.node_id for rank in attempt.ranks if rank.rank in lost})
            self._attempt = None
            self.reports.end_attempt()
            self.reports.recovery.over("ended")
            if self._preemption.reset():
                self._workers.empty_bundles()
                self._placement.remove()
        self._apply(event)

    def _start_watch(self, attempt: Attempt) -> None:
        assert attempt.decision is not None
        rank_of_stage = attempt.decision.pipeline.rank_of_stage
        timeout_s = self._job.recovery.hang_timeout_s
        self.reports.watch = HangWatch(attempt.ranks, timeout_s, time.monotonic(), rank_of_stage)

    # Carrying out commands ------------------------------------------------------------------------

    def _apply(self, event: m.MachineEvent) -> None:
        self.machine, commands = m.step(self.machine, event, self._policy)
        if not isinstance(event, m.Committed):  # the store knows its commits
            self.record.machine(self.machine)
        for command in commands:
            # A successor must know why the ranks stop; and once their processes have ended, their
            # last reports exist nowhere else.
            if isinstance(command, m.SendRequests) or (isinstance(command, m.EndAttempt) and not command.keep):
                self.record.flush()
            if self.record.machines.overtaken:
                return
            match command:
                case m.Launch():
                    self._launch_now = True
                case m.EndAttempt():
                    assert self._attempt is not None
                    suspects = {one.rank for one in self.machine.failures if one.kind.traits.ends_process}
                    self._attempt.end(command.keep, suspects)
                case m.SendRequests():
                    self.reports.stop = command.requests
                case m.Delay():
                    self._wake_at = time.monotonic() + command.seconds
                    kept, world = len(self._workers.seated), self._placement.world
                    memory = self._job.checkpoint.memory_tier
                    self.record.event(restart_event(self.machine, command.seconds, kept, world, memory))
                case m.JoinLine():
                    self._join_line()
                case m.Finish():
                    self._finish(command)

    def _launch(self) -> None:
        self.record.flush()
        self._ask_store(self.record.machines.write)  # what has led to an attempt is known before it is there
        if self.record.machines.overtaken:
            return
        number = self._ask_store(lambda: claim_next_attempt(self._store, self._request.run))
        self._life = self._ask_store(lambda: life_of(self._store, self._job))
        self._apply(m.Claimed(number))
        self._test_nodes()
        self._sizing.prepare(self.machine, self._placement, self._workers)
        message = f"attempt {number} asks for {self._placement.world} ranks"
        self.record.event(Event("attempt_started", message, attempt=number))
        self._attempt = self._new_attempt(number)
        self.reports.start_attempt(number, keep_stop=self.machine.stop)
        self._attempt.launch()

    def _test_nodes(self) -> None:
        """Finds nodes to leave out after a hang that no rank explains: the same ones would hang."""
        cause = root_cause(self.machine.history[-1].failures) if self.machine.history else None
        if cause is None or cause.kind is not FailureKind.HUNG or cause.rank >= 0:
            return
        failing, words = examine_nodes(self._workers)
        self.record.event(Event("network", words, attempt=self.machine.attempt))
        if failing:
            self._apply(m.NodesFailed(tuple(failing.items())))

    def _new_attempt(self, number: int) -> Attempt:
        job = self._sizing.job(self.machine)
        self.record.set_mesh(job.mesh)
        decide = partial(self._decide, job, number)
        return Attempt(job, number, self._workers, self._placement, self.reports.add, decide)

    def _decide(self, job: Job, number: int, compiler: bool, network_gbps: float) -> Decision:
        make = partial(self._decisions.make, job, number, compiler=compiler, network_gbps=network_gbps)
        return self._ask_store(make)

    # The end --------------------------------------------------------------------------------------

    def _finish(self, finish: m.Finish) -> None:
        """Ends the run in an order that stays clear wherever this process is killed: records, then
        processes, then the object that says how it ended."""
        state, record, run = finish.state, self.record, self._request.run
        unsaved = m.save_may_help(self.machine) or bool(record.unsaved(self.machine.committed_step))
        if unsaved and state is RunState.FAILED and self._job.checkpoint.memory_tier:
            stays = "the newest state stays in the memory of its hosts, for `raypp submit JOB --resume`"
            finish = replace(finish, reason=f"{finish.reason}; {stays}")
            self.machine = m.finished(self.machine, finish)
        record.event(end_event(finish, self.machine.attempt, record.step))
        record.flush()
        if record.machines.overtaken:
            return
        self._attempt = None
        try:
            self._end_processes()
        except Exception:
            log.exception("the processes of %s could not be ended", run)
        if self.machine.gives_way:
            with contextlib.suppress(Exception):
                from raypp.control.queue.cluster_view import remove

                remove(self._ticket())
        record.end_trackers(state)
        # Ranks that end normally remove those on their nodes; a mesh that shrank has left others.
        leaves = state is RunState.FAILED or self._sizing.options is not None
        if leaves:
            with contextlib.suppress(Exception):
                look_after_snapshots(self._life or life_of(self._store, self._job), keep=unsaved)
        place, attempt = record.checkpoint_url(), self.machine.attempt
        end = RunEnd(run, state, finish.exit_code, record.step, place, finish.reason, attempt)
        for failure in tell_end(self._request.job, end):  # maybe again, if this process is killed now
            record.event(Event("on_end_failed", failure, attempt=attempt, step=record.step))
        if self._number:
            with contextlib.suppress(RayppError):  # without its store, the run's commands say that it is lost
                end = write_end(self._store, end, self._number)
        record.update_status(self.machine, ())
        record.close()
        self.outcome = end

    def _end_processes(self) -> None:
        """Ends all processes that carry this run's name, and releases its devices."""
        end_workers(self._request.cluster_name)
        remove_groups_of(self._request.cluster_name)
