"""One attempt from devices to end: who is started, kept, replaced and ended, and when."""

from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from stand_in_clock import StandInClock
from stand_in_workers import Actor, Devices, StandIns, Workers, info_of, stand_still

from raypp.control import attempt as attempt_module
from raypp.control import rank_ends
from raypp.control.attempt import AttemptPhase
from raypp.control.machine import AttemptEnded, Finished, NoResources, RankFailed, Seated
from raypp.control.process_evidence import Death
from raypp.control.protocol import WorkerStatus
from raypp.control.worker_group import Member
from raypp.errors import DataError
from raypp.failure_kinds import FailureKind
from raypp.job.load import parse_job
from raypp.planning.decide import decide
from raypp.records import Coordinates, RankResult, Seat

DONE = [RankResult(rank, 9, False, 9) for rank in range(4)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StandInClock:
    return stand_still(monkeypatch, at=1000)


@pytest.fixture
def attempt(clock: StandInClock) -> StandIns:
    """Four ranks, two on each of two nodes."""
    job = parse_job({"name": "r", "mesh": {"pp": 2, "fsdp": 2}})
    return StandIns(job, 3, Workers(), Devices(), lambda batch: None, lambda compiler, network: decide(job))


def starting(attempt: StandIns, reused: int | None = None) -> StandIns:
    """The devices are there, and in the bundle `reused` a process of an earlier attempt."""
    if reused is not None:
        attempt.workers.seated[reused] = Member(Actor(), "12"[reused // 2])
    attempt.launch()
    assert attempt.poll(0.0) == []
    if reused is not None:
        attempt.workers.seated[reused].fresh = False
    assert attempt.phase is AttemptPhase.STARTING
    return attempt


def running(attempt: StandIns) -> StandIns:
    starting(attempt)
    for rank in attempt.ranks:
        attempt.says(rank)
    assert attempt.poll(0.0) == [Seated()]
    for rank in attempt.ranks:
        rank.state = "step"
    return attempt


def failures(events: list[Any]) -> list[tuple[int, str]]:
    assert all(isinstance(event, RankFailed) for event in events)
    return [(event.failure.rank, event.failure.kind) for event in events]


def test_ranks_get_their_seats_when_all_have_said_where_they_run(attempt: StandIns) -> None:
    starting(attempt)
    for rank in attempt.ranks[:3]:
        attempt.says(rank)
    assert attempt.poll(0.0) == [] and all(rank.seat is None for rank in attempt.ranks)
    attempt.says(attempt.ranks[3])
    assert attempt.poll(0.0) == [Seated()] and attempt.phase is AttemptPhase.RUNNING
    seats = [rank.seat for rank in attempt.ranks]
    assert all(seat is not None and (seat.attempt, seat.world_size, seat.master_port) == (3, 4, 2000) for seat in seats)
    assert len({seat.secret for seat in seats if seat}) == 1
    # Stages are on different nodes, and fsdp stays inside one.
    assert [(rank.node_id, rank.coordinates.pp) for rank in attempt.ranks] == [("1", 0), ("1", 0), ("2", 1), ("2", 1)]
    assert all([call[0] for call in rank.actor.calls] == ["info", "begin"] for rank in attempt.ranks)


def test_a_mesh_without_room_is_given_up_when_waiting_makes_no_sense(attempt: StandIns) -> None:
    attempt.placement.full = "the cluster cannot hold it"  # type: ignore[attr-defined]
    attempt.launch()
    assert attempt.poll(0.0) == [NoResources("the cluster cannot hold it")]


def test_a_new_process_is_given_minutes_to_start_and_then_the_attempt_fails(
    attempt: StandIns, clock: StandInClock
) -> None:
    starting(attempt)
    for rank in attempt.ranks[1:]:
        attempt.says(rank)
    clock.advance(179)
    assert attempt.poll(0.0) == []
    clock.advance(2)
    (failed,) = attempt.poll(0.0)
    assert failures([failed]) == [(0, "unknown")] and "did not start within 180 s" in failed.failure.cause
    assert attempt.workers.done[-1] == ("kill", attempt.ranks[0].bundle)


def test_a_process_of_an_earlier_attempt_that_does_not_answer_is_replaced(
    attempt: StandIns, clock: StandInClock
) -> None:
    starting(attempt, reused=0)
    clock.advance(9)
    assert attempt.poll(0.0) == [] and ("kill", 0) not in attempt.workers.done
    clock.advance(2)
    assert attempt.poll(0.0) == []
    assert attempt.workers.done[-2:] == [("kill", 0), ("start", 0)]


def test_a_process_that_died_between_two_attempts_is_replaced_and_that_is_no_failure(attempt: StandIns) -> None:
    starting(attempt, reused=0)
    attempt.says(next(rank for rank in attempt.ranks if rank.bundle == 0), ActorDiedError())
    assert attempt.poll(0.0) == []
    assert attempt.workers.done[-2:] == [("kill", 0), ("start", 0)]


def test_a_new_process_that_dies_before_it_has_a_seat_has_failed(attempt: StandIns) -> None:
    starting(attempt)
    attempt.says(attempt.ranks[2], ActorDiedError())
    assert failures(attempt.poll(0.0)) == [(2, "killed")]


def test_what_is_wrong_with_a_node_is_reported_in_the_words_of_the_node(attempt: StandIns) -> None:
    starting(attempt)
    attempt.says(attempt.ranks[1], RayTaskError("info", "…", DataError("torch is too old")))
    (failed,) = attempt.poll(0.0)
    assert (failed.failure.rank, failed.failure.kind, failed.failure.cause) == (1, "user_error", "torch is too old")


def test_a_process_that_runs_on_another_node_than_its_bundle_gets_no_seat(attempt: StandIns) -> None:
    starting(attempt)
    for rank in attempt.ranks[:3]:
        attempt.says(rank)
    attempt.says(attempt.ranks[3], info_of(0))
    (failed,) = attempt.poll(0.0)
    assert failed.failure.rank == 3 and "on another node" in failed.failure.cause


def test_an_attempt_is_over_when_every_rank_has_returned(attempt: StandIns) -> None:
    running(attempt)
    for rank in (0, 1, 2):
        attempt.tells(rank, DONE[rank])
    assert attempt.poll(0.0) == []
    attempt.tells(3, RankResult(3, 11, True, 11))
    assert attempt.poll(0.0) == [Finished(stopped=True, step=11)]
    attempt.end(keep=False)
    assert attempt.poll(0.0) == [AttemptEnded()] and [rank.state for rank in attempt.ranks] == ["done"] * 4


def lost_peer(attempt: StandIns, number: int) -> Any:
    return attempt.ranks[number].failure(FailureKind.LOST_PEER, "the connection to pp1 broke")


@pytest.mark.parametrize("caused", [True, False])
def test_ranks_that_only_lost_a_peer_wait_a_second_for_the_cause(
    attempt: StandIns, clock: StandInClock, caused: bool
) -> None:
    running(attempt)
    attempt.tells(0, lost_peer(attempt, 0))
    assert attempt.poll(0.0) == []
    clock.advance(0.5 if caused else 1.1)
    if caused:
        attempt.tells(2, ActorDiedError())
    assert failures(attempt.poll(0.0)) == [(0, "lost_peer"), *[(2, "killed")] * caused]


def test_survivors_are_asked_to_leave_and_keep_their_processes_if_they_do_in_time(
    attempt: StandIns, clock: StandInClock
) -> None:
    """As on a busy machine, where leaving takes seconds."""
    running(attempt)
    attempt.tells(2, ActorDiedError())
    assert failures(attempt.poll(0.0)) == [(2, "killed")]
    attempt.end(keep=True)
    assert [("leave", 3) in rank.actor.calls for rank in attempt.ranks] == [True, True, False, True]
    clock.advance(9)
    for rank in (0, 1, 3):
        assert attempt.poll(0.0) == []
        attempt.tells(rank, lost_peer(attempt, rank))
    assert attempt.poll(0.0) == [AttemptEnded()]
    assert sorted(attempt.workers.seated) == sorted(rank.bundle for rank in attempt.ranks if rank.rank != 2)


@pytest.mark.parametrize("explained", [True, False])
def test_a_survivor_that_does_not_leave_in_time_is_ended_and_has_failed_if_nothing_else_has(
    attempt: StandIns, clock: StandInClock, explained: bool
) -> None:
    running(attempt)
    attempt.tells(2, ActorDiedError() if explained else lost_peer(attempt, 2))
    attempt.poll(0.0)
    clock.advance(2)
    attempt.poll(0.0)
    attempt.end(keep=True)
    for rank in [0, 1] if explained else [0]:
        attempt.tells(rank, lost_peer(attempt, rank))
    clock.advance(11)
    events = attempt.poll(0.0)
    silent = [3] if explained else [1, 3]
    assert failures(events) == ([] if explained else [(1, "unknown"), (3, "unknown")])
    killed = [("kill frozen", attempt.ranks[rank].bundle) for rank in silent]
    assert [one for one in attempt.workers.done if one[0] == "kill frozen"] == killed
    for rank in silent:
        attempt.tells(rank, ActorDiedError())
    assert attempt.poll(0.0) == [AttemptEnded()], "whom the attempt ended has not failed"


def test_ranks_that_still_import_get_as_long_as_a_new_process_would_need(
    attempt: StandIns, clock: StandInClock
) -> None:
    running(attempt)
    for rank in attempt.ranks:
        rank.state = "starting"
    attempt.tells(2, ActorDiedError())
    attempt.poll(0.0)
    attempt.end(keep=True)
    clock.advance(39)
    assert attempt.poll(0.0) == []
    for rank in (0, 1, 3):
        attempt.tells(rank, lost_peer(attempt, rank))
    assert attempt.poll(0.0) == [AttemptEnded()] and len(attempt.workers.seated) == 3


def test_a_rank_that_raised_loses_its_process_and_one_that_hangs_is_ended_from_outside(attempt: StandIns) -> None:
    running(attempt)
    attempt.tells(1, attempt.ranks[1].failure(FailureKind.RAISED, "the sun is too bright"), reusable=False)
    assert failures(attempt.poll(0.0)) == [(1, "raised")]
    attempt.end(keep=True, suspects={3})
    ended = [one for one in attempt.workers.done if one[0] != "start"]
    assert ended == [("kill", attempt.ranks[1].bundle), ("kill frozen", attempt.ranks[3].bundle)]
    assert [("leave", 3) in rank.actor.calls for rank in attempt.ranks] == [True, False, True, False]


def test_a_cause_that_is_found_while_the_attempt_ends_is_reported(attempt: StandIns, clock: StandInClock) -> None:
    running(attempt)
    attempt.tells(0, lost_peer(attempt, 0))
    attempt.poll(0.0)
    clock.advance(2)
    assert failures(attempt.poll(0.0)) == [(0, "lost_peer")]
    attempt.end(keep=True)
    attempt.tells(1, lost_peer(attempt, 1))
    attempt.tells(2, ActorDiedError())
    assert failures(attempt.poll(0.0)) == [(2, "killed")]


def test_processes_of_a_lost_node_hold_up_the_end_for_seconds_only(attempt: StandIns, clock: StandInClock) -> None:
    running(attempt)
    attempt.end(keep=False)
    assert [one for one in attempt.workers.done if one[0] == "kill"] == [
        ("kill", rank.bundle) for rank in attempt.ranks
    ]
    clock.advance(14)
    assert attempt.poll(0.0) == []
    clock.advance(2)
    assert attempt.poll(0.0) == [AttemptEnded()]


def test_an_attempt_that_is_ended_before_it_has_begun_keeps_its_processes(attempt: StandIns) -> None:
    starting(attempt)
    attempt.end(keep=True)
    assert attempt.poll(0.0) == [AttemptEnded()]
    assert len(attempt.workers.seated) == 4 and ("leave", 3) not in attempt.ranks[0].actor.calls


def test_a_restarted_controller_adopts_the_living_and_reports_the_dead(
    attempt: StandIns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        attempt_module, "death_during_controller_outage", lambda rank: Death(FailureKind.KILLED, f"pid {rank.pid}")
    )
    living = []
    for number in (0, 1, 3):
        seat = Seat("r", 3, number, 4, attempt.mesh.coordinates(number), Coordinates(2, 1, 2, 1, 1))
        living.append((Actor(), WorkerStatus(info_of(number), number, seat)))
    attempt.adopt(living, step=7)
    assert attempt.phase is AttemptPhase.RUNNING
    assert [rank.pid for rank in attempt.ranks] == [100, 101, 0, 103] and sorted(attempt.workers.seated) == [0, 1, 3]
    assert [call[0] for rank in attempt.ranks if rank.actor for call in rank.actor.calls] == ["outcome"] * 3
    (failed,) = attempt.poll(0.0)
    assert (failed.failure.rank, failed.failure.kind, failed.failure.step) == (2, "killed", 7)


def test_a_rank_whose_connection_breaks_is_asked_again(
    attempt: StandIns, clock: StandInClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: list[int] = []
    monkeypatch.setattr(rank_ends, "raylet_death", lambda rank: probed.append(rank.rank))
    running(attempt)
    for _ in range(2):
        for rank in (2, 3):
            attempt.tells(rank, ActorUnavailableError("the connection broke", None))
        assert attempt.poll(0.0) == []
    assert probed == [2], "a silent host costs seconds: it is probed once for all its ranks"
    assert attempt.ranks[3].actor.calls[-2:] == [("outcome", 3, 30.0)] * 2
    clock.advance(3)
    attempt.tells(3, ActorUnavailableError("the connection broke", None))
    assert attempt.poll(0.0) == [] and probed == [2, 3]


def test_a_rank_whose_raylet_has_ended_is_lost_before_ray_reports_it(
    attempt: StandIns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_ends, "raylet_death", lambda rank: Death(FailureKind.RAYLET_LOST, "the raylet ended"))
    running(attempt)
    attempt.tells(2, ActorUnavailableError("the connection broke", None))
    assert failures(attempt.poll(0.0)) == [(2, "raylet_lost")]
    assert attempt.ranks[2].bundle not in attempt.workers.seated
