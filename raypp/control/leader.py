"""The thread that leads a run: it hears what happens, asks the state machine, and carries out what that decides."""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import ray

from raypp.checkpoint.commit import COMMITTING_RANK, claim_next_attempt, list_checkpoints, newest_attempt
from raypp.control import machine as m
from raypp.control import run_events
from raypp.control.attempt import Attempt
from raypp.control.elastic import Fitting
from raypp.control.hang_watch import HangWatch
from raypp.control.metrics import RunGauges
from raypp.control.placement import Placement, group_name, remove_groups_of
from raypp.control.postmortem import stacks_of_all
from raypp.control.preemption import LAST_SAVE_S, Notices
from raypp.control.protocol import Answer, Batch, Beat, Outcome, Parcel, RunRequest, Standing, Word
from raypp.control.run_record import RunRecord
from raypp.control.snapshot_cleanup import forget_snapshots
from raypp.control.worker_group import Crew, end_workers, find_workers
from raypp.errors import in_words
from raypp.failure_kinds import FailureKind
from raypp.observe.status import RunStatus
from raypp.planning.resolve import resolve_pipeline
from raypp.records import Event, Requests, RunState
from raypp.recovery.policy import policy_of
from raypp.recovery.recall import failed_attempts, last_device, last_shape, stop_asked
from raypp.spec.job import Job
from raypp.storage import StoreError, open_store

log = logging.getLogger(__name__)

_POLL_S = 0.1
_POLL_S_PER_RANK = 0.0005
_LONGEST_POLL_S = 1.0
_STORE_RETRY_S = 2.0
_STORE_TRIES = 15

Found: TypeAlias = "tuple[Any, Standing]"
T = TypeVar("T")


class Leader:
    """Leads one run from where it finds it to its end. `live` is the thread; the rest may be called from others.

    Args:
        request: The run.
        handle: The controller actor.
        again: An earlier life of that actor was killed.
    """

    def __init__(self, request: RunRequest, handle: Any, again: bool) -> None:
        self.life = secrets.token_hex(4)
        self.outcome: Outcome | None = None
        self.save_wanted = False
        self.parcels = 0
        """How many relays' parcels came in this life."""
        self._request = request
        self._handle = handle
        self._again = again
        self._job = Job.model_validate(request.job)
        self.machine = m.Machine()
        self._inbox: queue.Queue[Batch | Parcel | Requests] = queue.Queue()
        self._stop: Requests | None = None
        self._attempt: Attempt | None = None
        self._watch: HangWatch | None = None
        self._notices = Notices()
        self._launch_now = False
        self._equipped = False
        """There are a crew and a placement."""
        self._end_told = False
        """An earlier life told how the run ended."""
        self._wake_at: float | None = None
        self._taken: dict[int, int] = {}
        self._acknowledged: dict[int, int] = {}
        self._unwritten: deque[tuple[int, int, int]] = deque()
        # What a turn costs grows with the ranks, so it is taken less often: 1,000 are looked at twice a second.
        self._poll_s = min(max(_POLL_S, _POLL_S_PER_RANK * self._job.mesh.world), _LONGEST_POLL_S)
        self._store = open_store(self._job.checkpoint.url)
        self.record = RunRecord(self._store, self._job, f"c-{self.life}")
        self._gauges = RunGauges(request.run)
        self._fitting = Fitting(self._job, self.record.event)

    # Called from other threads --------------------------------------------------------------------

    def take(self, batch: Batch) -> Answer:
        """A worker's news; the answer is what the operator wants of it, and what of its news is in the store."""
        self._inbox.put(batch)
        attempt = self._attempt
        durable = self._acknowledged.get(batch.rank, 0) if attempt and attempt.number == batch.attempt else 0
        save = False
        if batch.rank == 0:  # the ranks take the maximum over all of them: telling one is enough, and acts once
            save, self.save_wanted = self.save_wanted, False
        stop = self._stop
        if stop is None:
            return Answer(Requests(save=save), self.life, durable)
        requests = Requests(save=save, stop=True, save_before_stop=stop.save_before_stop)
        return Answer(requests, self.life, durable)

    def take_parcel(self, parcel: Parcel) -> Word:
        """The news of many workers, by a relay."""
        self._inbox.put(parcel)
        attempt, stop = self._attempt, self._stop  # in this order: a launch takes back the last attempt's stop first
        number = attempt.number if attempt else 0
        known = self._acknowledged if number == parcel.attempt else {}
        durable = {rank: known[rank] for rank in parcel.unwritten if rank in known}
        requests = Requests() if stop is None else Requests(stop=True, save_before_stop=stop.save_before_stop)
        return Word(self.life, number, requests, durable)

    def ask_to_stop(self, save: bool) -> None:
        self._inbox.put(Requests(stop=True, save_before_stop=save))

    # The thread -----------------------------------------------------------------------------------

    def live(self) -> None:
        """To the end of the run."""
        try:
            self._begin()
            while self.outcome is None:
                self._turn()
        except Exception as error:
            log.exception("the controller failed")
            reason = f"the controller failed: {in_words(error)}"
            self._finish(m.Finish(RunState.FAILED, reason, exit_code=getattr(error, "exit_code", 1)))

    def _begin(self) -> None:
        run = self._request.run
        earlier = self.record.earlier_status() if self._again else None
        if earlier is not None and earlier.state.final:
            self._end_leftovers()
            self.outcome = self._earlier_outcome(earlier)
            return
        if not self._again:
            self._end_leftovers()  # of a submission whose controller is gone for good
        self.machine = replace(self.machine, policy=policy_of(self._job.recovery))
        self._device = self._choose_device()
        bundle = {"CPU": float(self._job.resources.cpus_per_rank)}
        if self._device == "cuda":
            bundle["GPU"] = 1.0
        elastic = self._job.recovery.elastic_options
        self._placement = Placement(
            group_name(run),
            self._fitting.first().world,
            bundle,
            self._job.resources.spares,
            elastic.grace_s if elastic else 0.0,
        )
        self._crew = Crew(self._request, self._job, self._handle, self._device)
        self._equipped = True
        checkpoints = self._patiently(lambda: list_checkpoints(self._store, run))
        last = self._patiently(lambda: newest_attempt(self._store, run))
        newest = checkpoints[-1].step if checkpoints else None
        if self._again:
            self._go_on(last, newest, earlier)
            return
        self.record.begin(newest)
        self.record.event(Event("submitted", f"submitted as Ray job {self._request.submission_id or '–'}"))
        self._apply(m.Start(last, newest, shape=self._fitting.first()))

    def _go_on(self, last: int, newest: int | None, earlier: RunStatus | None) -> None:
        """A later life: leads on what is still alive of the last attempt, or starts the next, or ends the run."""
        events = self.record.go_on(newest, earlier)
        self.machine = replace(self.machine, error=earlier.error if earlier else None)
        ending = run_events.end_told(events)
        if ending is not None:
            self._end_told = True
            self._end_leftovers()
        found = [] if ending is not None else find_workers(self._request.run)
        mine = [one for one in found if _sits_in(one, last)]
        shape = last_shape(events) or self._fitting.first()
        seats = [standing.seat for _, standing in mine if standing.seat is not None]
        if seats:
            shape = self._fitting.of_seat(seats[0].mesh_sizes)
        self._fitting.go_on_with(shape)
        self._placement.world = shape.world
        self._placement.take_over()
        self._crew.relays.take_over()
        self._tidy([one for one in found if one not in mine])
        history = tuple(end for end in failed_attempts(events) if not mine or end.attempt != last)
        asked = stop_asked(events)
        # Whoever told of steps and commits is gone, or is to be ended at once.
        if COMMITTING_RANK not in {seat.rank for seat in seats} or (asked and not asked.save_before_stop):
            self._patiently(lambda: self.record.catch_up(events))
        if not mine:
            if ending is None:
                told = "the controller was restarted; no rank was left"
                self.record.event(Event("controller_restarted", told, attempt=last))
            ending = ending or self._end_without_ranks(newest, asked)
            self._apply(m.Start(last, newest, interrupted=True, history=history, shape=shape, ending=ending))
            return
        self.machine = replace(self.machine, shape=shape)
        attempt = self._new_attempt(last)
        seated = {e.rank: e for e in events if e.kind == "seated" and e.attempt == last and e.rank is not None}
        attempt.adopt(mine, seated, self.record.step)
        self._attempt = attempt
        self.record.event(run_events.adoption_event(last, attempt.ranks))
        self._start_watch(attempt)
        self._apply(m.Start(last, newest, adopted=True, history=history, shape=shape))
        if asked is not None:
            self._apply(m.StopAsked(asked.save_before_stop))

    def _end_without_ranks(self, newest: int | None, asked: Requests | None) -> m.Finish | None:
        """How the run ended while nobody led it, by what the store knows; None: it has to go on."""
        if newest is not None and newest >= self._job.train.steps:
            return m.Finish(RunState.SUCCEEDED)
        if asked is None:
            return None
        saved = (newest or 0) >= self.record.step or not asked.save_before_stop
        return m.Finish(RunState.STOPPED, "" if saved else "no rank was left for the last checkpoint")

    def _tidy(self, others: list[Found]) -> None:
        """Workers in no seat of the last attempt: standbys go on waiting, the others use resources and must go."""
        for actor, standing in others:
            node = standing.presence.facts.node_id
            if standing.standby and standing.seat is None and node not in self._crew.standbys:
                self._crew.add_standby(actor, node)
            else:
                ray.kill(actor, no_restart=True)

    def _turn(self) -> None:
        """One round: carry out what is due, hear what happened."""
        if self._launch_now:
            self._launch_now = False
            self._launch()
        attempt = self._attempt
        if attempt is not None:
            events = attempt.poll(self._poll_s)
            self._take_inbox(block_s=0.0)
            for event in events:
                self._heard(event)
            self._look_for_a_stall(attempt)
            self._look_for_notices(attempt)
            reshape = self._fitting.look(self.machine, attempt, self._placement)
            if reshape is not None:
                self._apply(reshape)
        else:
            self._take_inbox(block_s=_POLL_S)
        for kind, words in self._placement.beside.told():
            self.record.event(Event(kind, words, attempt=self.machine.attempt))
        self._acknowledge()
        if self._wake_at is not None and time.monotonic() >= self._wake_at:
            self._wake_at = None
            self._apply(m.DelayOver())
        self._show()

    # Hearing --------------------------------------------------------------------------------------

    def _take_inbox(self, block_s: float) -> None:
        with contextlib.suppress(queue.Empty):
            item = self._inbox.get(timeout=block_s) if block_s else self._inbox.get_nowait()
            while True:
                if isinstance(item, Batch):
                    self._take_batch(item)
                elif isinstance(item, Parcel):
                    self._take_parcel(item)
                else:
                    self._take_stop(item)
                item = self._inbox.get_nowait()

    def _take_batch(self, batch: Batch) -> None:
        attempt = self._attempt
        if attempt is None or batch.attempt != attempt.number:
            return
        beat = Beat(batch.rank, batch.phase, batch.idle_s, 0.0, batch.inside)
        self._hear(attempt, beat, time.monotonic())
        self._take_news(attempt, batch)

    def _take_parcel(self, parcel: Parcel) -> None:
        attempt, now = self._attempt, time.monotonic()
        self.parcels += 1
        if attempt is None:
            return
        if parcel.attempt == attempt.number:
            for beat in parcel.beats:
                self._hear(attempt, beat, now)
        for batch in parcel.batches:
            if batch.attempt == attempt.number:
                self._take_news(attempt, batch)

    def _hear(self, attempt: Attempt, beat: Beat, now: float) -> None:
        rank = attempt.ranks[beat.rank] if attempt.ranks else None
        if rank is not None and rank.state not in ("dead", "done"):
            rank.state = beat.phase.partition(" ")[0]
        if self._watch is not None:
            self._watch.heard(beat.rank, beat.phase, beat.idle_s, now - beat.ago_s, beat.inside)

    def _take_news(self, attempt: Attempt, batch: Batch) -> None:
        if batch.number <= self._taken.get(batch.rank, 0):
            return  # it came directly after its relay was slow to answer, and by the relay, too
        self._taken[batch.rank] = batch.number
        rank = attempt.ranks[batch.rank] if attempt.ranks else None
        if self._watch is not None:
            for report in batch.steps:
                self._watch.step_took(report.step_s)
        for line in batch.logs:
            self.record.log(line)
        for report in batch.steps:
            if self.record.took_step(report, batch.attempt):
                for one in attempt.ranks:
                    one.step = report.step
                self._gauges.step(report)
            self._crew.prepare_standbys()  # not before the first step: ranks that start need the processors
            if self._fitting.is_whole(self.machine):
                self._placement.hold_spares()
        for event in batch.events:
            self.record.event(event)
            if event.kind == "committed" and event.step is not None:
                self._apply(m.Committed(event.step))
            elif event.kind == "preemption_notice" and rank is not None:
                until = time.monotonic() + LAST_SAVE_S
                self._notices.heard(rank, "it was told to end (SIGTERM)", until, self.machine.committed_step)
                self.save_wanted = True
        if batch.steps or batch.events:
            self._unwritten.append((self.record.taken, batch.rank, batch.number))

    def _acknowledge(self) -> None:
        """Batches whose steps and events have come into the store meanwhile."""
        durable = self.record.durable
        while self._unwritten and self._unwritten[0][0] <= durable:
            _, rank, number = self._unwritten.popleft()
            self._acknowledged[rank] = number

    def _look_for_a_stall(self, attempt: Attempt) -> None:
        stall = self._watch.stalled(time.monotonic()) if self._watch is not None else None
        if stall is None or self.machine.phase is not m.Phase.RUNNING:
            return
        self._watch = None
        for rank, text in stacks_of_all(attempt.ranks, self._crew, stall.rank).items():
            self.record.event(run_events.stack_event(attempt.ranks[rank], text, attempt.number))
        self._heard(m.RankFailed(attempt.ranks[stall.rank].failure(FailureKind.HUNG, stall.cause, stall.details)))

    def _look_for_notices(self, attempt: Attempt) -> None:
        """Whoever is told to go takes a last save along; then the attempt ends, and counts for nothing."""
        now = time.monotonic()
        for rank, why, patience_s in self._notices.drained(attempt.ranks, now):
            self.record.event(run_events.notice_event(rank, why, attempt.number))
            self._notices.heard(rank, why, now + patience_s, self.machine.committed_step)
            self.save_wanted = True
        failure = self._notices.due(now, self.machine.committed_step)
        if failure is not None and self.machine.phase is m.Phase.RUNNING:
            self._heard(m.RankFailed(failure))

    def _take_stop(self, requests: Requests) -> None:
        if not self.machine.stop:
            self.record.event(run_events.stop_event(requests, self.machine.attempt))
            self.record.flush()  # before ranks obey: a later life must know why they ended
        self._apply(m.StopAsked(requests.save_before_stop))

    def _heard(self, event: m.Happening) -> None:
        attempt = self._attempt
        if isinstance(event, m.RankFailed):
            self.record.event(run_events.failure_event(event.failure, self.machine.attempt))
        elif isinstance(event, m.Seated) and attempt is not None:
            for seated in run_events.seat_events(attempt.ranks, attempt.number):
                self.record.event(seated)
            self._start_watch(attempt)
        elif isinstance(event, m.AttemptGone):
            if attempt is not None:
                lost = {one.rank for one in self.machine.failures if one.kind.traits.node_lost}
                self._placement.doubts.add({rank.node_id for rank in attempt.ranks if rank.rank in lost})
            self._attempt = None
            self._watch = None
            if self._notices.over():
                self._crew.leave_bundles()
                self._placement.remove()
        self._apply(event)

    def _start_watch(self, attempt: Attempt) -> None:
        rank_of_stage = resolve_pipeline(attempt.job).rank_of_stage
        timeout_s = self._job.recovery.hang_timeout_s
        self._watch = HangWatch(attempt.ranks, timeout_s, time.monotonic(), rank_of_stage)

    # Carrying out ---------------------------------------------------------------------------------

    def _apply(self, event: m.Happening) -> None:
        self.machine, commands = m.step(self.machine, event)
        for command in commands:
            match command:
                case m.Launch():
                    self._launch_now = True
                case m.EndAttempt():
                    assert self._attempt is not None
                    if not command.keep:
                        self.record.flush()  # what ranks told with their end is nowhere else once they are gone
                    suspects = {one.rank for one in self.machine.failures if one.kind.traits.ends_process}
                    self._attempt.end(command.keep, suspects)
                case m.Ask():
                    self._stop = command.requests
                case m.Wait():
                    self._wake_at = time.monotonic() + command.seconds
                    kept, world = len(self._crew.seated), self._placement.world
                    memory = self._job.checkpoint.memory_tier
                    self.record.event(run_events.restart_event(self.machine, command.seconds, kept, world, memory))
                case m.Finish():
                    self._finish(command)

    def _launch(self) -> None:
        number = self._patiently(lambda: claim_next_attempt(self._store, self._request.run))
        self._apply(m.Claimed(number))
        if self._fitting.prepare(self.machine, self._placement, self._crew):
            with contextlib.suppress(Exception):  # no other mesh can use them; whoever keeps them loses memory only
                forget_snapshots(self._request.run, before=number)
        told = f"attempt {number} asks for {self._placement.world} ranks"
        self.record.event(Event("attempt_started", told, attempt=number))
        self._taken.clear()
        self._acknowledged.clear()
        self._unwritten.clear()
        if not self.machine.stop:
            self._stop = None  # the last attempt may have been asked to end for a larger one
        self._attempt = self._new_attempt(number)
        self._attempt.launch()

    def _new_attempt(self, number: int) -> Attempt:
        job = self._fitting.job(self.machine)
        self.record.has_mesh(job.mesh)
        return Attempt(job, number, self._crew, self._placement, self._inbox.put)

    def _patiently(self, question: Callable[[], T]) -> T:
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
        # A later life must not choose anew: with a node the devices that the first one counted may be gone.
        known = last_device(self.record.earlier_events()) if self._again else None
        if known is not None:
            return known
        gpus = ray.cluster_resources().get("GPU", 0)  # type: ignore[no-untyped-call]
        elastic = self._job.recovery.elastic_options
        device = "cuda" if gpus >= (elastic.min_ranks if elastic else self._job.mesh.world) else "cpu"
        told = f"ranks run on {device}: the cluster has {gpus:g} GPUs for {self._job.mesh.world} ranks"
        self.record.event(Event("device_chosen", told, details={"device": device}))
        return device

    # The end --------------------------------------------------------------------------------------

    def _end_everything(self) -> None:
        """Ends every process of the run, and gives back its devices; when that fails, by the run's name."""
        self._attempt = None
        for end in (self._dismiss, self._end_leftovers) if self._equipped else (self._end_leftovers,):
            try:
                end()
                return
            except Exception:
                log.exception("the processes of %s could not be ended", self._request.run)

    def _dismiss(self) -> None:
        self._crew.dismiss()
        self._placement.remove()

    def _end_leftovers(self) -> None:
        """Ends whatever processes carry this run's name, and gives back their devices."""
        end_workers(self._request.run)
        remove_groups_of(self._request.run)

    def _earlier_outcome(self, earlier: RunStatus) -> Outcome:
        """How the run ended, by what an earlier life wrote down."""
        failed = earlier.state is RunState.FAILED
        end = run_events.end_told(self.record.earlier_events())
        exit_code = end.exit_code if end is not None else int(failed)
        reason = (earlier.error or "") if failed else ""
        return Outcome(self._request.run, str(earlier.state), exit_code, earlier.step, earlier.checkpoint, reason)

    def _finish(self, finish: m.Finish) -> None:
        """The end in the order that leaves it clear whenever this process is killed: the event and all that was told,
        then the processes, then the status, which says that nothing of the run is left."""
        state, record = finish.state, self.record
        if not self._end_told:
            record.event(run_events.end_event(finish, self.machine.attempt, record.step))
            record.flush()
        self._end_everything()
        if state is RunState.FAILED:
            with contextlib.suppress(Exception):  # ranks that end in order remove theirs themselves
                forget_snapshots(self._request.run)
        record.show(self.machine, (), state=state, error=finish.reason if state is RunState.FAILED else None)
        self._gauges.status(record.status(), self.machine.committed_step)
        record.close()
        self.outcome = Outcome(
            self._request.run, str(state), finish.exit_code, record.step, record.checkpoint_url(), finish.reason
        )

    def _show(self) -> None:
        if self.outcome is None:
            self.record.show(self.machine, self._attempt.ranks if self._attempt else ())
            self._gauges.status(self.record.status(), self.machine.committed_step)


def _sits_in(found: Found, attempt: int) -> bool:
    seat = found[1].seat
    return seat is not None and seat.attempt == attempt


def start_thread(leader: Leader, afterwards: Callable[[], None]) -> threading.Thread:
    """Lets a leader live in a thread of its own, and calls `afterwards` there at its end."""

    def both() -> None:
        leader.live()
        afterwards()

    thread = threading.Thread(target=both, name="raypp-controller", daemon=True)
    thread.start()
    return thread
