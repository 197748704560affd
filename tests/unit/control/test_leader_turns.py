"""A leader turns from an attempt to the next: what it records, asks of the ranks, and ends."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from stand_in_clock import StandInClock
from stand_in_workers import Devices, StandIns, Workers, stand_still

from raypp.control import leader as leader_module
from raypp.control import machine as m
from raypp.control import watchers
from raypp.control.leader import Leader
from raypp.control.protocol import ReportBatch, RunRequest
from raypp.control.recovery.policy import policy_of
from raypp.control.report import reports
from raypp.control.report.reports import Recovery
from raypp.failure_kinds import FailureKind
from raypp.job.load import job_document, parse_job
from raypp.records import Event, RankFailure, RankResult, StepReport
from raypp.state.memory.files import life_of
from raypp.state.run_records.reader import RunReader
from raypp.storage.directory import DirectoryStore

RUN = "turns"


class Led(Leader):
    def __init__(self, folder: Path, **recovery: Any) -> None:
        sections = {
            "name": RUN,
            "mesh": {"pp": 2, "fsdp": 2},
            "checkpoint": {"url": str(folder)},
            "resources": {"device": "cpu"},
            "recovery": recovery,
        }
        super().__init__(RunRequest(RUN, job_document(parse_job(sections)), "one"), None, restarted=False)
        self._workers, self._placement = Workers(), Devices()
        self.reader = RunReader(DirectoryStore(folder), RUN)
        self._numbers = [0] * 4
        self.record.begin(None)
        self._policy = policy_of(self._job.recovery)
        self._apply(m.Start(0, None, shape=self._sizing.largest()))

    def _new_attempt(self, number: int) -> StandIns:
        job = self._sizing.job(self.machine)
        self.record.set_mesh(job.mesh)
        return StandIns(
            job, number, self._workers, self._placement, self.reports.add, partial(self._decide, job, number)
        )

    def _end_processes(self) -> None:
        for bundle in list(self._workers.seated):
            self._workers.kill(bundle)

    @property
    def attempt(self) -> StandIns:
        assert isinstance(self._attempt, StandIns)
        return self._attempt

    @property
    def done(self) -> list[tuple[str, int]]:
        """What was done to the workers, by bundle, apart from their starts."""
        assert isinstance(self._workers, Workers)
        return [one for one in self._workers.done if one[0] != "start"]

    def seat(self) -> None:
        """Starts the next attempt, until every rank has its seat."""
        self._turn()
        self._numbers = [0] * 4
        for rank in self.attempt.ranks:
            self.attempt.says(rank)
        self._turn()
        assert self.machine.phase is m.RunPhase.RUNNING

    def hear(self, rank: int, phase: str = "step 9", idle_s: float = 0.0, **more: Any) -> None:
        self._numbers[rank] += 1
        self.reports.report(ReportBatch(self.machine.attempt, rank, self._numbers[rank], phase, idle_s, **more))

    def end(self) -> None:
        """Lets the failure that came end the attempt, and all other ranks leave it."""
        self._turn()
        self.all_leave()
        self._turn()

    def stand(self, clock: StandInClock, phase: str, *ranks: int) -> None:
        """After step 9 these ranks stay in a phase, until that ends the attempt."""
        self.step_done(9)
        self._turn()
        for seconds in range(1, 10):
            clock.advance(1)
            for rank in ranks:
                self.hear(rank, phase, float(seconds))
            self._turn()
            if self.machine.phase is not m.RunPhase.RUNNING:
                break

    def step_done(self, step: int) -> None:
        report = StepReport(step, 1.0, 1.0, 10, 10, 0.1, 100.0, self.machine.attempt)
        self.hear(0, f"step {step}", steps=(report,))

    def committed(self, step: int) -> None:
        self.hear(0, events=(Event("committed", f"step {step}", attempt=self.machine.attempt, step=step),))

    def all_leave(self, but: tuple[int, ...] = ()) -> None:
        for rank in self.attempt.ranks:
            if not rank.ended and rank.rank not in but:
                self.attempt.tells(rank.rank, rank.failure(FailureKind.LOST_PEER, "left the attempt, as requested"))

    def events(self, *kinds: str) -> list[Event]:
        self.record.flush()
        return [event for event in self.reader.events() if not kinds or event.kind in kinds]

    def failures(self) -> list[tuple[int | None, str]]:
        return [(event.rank, event.details["kind"]) for event in self.events("rank_failed")]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StandInClock:
    monkeypatch.setattr(watchers, "draining_nodes", dict)
    monkeypatch.setattr(leader_module, "look_after_snapshots", lambda life, keep: None)
    monkeypatch.setattr(watchers, "collect_flight_records", lambda ranks: dict.fromkeys(range(4), ""))
    monkeypatch.setattr(leader_module, "examine_nodes", lambda workers: ({}, "all work"))
    monkeypatch.setattr(watchers, "collect_stacks", lambda ranks, workers, first: {first: "in forward"})
    return stand_still(monkeypatch, leader_module, reports, watchers)


@pytest.fixture
def leader(clock: StandInClock, tmp_path: Path) -> Iterator[Led]:
    led = Led(tmp_path, hang_timeout_s=3)
    yield led
    led.record.close()


def test_a_killed_rank_is_recorded_and_the_next_attempt_starts_with_the_processes_that_are_left(leader: Led) -> None:
    leader.seat()
    leader.committed(5)
    leader.attempt.tells(2, ActorDiedError())
    leader._turn()
    assert leader.machine.phase is m.RunPhase.ENDING
    leader.all_leave()
    leader._turn()
    assert leader._attempt is None and leader.machine.phase is m.RunPhase.LAUNCHING
    (restart,) = leader.events("restarting")
    assert restart.details["kept"] == 3 and "from" in restart.message and "the checkpoint of step 5" in restart.message
    leader.seat()
    assert (leader.machine.attempt, leader.machine.restarts) == (2, 1)
    assert len(leader.events("seated")) == 8
    for rank in range(4):
        leader.attempt.tells(rank, RankResult(rank, 20, False, 20))
    leader._turn()
    leader._turn()
    assert leader.outcome is not None and (leader.outcome.state, leader.outcome.exit_code) == ("SUCCEEDED", 0)
    kinds = [event.kind for event in leader.events() if event.kind != "seated"]
    assert kinds[-5:] == ["committed", "rank_failed", "restarting", "attempt_started", "succeeded"]
    assert not leader._workers.seated and (leader.reader.status() or {})["state"] == "SUCCEEDED"


def test_an_error_that_all_ranks_raise_is_reported_once(leader: Led) -> None:
    leader.seat()
    for rank in leader.attempt.ranks:
        leader.attempt.tells(
            rank.rank, rank.failure(FailureKind.NONFINITE, f"step {7 + (rank.rank == 3)}: the loss is nan")
        )
    leader._turn()
    assert [event.details["cause"] for event in leader.events("rank_failed")] == [
        "step 7: the loss is nan", "step 8: the loss is nan",
    ]  # fmt: skip


def test_a_step_that_is_reported_as_the_run_ends_starts_no_standby(leader: Led) -> None:
    leader.seat()
    for rank in range(4):
        leader.attempt.tells(rank, RankResult(rank, 20, False, 20))
    leader._turn()
    leader.step_done(20)
    leader._turn()
    assert leader.outcome is not None and leader.record.step == 20
    assert isinstance(leader._workers, Workers) and leader._workers.standby_starts == 0


def test_a_rank_that_stands_still_is_named_with_its_stacks_and_its_process_is_ended(
    leader: Led, clock: StandInClock
) -> None:
    leader.seat()
    leader.stand(clock, "step 0B0 waits", 0, 1, 3)
    assert leader.failures() == [(2, "hung")]
    (stacks,) = leader.events("stacks")
    assert (stacks.rank, stacks.details["stacks"]) == (2, "in forward")
    assert leader.done == [("kill frozen", leader.attempt.ranks[2].bundle)]


def test_of_a_hang_of_nobody_all_ranks_are_restarted_and_no_process_is_ended(leader: Led, clock: StandInClock) -> None:
    leader.seat()
    leader.stand(clock, "step sum", 0, 1, 2, 3)
    assert leader.machine.phase is m.RunPhase.ENDING and leader.done == []
    (failed,) = leader.events("rank_failed")
    assert failed.rank is None and failed.details["kind"] == "hung"
    assert failed.message.startswith("all its ranks have been in the sum of loss and norms for ")
    assert failed.message.endswith("torch was built without a flight recorder that knows these collectives")
    leader.all_leave()
    leader._turn()
    (restart,) = leader.events("restarting")
    assert restart.details["kept"] == 4
    clock.advance(60)
    leader._turn()
    leader._turn()
    assert [event.message for event in leader.events("network")] == ["all work"]


@pytest.mark.parametrize("saved", [True, False])
def test_a_rank_that_gets_a_notice_to_end_is_saved_first_if_there_is_time(
    leader: Led, clock: StandInClock, saved: bool
) -> None:
    leader.seat()
    leader.hear(2, events=(Event("preemption_notice", "SIGTERM", attempt=1, rank=2),))
    leader._turn()
    assert leader.reports.save_wanted and leader.failures() == []
    for _ in range(24):
        clock.advance(1)
        leader._turn()
    assert leader.failures() == []
    if saved:
        leader.committed(7)
    clock.advance(0.5 if saved else 2)
    leader._turn()
    leader._turn()
    assert leader.failures() == [(2, "preempted")]
    how = "left after a checkpoint at step 7" if saved else "left without a new checkpoint"
    assert how in leader.events("rank_failed")[0].message
    assert leader.done == [("kill frozen", leader.attempt.ranks[2].bundle)]


def test_a_drained_node_is_left_after_a_save_with_new_devices_and_processes(
    leader: Led, clock: StandInClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader.seat()
    monkeypatch.setattr(watchers, "draining_nodes", lambda: {"2": 0})
    clock.advance(3)
    leader._turn()
    (notice,) = leader.events("preemption_notice")
    assert notice.node == "10.0.0.2" and "drains" in notice.message and leader.reports.save_wanted
    leader.committed(7)
    leader._turn()
    leader._turn()
    assert leader.failures() == [(2, "preempted")]
    leader.all_leave(but=(2,))
    leader.attempt.tells(2, ActorDiedError())
    leader._turn()
    assert leader.machine.phase is m.RunPhase.LAUNCHING and not leader._workers.seated
    assert isinstance(leader._placement, Devices) and leader._placement.removed == 1
    assert leader.machine.history[-1].failures[0].kind is FailureKind.PREEMPTED


def test_a_stop_is_in_the_store_before_the_ranks_learn_of_it(leader: Led, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted controller must know why the ranks ended."""
    leader.seat()
    known: list[bool] = []
    flush = leader.record.flush

    def flushed() -> bool:
        known.append(leader.reports.stop is not None)
        return flush()

    monkeypatch.setattr(leader.record, "flush", flushed)
    leader.reports.request_stop(save=True)
    leader._turn()
    assert known[0] is False and leader.reports.stop is not None and leader.reports.stop.save_before_stop
    leader.reports.request_stop(save=True)
    leader._turn()
    assert len(leader.events("stop_requested")) == 1, "asked again, it is recorded once"


@pytest.mark.parametrize(("kind", "kept"), [(FailureKind.SAVE_FAILED, True), (FailureKind.RAISED, False)])
def test_a_failed_run_keeps_its_snapshots_only_where_they_hold_a_state_that_could_not_be_saved(
    clock: StandInClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: FailureKind, kept: bool
) -> None:
    looked: list[tuple[str, bool]] = []
    monkeypatch.setattr(leader_module, "look_after_snapshots", lambda life, keep: looked.append((life, keep)))
    leader = Led(tmp_path, max_restarts=0)
    leader.seat()
    leader.attempt.tells(0, RankFailure(0, "pp0-fsdp0", "10.0.0.1", 100, kind, "the disk is full"))
    leader.end()
    assert leader.outcome is not None and leader.outcome.state == "FAILED"
    assert looked == [(life_of(leader._store, leader._job), kept)]


def test_the_first_step_after_a_failure_says_where_the_seconds_went(clock: StandInClock) -> None:
    recovery, first = Recovery(), Event("first_step", "step 4 done", step=4, details={"seconds": {"load": 0.5}})
    recovery.over("seated")
    assert recovery.told(first) == first, "no failure was before"
    recovery.was_away(7.0)
    recovery.stepped()
    recovery.was_away(1.5)
    for part, seconds in [("noticed", 2.0), ("noticed", 1.0), ("ended", 2.0), ("seated", 0.25)]:
        clock.now += seconds
        recovery.over(part)
    recovery.stepped()
    told = recovery.told(first)
    parts = "controller away 1.5 s, noticed 2.0 s, ended 3.0 s, seated 0.2 s, load 0.5 s"
    assert told.message == f"step 4 done, 7.2 s after the failed attempt's last: {parts}"
    assert recovery.told(first) == first
