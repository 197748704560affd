"""Records of a run: events, steps, logs and status for the store, lines of text for `submit`, and
Ray metrics. Events that the controller records: people read them; nothing else does."""

import dataclasses
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from ray.util.metrics import Gauge

from raypp.control.credentials import scrubbed
from raypp.control.machine import Finish, Machine
from raypp.control.machine_log import MachineLog
from raypp.control.recovery.policy import describe, root_cause
from raypp.control.seats import Rank
from raypp.errors import CheckpointError, RayppError
from raypp.job.job import Job, MeshSection
from raypp.records import END_EVENTS, Event, RankFailure, Requests, RunState, StepReport
from raypp.state.checkpoint.commit import COMMITTING_RANK, Commit, list_checkpoints, read_commit, read_extra
from raypp.state.checkpoint.layout import step_folder
from raypp.state.run_records import quantities as names
from raypp.state.run_records.json_lines import LogLine
from raypp.state.run_records.reader import RunReader
from raypp.state.run_records.recorder import RunRecorder
from raypp.state.run_records.status import ENDED, RankStatus, RunStatus, date_and_clock
from raypp.state.run_records.tracking import Trackers
from raypp.storage import ObjectStore, StoreError

_LINES_KEPT = 5000
_KEYS_KEPT = 50_000
_FLUSH_S = 10.0
_ETA_STEPS = 20


class RunRecord:
    """A run's records, written by one controller process. Thread-safe. `writer`: a unique name."""

    def __init__(self, store: ObjectStore, job: Job, writer: str) -> None:
        self._store = store
        self._job = job
        self.machines = MachineLog(store, job.name, writer)
        """What the controller has decided; `machine` adds to it."""
        self._gauges = RunGauges(job.name)
        self._recorder = RunRecorder(store, job.name, writer, before_status=self.machines.write)
        self._trackers = Trackers(job, self._of_tracker)
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._line_count = 0
        self._changed = threading.Condition()
        self._status = RunStatus(job.name, RunState.PENDING, steps=job.train.steps, mesh=job.mesh.axes)
        self._known: dict[tuple[Any, ...], None] = {}
        self._unsaved: Event | None = None
        """Since when saves fail; None while they succeed."""
        self._waits: str | None = None
        """What the run waits for before it can begin an attempt."""
        self._step_s: deque[float] = deque(maxlen=_ETA_STEPS)
        self._newest = (0, 0)
        """Attempt and step of the report that the status is from."""

    @property
    def taken(self) -> int:
        """How many steps and events have been added."""
        return self._recorder.taken

    @property
    def durable(self) -> int:
        """How many of them are in the store."""
        return self._recorder.durable

    @property
    def step(self) -> int:
        return self._status.step

    def machine(self, machine: Machine) -> None:
        """Records what was decided, to be written soon, after the events so far."""
        self.machines.put(machine)
        self._recorder.write_soon()

    def begin(self, committed_step: int | None) -> None:
        """Sets the status of a submitted run before its first attempt."""
        self._status = dataclasses.replace(
            self._status, step=committed_step or 0, checkpoint=self._url_of(committed_step)
        )
        self._recorder.status(self._status)

    def resume(self, machine: Machine, committed_step: int | None) -> None:
        """Continues the records of an earlier controller process, which was killed. Ranks report
        again what may not have been written, so all that is written counts as known. The earlier
        status may be older than the history, because a round of writes ends with the status. May be
        called again after a `StoreError`: it reads everything before it changes anything."""
        reader = RunReader(self._store, self._job.name)
        events, reports, earlier = reader.events(), reader.reports(), self._earlier_status(reader, machine)
        for key in [*map(_key, events), *((report.step, report.attempt) for report in reports)]:
            self._is_new(key)
        if earlier is not None:
            self._status = dataclasses.replace(earlier, steps=self._job.train.steps)
        if reports:
            last = reports[-1]
            self._newest = (last.attempt, last.step)
            if last.attempt >= self._status.attempt:
                self._set_step(last)
        self._status = dataclasses.replace(
            self._status, step=max(self._status.step, committed_step or 0), checkpoint=self._url_of(committed_step)
        )
        self._recorder.status(self._status)

    def _earlier_status(self, reader: RunReader, machine: Machine) -> RunStatus | None:
        """Returns the last status written; None if it is damaged, or another submission's end."""
        try:
            status = reader.run_status()
        except StoreError:
            raise
        except RayppError as error:
            self._say(f"the run's last status cannot be read: {error}")
            return None
        ended = status is not None and status.state.final and not machine.state.final
        return None if ended else status

    def recover_from_commits(self) -> None:
        """Records commits and steps known only from checkpoints: rank 0 may be gone."""
        recent: Sequence[StepReport] = ()
        for checkpoint in list_checkpoints(self._store, self._job.name):
            try:
                commit = read_commit(self._store, self._job.name, checkpoint.step)
                recent = read_extra(commit.extra, checkpoint.key).recent_steps
            except CheckpointError:  # reported when it is loaded
                continue
            self.event(commit_event(commit))
        for report in recent:  # the newest has the reports of the last steps before it
            self.add_step(report)

    def status(self) -> RunStatus:
        return self._status

    def seconds_left(self) -> float | None:
        """Returns the time that the remaining steps take, from the last ones; None if unknown."""
        took = list(self._step_s)
        return statistics.median(took) * max(0, self._status.steps - self._status.step) if took else None

    def set_mesh(self, mesh: MeshSection) -> None:
        self._status = dataclasses.replace(self._status, mesh=mesh.axes)

    def checkpoint_url(self) -> str | None:
        """Returns URL/NAME/step-N of the newest commit."""
        return self._status.checkpoint

    def unsaved(self, committed_step: int | None) -> str:
        """Returns what is in no checkpoint while saves fail; empty while they do not."""
        if self._unsaved is None:
            return ""
        newest = "no checkpoint" if committed_step is None else f"newest checkpoint step {committed_step}"
        steps = max(0, self.step - (committed_step or 0))
        return f"last save failed, {newest}, {steps} steps in memory only: {self._unsaved.message}"

    def add_step(self, report: StepReport, reported_in: int = 0) -> bool:
        """Records a finished step. Older ones may follow newer ones: a rank reports again what was
        not written. `reported_in`: the attempt whose rank reports it; after loading a checkpoint, a
        rank reports steps of earlier attempts. Returns whether it is the run's current step."""
        place = (max(reported_in, report.attempt), report.step)
        newest = place >= self._newest
        if newest:
            self._newest = place
            self._step_s.append(report.step_s)
            self._set_step(report)
            self._gauges.step(report)
        if self._is_new((report.step, report.attempt)):
            self._recorder.step(report)
            if newest:  # an older step, reported again, would look like a return to it
                self._trackers.step(report)
            self._say(
                f"step {report.step}/{self._job.train.steps}  loss {report.loss:.4f}  "
                f"{report.tokens_per_s:.0f} tokens/s  {report.step_s:.3f} s"
            )
        return newest

    def event(self, event: Event) -> None:
        """Records an event once: of failed saves the first, of awaited saves the last."""
        if not self._is_new(_key(event)):
            return
        if event.kind == "committed":
            self._unsaved = None
        elif event.kind == "save_failed":
            before, self._unsaved = self._unsaved, event
            if before is not None and ("waits_s" in before.details or "waits_s" not in event.details):
                self._unsaved = before
                return
        self._recorder.event(event)
        self._trackers.event(event)
        self._say(f"{event.kind}: {event.message}")

    def waits(self, words: str | None, attempt: int) -> None:
        """Sets what the run waits for; None: for nothing. The first time, it is an event."""
        if words and not self._waits:
            self.event(Event("waiting", words, attempt=attempt))
        self._waits = words

    def log(self, line: LogLine) -> None:
        """Records a line of a rank's output."""
        self._recorder.log(line)

    def update_status(self, machine: Machine, ranks: Sequence[Rank]) -> None:
        """Updates the status from machine and ranks; without ranks, the last ones stay."""
        done = machine.state is RunState.SUCCEEDED
        now = () if machine.state.final else (self._waits, self.unsaved(machine.committed_step))
        shown = _rank_status(ranks, self._status.ranks) or tuple(
            dataclasses.replace(one, state="done" if done or one.state == "done" else "dead")
            for one in self._status.ranks
        )
        self._status = dataclasses.replace(
            self._status,
            state=machine.state,
            attempt=machine.attempt,
            restarts=machine.restarts,
            checkpoint=self._url_of(machine.committed_step),
            ranks=shown,
            error="\n".join(filter(None, (*now, machine.error))) or None,
        )
        self._recorder.status(self._status)
        self._gauges.status(self._status, machine.committed_step)

    def end_trackers(self, state: RunState) -> None:
        """Ends the trackers, which may take some seconds."""
        self._trackers.close(str(state))

    def flush(self) -> bool:
        """Writes everything to the store; returns whether that worked."""
        return self._recorder.flush(_FLUSH_S)

    def close(self) -> bool:
        """Writes everything to the store and stops the writer; returns whether that worked."""
        durable = self._recorder.close()
        if not durable:
            self._say(f"the run's last records could not be written: {self._recorder.last_error}")
        return durable

    def lines_since(self, cursor: int, patience_s: float) -> tuple[list[str], int]:
        """Waits for lines after the first `cursor` ones; returns them, and the next cursor."""
        with self._changed:
            self._changed.wait_for(lambda: self._line_count > cursor, patience_s)
            known = max(0, cursor - self._line_count + len(self._lines))
            return list(self._lines)[known:], self._line_count

    def _set_step(self, report: StepReport) -> None:
        self._status = dataclasses.replace(
            self._status,
            step=report.step,
            loss=report.loss,
            tokens_per_s=report.tokens_per_s,
            tflops=report.values.get("tflops"),
            mfu=report.values.get("mfu"),
            peak_tflops=report.peak_tflops or None,
            alloc_retries=report.alloc_retries or None,
            wire_bytes=None if report.replica_bytes is None else report.wire_bytes,
            replica_bytes=report.replica_bytes,
        )

    def _is_new(self, key: tuple[Any, ...]) -> bool:
        """Returns whether this was not recorded before: ranks repeat what may not be written."""
        if key in self._known:
            return False
        self._known[key] = None
        if len(self._known) > _KEYS_KEPT:
            del self._known[next(iter(self._known))]
        return True

    def _say(self, text: str) -> None:
        with self._changed:
            self._lines.append(f"{time.strftime('%H:%M:%S')}  {text}")
            self._line_count += 1
            self._changed.notify_all()

    def _of_tracker(self, event: Event) -> None:
        self.event(dataclasses.replace(event, message=scrubbed(event.message), attempt=self._status.attempt))

    def _url_of(self, step: int | None) -> str | None:
        return None if step is None else f"{self._store.url.rstrip('/')}/{step_folder(self._job.name, step)}"


class RunGauges:
    """The gauges of one run. Ray exports them on a node's metrics port with the prefix `ray_`."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._parts: set[str] = set()
        self._gauges = {metric.name: Gauge(metric.name, metric.help, metric.tags) for metric in names.METRICS}

    def step(self, report: StepReport) -> None:
        for one in names.QUANTITIES:
            if one.gauge is not None:
                self._set(one.gauge, getattr(report, one.name))
        for one in names.EXTRAS:
            if one.gauge is not None and one.name in report.values:
                self._set(one.gauge, report.values[one.name])
        self._parts |= report.parts_s.keys()
        for part in self._parts:  # a part that this step lacks, such as a save, took no time
            self._set(names.STEP_PART_SECONDS, report.parts_s.get(part, 0.0), part=part)

    def status(self, status: RunStatus, committed_step: int | None) -> None:
        self._set(names.STEPS, status.steps)
        self._set(names.ATTEMPT, status.attempt)
        self._set(names.RESTARTS, status.restarts)
        self._set(names.CHECKPOINT_STEP, committed_step or 0)
        self._set(names.RANKS_ALIVE, sum(rank.state not in ENDED for rank in status.ranks))
        for state in RunState:
            self._set(names.STATE, float(state is status.state), state=str(state))

    def _set(self, metric: names.Metric, value: float, **tags: str) -> None:
        self._gauges[metric.name].set(value, tags={"run": self._run, **tags})


def _rank_status(ranks: Sequence[Rank], before: Sequence[RankStatus]) -> tuple[RankStatus, ...]:
    """Returns each rank's status. Reuses unchanged objects: each turn asks for thousands."""
    if len(before) != len(ranks):
        return tuple(RankStatus(one.rank, one.coordinates, one.node, one.pid, one.state) for one in ranks)
    return tuple(
        old
        if (old.state, old.pid, old.node, old.rank, old.coordinates)
        == (one.state, one.pid, one.node, one.rank, one.coordinates)
        else RankStatus(one.rank, one.coordinates, one.node, one.pid, one.state)
        for one, old in zip(ranks, before, strict=True)
    )


def _key(event: Event) -> tuple[Any, ...]:
    if event.kind == "committed":  # an attempt commits a step once, but two sources may report it
        return (event.kind, event.attempt, event.step)
    if event.kind == "stop_requested" or event.kind in END_EVENTS.values():
        # Known to the store, but the controller may have been killed before it wrote its machine:
        # then `raypp stop` asks the next one again, or the end comes again.
        return (event.kind, event.attempt, event.message)
    return (event.time, event.kind, event.message, event.rank)


def failure_event(failure: RankFailure, attempt: int) -> Event:
    """A rank failed."""
    details = {"kind": failure.kind, "cause": failure.cause, "pid": failure.pid, "label": failure.label}
    known = failure.rank >= 0
    return Event(
        "rank_failed",
        f"{failure.label} (rank {failure.rank}) on {failure.node}: {failure.cause}" if known else failure.cause,
        attempt=attempt,
        step=failure.step,
        rank=failure.rank if known else None,
        node=failure.node,
        details={**details, "evidence": failure.details},
    )


def seat_events(ranks: Iterable[Rank], attempt: int) -> list[Event]:
    """Which process has which seat."""
    events = []
    for rank in ranks:
        seat = rank.seat
        if seat is None:
            continue
        message = f"rank {seat.rank} is {seat.label} on {seat.node}, pid {rank.pid}, interface {seat.interface}"
        details = {"coordinates": seat.coordinates.as_dict(), "pid": rank.pid, "label": seat.label}
        events.append(Event("seated", message, attempt=attempt, rank=seat.rank, node=seat.node, details=details))
    return events


def restart_event(machine: Machine, delay_s: float, kept: int, world: int, memory: bool) -> Event:
    """A new attempt follows. Its ranks find out from which step, and report it (`restored`,
    `resumed`). `kept`: reused processes of `world`. `memory`: whether ranks snapshot to memory."""
    failure = root_cause(machine.history[-1].failures)
    newest = machine.committed_step
    start = "the beginning" if newest is None else f"the checkpoint of step {newest}"
    if memory and not failure.kind.traits.taints_snapshots:
        start = f"a newer snapshot in memory if there is one, else {start}"
    pause = f" in {delay_s:g} s" if delay_s else ""
    message = f"a new attempt starts{pause} from {start}: {describe(failure)}; {kept} of {world} processes are reused"
    return Event("restarting", message, attempt=machine.attempt, details={"kept": kept})


def adoption_event(attempt: int, ranks: Iterable[Rank], since: float) -> Event:
    """A new controller takes over running ranks. `since`: its last record, in s since 1970."""
    living = [rank for rank in ranks if not rank.ended]
    ran = f"{len(living)} ranks of attempt {attempt} kept running without it"
    message = f"the controller restarted; {ran} since {date_and_clock(since)}"
    details = {"pids": [rank.pid for rank in living]}
    return Event("controller_restarted", message, attempt=attempt, details=details)


def commit_event(commit: Commit) -> Event:
    """A checkpoint exists whose commit no rank reported."""
    message = f"step {commit.step}: {commit.size / 1e6:.1f} MB in {len(commit.objects)} objects"
    details = {"bytes": commit.size, "objects": len(commit.objects)}
    return Event("committed", message, commit.created, commit.attempt, commit.step, COMMITTING_RANK, details=details)


def room_event(why: str, machine: Machine) -> Event:
    """A run of higher priority needs devices of this one. `why`: which. `machine`: after that."""
    then = "waits in the line" if machine.gives_way else "goes on with fewer ranks"
    return Event("room_asked", f"{why}; this run saves, and {then}", attempt=machine.attempt)


def stop_event(requests: Requests, attempt: int) -> Event:
    """The operator wants the run to end."""
    how = "after a last checkpoint" if requests.save_before_stop else "at once, without a checkpoint"
    details = {"save": requests.save_before_stop}
    return Event("stop_requested", f"asked to stop {how}", attempt=attempt, details=details)


def end_event(finish: Finish, attempt: int, step: int) -> Event:
    """The run has ended."""
    details = {"exit_code": finish.exit_code}
    message = finish.reason or f"after step {step}"
    return Event(END_EVENTS[finish.state], message, attempt=attempt, step=step, details=details)
