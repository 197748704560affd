"""A restarted leader takes over what the first one left: living ranks, dead ones, wishes, ends."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from stand_in_clock import StandInClock
from stand_in_workers import Actor, Devices, StandIns, Workers, info_of, stand_still

from raypp.control import attempt as attempt_module
from raypp.control import leader as leader_module
from raypp.control import machine as m
from raypp.control import watchers
from raypp.control.leader import Leader
from raypp.control.machine_log import MachineError, MachineLog
from raypp.control.process_evidence import Death
from raypp.control.protocol import RunRequest, WorkerStatus
from raypp.control.report import reports
from raypp.control.run_record import end_event
from raypp.failure_kinds import FailureKind
from raypp.job.load import job_document, parse_job
from raypp.planning.decide import decide
from raypp.planning.geometry import Mesh, Shape
from raypp.records import Event, RankFailure, RankResult, RunState, Seat, StepReport
from raypp.state.checkpoint.commit import Commit, claim_attempt, write_commit
from raypp.state.checkpoint.run_spec import write_decision
from raypp.state.run_records.reader import RunReader
from raypp.state.run_records.recorder import RunRecorder
from raypp.state.run_records.status import RankStatus, RunStatus
from raypp.storage.directory import DirectoryStore

RUN, STEPS, STEP, COMMITTED = "heir", 20, 7, 5
SECTIONS: dict[str, Any] = {
    "name": RUN,
    "mesh": {"pp": 2, "fsdp": 2},
    "train": {"steps": STEPS},
    "resources": {"device": "cpu"},
}


class Heir(Leader):
    """The controller's second process. `ranks` are the workers that are alive, by rank."""

    def __init__(self, folder: Path, *ranks: int) -> None:
        self.job = parse_job({**SECTIONS, "checkpoint": {"url": str(folder)}})
        super().__init__(RunRequest(RUN, job_document(self.job), "one"), None, restarted=True)
        self.reader = RunReader(DirectoryStore(folder), RUN)
        mesh = Mesh.of(self.job.mesh)
        self.living = []
        for number in ranks:
            seat = Seat(RUN, 1, number, 4, mesh.coordinates(number), mesh.sizes)
            self.living.append((Actor(), WorkerStatus(info_of(number), number, seat)))
        self.ended = 0

    def _new_attempt(self, number: int) -> StandIns:
        self.record.set_mesh(self.job.mesh)
        decide = partial(self._decide, self.job, number)
        return StandIns(self.job, number, self._workers, self._placement, self.reports.add, decide)

    def _end_processes(self) -> None:
        self.ended += 1

    def kinds(self) -> list[str]:
        self.record.flush()
        return [event.kind for event in self.reader.events()]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> StandInClock:
    gone = Death(FailureKind.KILLED, "its process was gone")
    monkeypatch.setattr(attempt_module, "death_during_controller_outage", lambda rank: gone)
    monkeypatch.setattr(leader_module, "Placement", SimpleNamespace(of=lambda *_: Devices()))
    monkeypatch.setattr(leader_module, "WorkerGroup", lambda *_: Workers())
    monkeypatch.setattr(leader_module, "look_after_snapshots", lambda life, keep: None)
    return stand_still(monkeypatch, leader_module, reports, watchers)


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """What the first controller left: an attempt that has taken STEP steps and saved COMMITTED."""
    store = DirectoryStore(tmp_path)
    claim_attempt(store, RUN, 1)
    write_decision(store, decide(parse_job(SECTIONS)), 1)
    with RunRecorder(store, RUN, "c-first") as recorder:
        recorder.event(Event("submitted", "", 100.0))
        for step in range(1, STEP + 1):
            recorder.step(_report(step))
        mesh = Mesh.of(parse_job(SECTIONS).mesh)
        ranks = [RankStatus(n, mesh.coordinates(n), info_of(n).facts.ip, 100 + n, "step") for n in range(4)]
        recorder.status(RunStatus(RUN, RunState.RUNNING, STEPS, STEP, attempt=1, ranks=tuple(ranks)))
    _left_also(tmp_path)
    _commit(store, COMMITTED)
    return tmp_path


def _report(step: int) -> StepReport:
    return StepReport(step, 1.0 / step, 1.0, 10, 10, 0.1, 100.0, 1)


def _commit(store: DirectoryStore, step: int) -> None:
    extra = {"recent_steps": [asdict(_report(one)) for one in range(1, step + 1)]}
    write_commit(store, Commit(RUN, step, 1, {}, {}, extra, ()))


def _left_also(folder: Path, *events: m.MachineEvent) -> m.Machine:
    machine = m.Machine()
    shape = Shape(2, 1, 2, 1, 1, parse_job(SECTIONS).pipeline.microbatches)
    for event in (m.Start(0, None, shape, "cpu"), m.Claimed(1), m.Seated(), *events):
        machine, _ = m.step(machine, event)
    log = MachineLog(DirectoryStore(folder), RUN, "c-first")
    log.open(0)
    log.put(machine)
    log.write()
    return machine


TakeOver = Callable[..., Heir]


@pytest.fixture
def take_over(monkeypatch: pytest.MonkeyPatch, left: Path) -> TakeOver:
    """Returns what begins the second process while these ranks are alive."""

    def begin(*alive: int) -> Heir:
        heir = Heir(left, *alive)
        monkeypatch.setattr(leader_module, "find_workers", lambda run: heir.living)
        heir._begin()
        return heir

    return begin


def attempt_of(heir: Heir) -> StandIns:
    assert isinstance(heir._attempt, StandIns)
    return heir._attempt


def test_living_ranks_are_led_on_in_their_attempt(take_over: TakeOver) -> None:
    heir = take_over(0, 1, 2, 3)
    assert (heir.machine.phase, heir.machine.attempt, heir.machine.restarts) == (m.RunPhase.RUNNING, 1, 0)
    assert heir.machine.committed_step == COMMITTED and heir.record.step == STEP
    assert [[call[0] for call in actor.calls] for actor, _ in heir.living] == [["outcome"]] * 4
    heir.record.flush()
    (event,) = [event for event in heir.reader.events() if event.kind == "controller_restarted"]
    assert event.details["pids"] == [100, 101, 102, 103]
    for rank in range(4):
        attempt_of(heir).tells(rank, RankResult(rank, STEPS, False, STEPS))
    heir._turn()
    heir._turn()
    assert heir.outcome is not None and (heir.outcome.state, heir.outcome.exit_code) == ("SUCCEEDED", 0)
    assert heir.kinds().count("succeeded") == 1 and heir.kinds().count("submitted") == 1


def test_a_rank_that_died_meanwhile_ends_the_attempt_and_the_others_stay(take_over: TakeOver) -> None:
    heir = take_over(0, 1, 2)
    heir._turn()
    assert heir.machine.phase is m.RunPhase.ENDING and heir.machine.failures[0].rank == 3
    assert (heir.machine.failures[0].pid, heir.machine.failures[0].step) == (103, STEP)
    for rank in range(3):
        lost = attempt_of(heir).ranks[rank].failure(FailureKind.LOST_PEER, "left")
        attempt_of(heir).tells(rank, lost)
    heir._turn()
    heir._turn()
    assert (heir.machine.attempt, heir.machine.restarts) == (2, 1)
    assert sorted(heir._workers.seated) == [0, 1, 2, 3] and heir._workers.seated[0].actor is heir.living[0][0]


@pytest.mark.parametrize("content", [None, "{", '{"version": 2}'])
def test_without_what_was_decided_the_ranks_are_left_alone(
    take_over: TakeOver, left: Path, content: str | None
) -> None:
    path = left / RUN / "decision-1.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(MachineError, match=r"decision-1\.json"):
        take_over(0, 1, 2, 3)


def test_without_any_rank_the_next_attempt_begins_as_a_restart(take_over: TakeOver) -> None:
    heir = take_over()
    heir._turn()
    assert (heir.machine.phase, heir.machine.attempt, heir.machine.restarts) == (m.RunPhase.LAUNCHING, 2, 1)
    assert "controller_restarted" in heir.kinds()


def _fail(*ranks: int, kind: FailureKind = FailureKind.KILLED) -> list[m.RankFailed]:
    return [m.RankFailed(RankFailure(rank, f"rank {rank}", "10.0.0.2", 100 + rank, kind, "gone")) for rank in ranks]


def test_an_attempt_that_was_ending_goes_on_ending_and_a_known_failure_is_recorded_once(
    take_over: TakeOver, left: Path
) -> None:
    _left_also(left, *_fail(3))
    heir = take_over(0, 1, 2)
    heir._turn()
    assert heir.machine.phase is m.RunPhase.ENDING and len(heir.machine.failures) == 1
    assert [[call[0] for call in actor.calls] for actor, _ in heir.living] == [["outcome", "leave"]] * 3
    assert heir.kinds().count("rank_failed") == 0, "the first process recorded it"


def test_the_pause_before_a_restart_and_the_budget_of_restarts_outlive_the_controller(
    take_over: TakeOver, monkeypatch: pytest.MonkeyPatch, left: Path
) -> None:
    """The processes of the attempt that is over are not taken for ranks."""
    again = (m.AttemptEnded(), m.DelayOver(), m.Claimed(1), m.Seated())
    _left_also(left, m.Committed(COMMITTED), *_fail(3), *again, *_fail(3), *again, *_fail(3), m.AttemptEnded())
    ended: list[Any] = []
    monkeypatch.setattr(leader_module, "end_actor", ended.append)
    heir = take_over(0, 1, 2)
    assert len(ended) == 3 and (heir.machine.restarts, len(heir.machine.history)) == (3, 3)
    heir._turn()
    assert (heir.machine.attempt, heir.machine.phase) == (2, m.RunPhase.LAUNCHING)
    heir._process_event(_fail(3)[0])
    assert attempt_of(heir).phase is attempt_module.AttemptPhase.ENDING
    heir._process_event(m.AttemptEnded())
    assert heir.outcome is not None and "3 restarts in a row brought no newer checkpoint" in heir.outcome.reason


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text.replace('"version": 1', '"version": 9'), "is of version 9; this raypp reads"),
        (lambda text: text[:-9], "is not JSON"),
    ],
)
def test_a_machine_that_cannot_be_read_leaves_the_ranks_alone_and_says_what_is_known(
    monkeypatch: pytest.MonkeyPatch, left: Path, damage: Any, words: str
) -> None:
    newest = left / RUN / "machine" / "0-000001.json"
    newest.write_text(damage(newest.read_text()))
    heir = Heir(left, 0, 1, 2, 3)
    monkeypatch.setattr(leader_module, "find_workers", lambda run: heir.living)
    heir.run()
    assert heir.outcome is not None and heir.outcome.state is RunState.FAILED
    for text in (words, str(newest), "raypp submit JOB --resume", "attempt 1", "step-00000005", "4 processes"):
        assert text in heir.outcome.reason
    assert heir.ended == 0 and not any(actor.calls for actor, _ in heir.living)
    reader = RunReader(DirectoryStore(left), RUN)
    assert [event.kind for event in reader.events()] == ["submitted", "takeover_refused"]
    assert (reader.status() or {})["state"] == "RUNNING" and not (left / RUN / "end.json").exists()


def test_a_process_that_was_taken_for_dead_gives_no_command_any_more(take_over: TakeOver, left: Path) -> None:
    heir = take_over(0, 1, 2, 3)
    heir.record.flush()
    other = MachineLog(DirectoryStore(left), RUN, "c-other")
    machine = other.open(0)
    assert machine is not None
    other.put(m.step(machine, m.Committed(STEP))[0])
    other.write()
    heir.reports.request_stop(save=False)
    heir._turn()
    assert heir.record.machines.overtaken and heir.outcome is None
    assert [[call[0] for call in actor.calls] for actor, _ in heir.living] == [["outcome"]] * 4


@pytest.mark.parametrize("alive", [(), (1, 2)], ids=["no rank", "some ranks"])
def test_a_run_whose_last_step_is_committed_is_over_even_if_some_ranks_are_left(
    take_over: TakeOver, left: Path, alive: tuple[int, ...]
) -> None:
    _commit(DirectoryStore(left), STEPS)
    heir = take_over(*alive)
    assert heir.outcome is not None and (heir.outcome.state, heir.outcome.exit_code) == ("SUCCEEDED", 0)
    assert (heir.outcome.step, heir.ended > 0) == (STEPS, True)
    assert [row["step"] for row in heir.reader.history()] == list(range(1, STEPS + 1)), "the checkpoint tells the rest"


def test_a_stop_that_was_asked_for_is_not_forgotten(take_over: TakeOver, left: Path) -> None:
    _left_also(left, m.StopAsked(True))
    heir = take_over(0, 1, 2, 3)
    assert heir.machine.state is RunState.STOPPING
    assert heir.reports.stop is not None and heir.reports.stop.save_before_stop
    for rank in range(4):
        attempt_of(heir).tells(rank, RankResult(rank, 9, True, 9))
    heir._turn()
    heir._turn()
    assert heir.outcome is not None and (heir.outcome.state, heir.outcome.exit_code) == ("STOPPED", 0)
    assert heir.kinds().count("stop_requested") == 0, "the first process recorded it"


@pytest.mark.parametrize("recorded", [True, False])
def test_a_decided_end_is_carried_out_and_recorded_once(take_over: TakeOver, left: Path, recorded: bool) -> None:
    over = _left_also(left, *_fail(1, kind=FailureKind.USER_ERROR), m.AttemptEnded())
    assert over.finish is not None
    if recorded:
        with RunRecorder(DirectoryStore(left), RUN, "c-more") as recorder:
            recorder.event(end_event(over.finish, 1, STEP))
    heir = take_over(0, 1, 2, 3)
    assert heir.outcome is not None and (heir.outcome.state, heir.outcome.exit_code) == ("FAILED", 2)
    assert heir.ended > 0 and heir.kinds().count("failed") == 1
    status = heir.reader.status() or {}
    assert (status["state"], status["error"]) == ("FAILED", over.finish.reason)


def test_a_rank_that_dies_after_it_was_adopted_is_found(take_over: TakeOver) -> None:
    heir = take_over(0, 1, 2, 3)
    attempt_of(heir).tells(2, ActorDiedError())
    heir._turn()
    assert [(one.rank, one.kind, one.pid) for one in heir.machine.failures] == [(2, "killed", 102)]


def test_a_worker_without_a_seat_is_ended(monkeypatch: pytest.MonkeyPatch, left: Path) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(leader_module, "end_actor", ended.append)
    heir = Heir(left, 0, 1, 2, 3)
    other = Actor()
    heir.living.append((other, WorkerStatus(heir.living[0][1].info, None, None)))
    monkeypatch.setattr(leader_module, "find_workers", lambda run: heir.living)
    heir._begin()
    assert ended == [other]
