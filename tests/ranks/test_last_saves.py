"""The last save fails: the ranks end with an error, and the next attempt saves what they left."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from collecting_reporter import CollectingReporter
from harness import run_in_turn, run_ranks
from local_run import PATIENCE_S, LocalRun
from test_memory_tier import STEPS, assert_ends_as, document
from training import thinned

from raypp.control.worker import kind_and_cause
from raypp.errors import RayppError
from raypp.job.load import parse_job
from raypp.planning.decide import decide
from raypp.ports import port_is_free
from raypp.rank.fault_injection import VARIABLE
from raypp.rank.joining import process_group
from raypp.rank.joining.abort import cut_connections
from raypp.rank.own_seat import local_seat
from raypp.rank.rank import run_rank
from raypp.records import Event, Requests
from raypp.retry import Backoff
from raypp.state.checkpoint.commit import list_checkpoints
from raypp.state.checkpoint.save import _OUTCOME, CheckpointSaver
from raypp.state.memory.files import DIRECTORY_VARIABLE, list_slots
from raypp.storage.directory import DirectoryStore

SLOW = "slow@forward:seconds=0.05"
"""Gives each snapshot the time to be complete before the next step begins."""


def newest_in(folder: Path) -> int:
    """Returns the newest step of which both ranks left a snapshot; 0 without one."""
    left = {(name.rank, name.step) for name, _ in list_slots(folder) if name.step is not None}
    return max((step for rank, step in left if {(0, step), (1, step)} <= left), default=0)


def reads_late(rank: int, _world: int, port: int) -> None:
    """Makes a rank read the outcome of a save when rank 0 has had the time to end after it."""
    read = CheckpointSaver._learn_outcome

    def wait_and_read(self: CheckpointSaver, step: int) -> None:
        with contextlib.suppress(dist.DistError):  # the server is gone already
            self._announcements.wait_all(step, [_OUTCOME], PATIENCE_S)
        Backoff(1.0, first_s=0.01, longest_s=0.01).wait(lambda: port_is_free(port))
        read(self, step)

    if rank:
        CheckpointSaver._learn_outcome = wait_and_read  # type: ignore[method-assign]


FAULTS = ["disk_full@upload:rank=1", "disk_full@commit:rank=0"]


@pytest.mark.parametrize("fault", thinned(FAULTS, FAULTS[:1]))
def test_a_run_whose_last_save_fails_has_failed_and_its_next_attempt_saves_what_is_in_memory(
    fault: str, tmp_path: Path, shared_memory: Any, undisturbed: Any
) -> None:
    folder = shared_memory()
    run = LocalRun(document(), tmp_path, [folder] * 2, [0, 0], {VARIABLE: f"{SLOW}; {fault}"}, prepare=reads_late)
    first = run.attempt_once()
    assert not first.results and first.steps == list(range(1, STEPS + 1)), first
    guilty = 1 if "upload" in fault else 0
    assert first.errors[guilty].startswith(f"NotSavedError: the last checkpoint, of step {STEPS}, was not saved: ")
    assert first.errors[1 - guilty].startswith(f"PeerNotSavedError: the last checkpoint, of step {STEPS}, was not")
    assert all("No space left on device" in error for error in first.errors.values()), first.errors
    newest = newest_in(folder)
    assert newest > STEPS // 2, "the last copies of the state"
    second = run.attempt_once()
    assert second.restored() == f"from memory: step {newest} on all 2 ranks; nothing is committed"
    assert [result.checkpoint_step for result in second.results.values()] == [STEPS, STEPS]
    assert_ends_as(undisturbed, second, run)


@pytest.mark.gate
def test_without_snapshots_the_next_attempt_trains_again_from_the_newest_checkpoint(
    tmp_path: Path, undisturbed: Any
) -> None:
    environment = {VARIABLE: f"disk_full@upload:rank=0,step={STEPS}"}
    run = LocalRun(document(memory_tier=False, every_steps=3), tmp_path, [tmp_path] * 2, [0, 0], environment)
    first = run.attempt_once()
    assert sorted(first.errors) == [0, 1] and not first.results, first
    second = run.attempt_once()
    assert second.of_kind("resumed")[-1].step == 6 and sorted(second.results) == [0, 1]
    assert_ends_as(undisturbed, second, run)


def stopped_life(
    rank: int,
    world: int,
    port: int,
    job: dict[str, Any],
    attempt: int,
    stop_at: int,
    save: bool,
    memory: str,
    fault: str,
) -> tuple[str, str]:
    """Returns how the rank ended: its failure's kind and text, or `stopped` and the step."""
    os.environ.update({DIRECTORY_VARIABLE: memory, VARIABLE: fault})
    reads_late(rank, world, port)
    parsed = parse_job(job)
    seat = local_seat(rank, world, port, parsed, attempt=attempt)
    operator = CollectingReporter(lambda asked: Requests(stop=asked >= stop_at, save_before_stop=save))
    try:
        result = run_rank(decide(parsed), seat, operator)
    except RayppError as error:
        return kind_and_cause(error)
    assert result.stopped
    return "stopped", str(result.checkpoint_step)


@pytest.fixture
def life(tmp_path: Path, shared_memory: Any) -> Iterator[Any]:
    folder = shared_memory()
    job = document(url=str(tmp_path), every_steps=0)
    yield lambda *how: (
        run_ranks(2, stopped_life, job, *how[:3], str(folder), f"{SLOW}; {how[3]}"),
        newest_in(folder),
        len(list(folder.iterdir())),
    )


@pytest.mark.parametrize("fault", thinned(FAULTS, [], FAULTS[:1]))
def test_a_stop_whose_save_fails_is_an_error_and_the_next_saves_at_once(fault: str, life: Any, tmp_path: Path) -> None:
    ends, newest, _ = life(1, 5, True, fault)
    assert sorted(kind for kind, _ in ends) == ["disk_full", "lost_peer"]
    assert all("the last checkpoint, of step 4, was not saved" in cause for _, cause in ends)
    assert all("No space left on device" in cause for _, cause in ends), ends
    assert newest == 4, "the state at the stop is in memory, too"
    # It is restored, in no checkpoint, and saved although no step follows.
    assert life(2, 1, True, "") == ([("stopped", "4")] * 2, 0, 0)
    assert [one.step for one in list_checkpoints(DirectoryStore(tmp_path), "remembers")] == [4]


class Mender(CollectingReporter):
    """Makes room in the store once both ranks have said that they wait for it."""

    def __init__(self, rank: int, blocked: Path, stop_at: int) -> None:
        super().__init__(lambda asked: Requests(stop=asked >= stop_at))
        self.rank, self.blocked = rank, blocked

    def event(self, event: Event) -> None:
        super().event(event)
        if "waits_s" in event.details:
            said = [self.blocked.with_suffix(f".waits-{rank}") for rank in range(2)]
            said[self.rank].touch()
            if all(path.exists() for path in said):
                self.blocked.unlink(missing_ok=True)


def mended_life(
    rank: int, world: int, port: int, job: dict[str, Any], stop_at: int, blocked: str
) -> tuple[int | None, list[str]]:
    parsed, mender = parse_job(job), Mender(rank, Path(blocked), stop_at)
    result = run_rank(decide(parsed), local_seat(rank, world, port, parsed), mender)
    return result.checkpoint_step, [event.kind for event in mender.events if event.kind.startswith("save_")]


@pytest.mark.parametrize("stop_at", thinned([99, 5], [], [5]))
def test_at_the_end_and_at_a_stop_the_ranks_wait_for_a_store_that_takes_no_writes(tmp_path: Path, stop_at: int) -> None:
    job, last = document(url=str(tmp_path), every_steps=2), min(STEPS, stop_at - 1)
    blocked = tmp_path / "remembers"  # a file where the store needs a folder
    blocked.write_text("")
    ends = run_ranks(2, mended_life, job, stop_at, str(blocked))
    assert [step for step, _ in ends] == [last, last]
    assert ends[0][1] == ends[1][1] == ["save_failed"] * 2, "that saves fail, and that the last one waits"
    assert [one.step for one in list_checkpoints(DirectoryStore(tmp_path), "remembers")] == [last]


def test_a_stop_without_a_save_needs_no_checkpoint(life: Any) -> None:
    assert life(1, 5, False, "disk_full@upload:rank=1,attempt=0") == ([("stopped", "None")] * 2, 0, 0)


def leaves(rank: int, world: int, port: int, how: str) -> None:
    process_group._LEAVE_S = 0.5 if how == "frozen" else 3600.0
    seat = local_seat(rank, world, port, parse_job(document()))
    with process_group.joined(seat, 60.0):
        if rank == 0:
            if how == "told to leave":
                threading.Timer(0.2, cut_connections, (port,)).start()
            process_group.leave_together(seat)
        elif how != "gone":
            assert Backoff(PATIENCE_S, first_s=0.01, longest_s=0.01).wait(lambda: port_is_free(port))


def test_who_serves_the_rendezvous_waits_neither_for_the_gone_nor_when_asked_to_leave_nor_for_ever() -> None:
    run_in_turn(2, leaves, [("gone",), ("told to leave",), ("frozen",)])
