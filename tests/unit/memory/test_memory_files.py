"""The memory tier's files and copies without ranks: names, locks, leftovers, senders, choices."""

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from stand_in_clock import StandInClock, wait_until

from raypp.errors import CheckpointError
from raypp.records import Coordinates, Event, Seat
from raypp.stages.pipeline.agreement import SnapshotState
from raypp.state.checkpoint.ranged_reads import fetch_ranges
from raypp.state.checkpoint.snapshot import SnapshotBuffer
from raypp.state.checkpoint.state import slice_of
from raypp.state.memory import tier as tier_module
from raypp.state.memory.files import (
    DIRECTORY_VARIABLE,
    LIMIT_VARIABLE,
    SlotName,
    keep_run,
    keeper,
    list_slots,
    parse_name,
    remove_dead,
    remove_run,
    room,
)
from raypp.state.memory.peer import CopyReceiver, CopySender, partner_of
from raypp.state.memory.rank_slots import RunLife
from raypp.state.memory.restore import choose
from raypp.state.memory.slot import Slot, reading
from raypp.state.memory.tier import MemoryTier, SnapshotCosts
from raypp.storage import rate_limit
from raypp.storage.rate_limit import Pace

NAME = SlotName("a-run", "0123456789ab", 3, 1, "own", 0)
SIZE = 100_000


class Collected:
    def __init__(self, events: list[Event]) -> None:
        self.event = events.append

    def phase(self, *_: Any) -> None: ...


def about(name: SlotName = NAME) -> dict[str, Any]:
    return {
        "run": name.run, "life": name.life, "job": "0" * 16, "layout": "1" * 16, "mesh": [1, 1, 1, 1, 1],
        "attempt": name.attempt, "rank": name.rank, "committed": -1, "keeper": keeper(),
    }  # fmt: skip


def sealed(directory: Path, name: SlotName = NAME, step: int = 7, fill: int = 5) -> Slot:
    """Returns a complete snapshot, open: an object of a tensor, and another of one number."""
    slot = Slot.create(directory, name)
    slot.begin(name, about(name))
    weights = slice_of("w", torch.full((SIZE,), fill, dtype=torch.uint8))
    snapshot = SnapshotBuffer(slot.memory).take([weights], [slice_of("copy", torch.ones(1))])
    slot.seal(snapshot, step, '{"data_position":null}')
    return slot


def intact(path: Path) -> bool:
    """Reads a snapshot as a restart does, every byte."""
    try:
        with reading(path, parse_name(path.name) or NAME) as stored:
            wanted = {file.record.key: [(0, file.header.entries[-1].end)] for file in stored.files}
            return sum(held.size for held in fetch_ranges(stored.files, wanted).values()) == SIZE + 4
    except CheckpointError as error:
        assert "rank 1's snapshot of step 7" in str(error)
        return False


def test_a_name_says_whose_snapshot_it_is_and_nothing_else_is_taken_for_one() -> None:
    for step in (None, 0, 17):
        name = SlotName("kjv-pp2", "0123456789ab", 3, 12, "copy", 1, step)
        assert parse_name(name.file_name()) == name
    for text in ("raypp.x", "raypp.../etc.0123456789ab.attempt-1.rank-0.own-0.step-1", NAME.file_name() + "x"):
        assert parse_name(text) is None


def test_a_snapshot_is_private_and_reads_back_and_any_changed_byte_is_noticed(tmp_path: Path) -> None:
    slot = sealed(tmp_path)
    path = slot.path
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.name.endswith(".step-7")
    slot.close()
    assert intact(path) and intact(path)
    whole = path.read_bytes()
    tail_at = whole.index(b'{"__metadata__"')
    second = -(-SIZE // 64) * 64
    for at in (3, 40, 4096, 4096 + SIZE - 1, 4096 + second, tail_at + 5):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert not intact(path), at


def test_an_object_of_a_snapshot_is_that_of_a_checkpoint(tmp_path: Path) -> None:
    """With the header before the data, any tool reads it."""
    slot = sealed(tmp_path)
    slot.close()
    with reading(slot.path, slot.name) as stored:
        (begin, size, header), _ = stored.control["objects"]
        assert stored.data is not None
        tensors = load(stored.tail[:header] + bytes(stored.data[begin : begin + size]))
    assert tensors["w"].tolist() == [5] * SIZE


def test_a_file_that_is_being_written_is_no_snapshot_also_when_its_writer_dies(tmp_path: Path) -> None:
    slot = sealed(tmp_path)
    slot.begin(NAME, {"rank": 1})
    slot.close()
    ((name, path),) = list_slots(tmp_path)
    assert name.step is None
    # Even under a complete snapshot's name.
    path = path.rename(path.with_name(NAME.file_name().replace("writing", "step-7")))
    again = Slot.open(path, parse_name(path.name) or NAME)
    assert again is not None and again.read() is None
    again.close()


def test_a_closed_snapshot_is_free_also_while_somebody_keeps_its_memory(tmp_path: Path) -> None:
    slot = sealed(tmp_path)
    kept = slot.memory(SIZE)
    slot.close()
    assert remove_run(NAME.life, tmp_path) == [slot.path.name] and int(kept[0]) == 5


def test_a_snapshot_that_is_written_is_in_use_and_one_that_was_removed_is_gone(tmp_path: Path) -> None:
    slot = sealed(tmp_path)
    for why in ("is in use", "is gone"):
        with pytest.raises(CheckpointError, match=f"snapshot of step 7.*{why}"), reading(slot.path, slot.name):
            pass
        if why == "is in use":
            slot.close()
            assert intact(slot.path)
            slot.path.unlink()


def test_a_slow_reader_does_not_own_a_file(tmp_path: Path) -> None:
    """Each rank that starts on a node reads every control block, under a shared lock."""
    slot = sealed(tmp_path)
    path = slot.path
    slot.close()
    with path.open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        threading.Timer(0.3, fcntl.flock, (reader, fcntl.LOCK_UN)).start()
        again = Slot.open(path, parse_name(path.name) or NAME)
        assert again is not None
        assert Slot.open(path, parse_name(path.name) or NAME) is None  # an owner is not waited for
        again.close()


def test_a_state_that_could_not_be_saved_outlives_its_cluster_until_its_run_goes_on(tmp_path: Path) -> None:
    slot = sealed(tmp_path)
    slot.close()
    os.utime(slot.path, (0, 0))
    keep_run(NAME.life, tmp_path)
    assert remove_dead(tmp_path) == [] and intact(slot.path)
    assert keep_run("f" * 12, tmp_path) is None and remove_run(NAME.life, tmp_path) == [slot.path.name]
    slot = sealed(tmp_path)
    slot.close()
    os.utime(slot.path, (0, 0))
    assert remove_dead(tmp_path) == [slot.path.name], "any other is forgotten after an hour"


def test_files_of_others_and_links_are_left_alone(tmp_path: Path) -> None:
    goal = tmp_path / "precious"
    goal.write_text("x")
    (tmp_path / NAME.file_name()).symlink_to(goal)
    assert list(list_slots(tmp_path)) == []
    assert remove_run(NAME.life, tmp_path) == [] and goal.exists()


def test_the_room_is_what_is_left_and_what_the_operator_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert room(tmp_path, "a-run", NAME.life) > 10e6
    monkeypatch.setenv(LIMIT_VARIABLE, "1")
    assert room(tmp_path, "a-run", NAME.life) == 1_000_000
    sealed(tmp_path).close()
    assert room(tmp_path, "a-run", NAME.life) == 1_000_000  # the run's own files count as available
    assert 800_000 < room(tmp_path, "other", NAME.life) < 900_000


@pytest.mark.parametrize(
    ("nodes", "partners"),
    [
        ([0, 0, 0], [None, None, None]),
        ([0, 0, 1, 1], [2, 3, 0, 1]),
        ([0, 0, 1, 1, 2, 2], [2, 3, 4, 5, 0, 1]),
        ([0, 0, 0, 1], [3, 3, 3, 0]),
        ([1, 0, 1, 0], [1, 0, 3, 2]),
    ],
)
def test_the_partner_is_the_same_place_on_the_next_node(nodes: list[int], partners: list[int | None]) -> None:
    assert [partner_of(rank, nodes) for rank in range(len(nodes))] == partners


def test_the_partner_is_at_the_same_site_if_that_has_another_node() -> None:
    assert [partner_of(rank, [0, 1, 2, 3], [0, 1, 0, 1]) for rank in range(4)] == [2, 3, 0, 1]
    assert [partner_of(rank, [0, 0, 1, 1], [0, 0, 1, 1]) for rank in range(4)] == [2, 3, 0, 1]
    assert partner_of(1, [0, 0, 0], [0, 1, 1]) is None


def test_a_sender_that_is_closed_while_it_connects_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partner's process hangs: its kernel accepts the connection."""
    real, connects, closes = socket.create_connection, threading.Event(), threading.Event()

    def slowly(*arguments: Any, **options: Any) -> socket.socket:
        connects.set()
        assert closes.wait(60)
        time.sleep(0.2)  # until `close` has looked for a connection
        return real(*arguments, **options)

    with socket.create_server(("127.0.0.1", 0)) as hangs:
        monkeypatch.setattr(socket, "create_connection", slowly)
        sender = CopySender(0, hangs.getsockname(), b"secret")
        slot = sealed(tmp_path)
        sender.offer(slot)
        assert connects.wait(60)
        closes.set()
        assert sender.close(), "its thread still uses the snapshot"
        slot.close()


def test_a_tier_whose_thread_does_not_end_leaves_no_file_of_a_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(tier_module, "_CLOSE_S", 0.1)
    seat = Seat("a-run", 1, 0, 1, Coordinates(), Coordinates(1, 1, 1, 1, 1))
    events: list[Event] = []
    tier = MemoryTier(RunLife("a-run", NAME.life, "0" * 16), seat, 1, Collected(events))
    tier.start([0], [None], 0, None, torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], 0.1), -1)
    goes_on, busy, done = threading.Event(), threading.Event(), threading.Event()

    def long_job() -> None:
        tier._prepare(SIZE)
        busy.set()
        assert goes_on.wait(60)
        done.set()
        raise OSError("its file is gone")

    tier._jobs.put(long_job)
    assert busy.wait(60) and list(tmp_path.iterdir())
    tier.leave(None, None, None)
    assert not list(tmp_path.iterdir())
    goes_on.set()
    tier._worker.join(60)
    assert done.is_set() and [event.kind for event in events if event.kind == "memory_tier_off"] == []


@pytest.mark.parametrize("restored", [16, 18])
def test_the_partner_gets_the_snapshot_of_this_attempt_or_the_restored_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receiver: tuple[CopyReceiver, list[Slot]], restored: int
) -> None:
    """A file of another attempt holds another step 18."""
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    receives, copies = receiver
    seat = Seat("a-run", 3, 0, 2, Coordinates(), Coordinates(1, 1, 2, 1, 1))
    tier = MemoryTier(RunLife("a-run", NAME.life, "0" * 16, "1" * 16, b"secret"), seat, 2, Collected([]))

    def own(attempt: int, step: int) -> Slot:
        return sealed(tmp_path, replace(NAME, attempt=attempt, rank=0, number=attempt), step, fill=attempt)

    begun = own(1, restored)
    addresses = [("127.0.0.1", 1), ("127.0.0.1", receives.port)]
    tier.start([0, 1], addresses, restored, begun, torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], 0.1), -1)
    for slot in [own(2, 18)] + [own(3, 18)] * (restored == 16):
        tier._slots.add(slot)
    tier._asked, tier._taken = True, 18
    agreed = SnapshotState(every=2, own=18, arrived=-1, trouble=0, unready=False)
    tier.step_begins(19, agreed, lambda: ([], []), lambda: "{}")
    wait_until(lambda: bool(copies) and copies[0].step == 18)
    assert int(copies[0].memory(SIZE)[0]) == (3 if restored == 16 else 1)
    tier.close(delete=True)


def test_the_newest_step_that_every_rank_has_is_chosen() -> None:
    two = ([2, 1, 1, 1, 1], "1")
    both = [[2, 5, 0, -1, *two], [2, 5, 1, -1, *two], [2, 6, 0, -1, *two]]
    best, _ = choose([both, both], -1)
    assert best is not None and (best.step, best.attempt, best.source(1, 1)) == (5, 2, 1)
    # On another node: from a rank that sees it.
    best, _ = choose([both, []], -1)
    assert best is not None and best.source(1, 1) == 0
    assert choose([both, both], 5) == (None, "rank 1's snapshot of step 6 is in no memory")
    assert choose([both, both], 6) == (None, "no snapshot in memory is newer")
    assert choose([[], []], 6) == (None, "memory has no snapshot")


def test_snapshots_of_two_attempts_are_never_mixed() -> None:
    two = ([2, 1, 1, 1, 1], "1")
    assert choose([[[1, 5, 0, -1, *two]], [[2, 5, 1, -1, *two]]], -1)[0] is None


def test_of_replicas_one_suffices_unless_it_turned_out_to_lack_something() -> None:
    """2 stages × 2 replicas: ranks 0 and 1 are the first stage."""
    mesh = ([2, 2, 1, 1, 1], "1")
    one_each = [[1, 5, 1, -1, *mesh], [1, 5, 2, -1, *mesh]]
    best, _ = choose([one_each], -1)
    assert best is not None and best.missing == [0, 3]
    assert choose([one_each], -1, {(5, 1)}) == (None, "no snapshot in memory is newer")
    one_stage = [[1, 5, 0, -1, *mesh], [1, 5, 1, -1, *mesh]]
    assert choose([one_stage], -1) == (None, "the snapshots of ranks [2, 3] of step 5 are in no memory")


def test_snapshots_from_beyond_a_commit_that_is_gone_are_not_used() -> None:
    """A user who removes the newest checkpoints wants to go back."""
    seen = [[[1, 25, 0, 20, [1, 1, 1, 1, 1], "1"]]]
    assert choose(seen, 20)[0] is not None
    assert choose(seen, 10) == (None, "step 20 was committed but is gone: snapshots taken after it are not used")


@pytest.mark.parametrize(
    ("snapshot_s", "step_s", "every"),
    [(0.001, 0.1, 1), (0.002, 0.1, 1), (0.0021, 0.1, 2), (0.5, 1.0, 25), (1.0, 0.0, 1)],
)
def test_snapshots_are_as_rare_as_two_percent_of_the_time_asks_for(
    snapshot_s: float, step_s: float, every: int
) -> None:
    costs = SnapshotCosts()
    assert costs.every() == 1
    for _ in range(3):
        costs.snapshots.append(snapshot_s)
        if step_s:
            costs.steps.append(step_s)
    assert costs.every() == every


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[tuple[CopyReceiver, list[Slot]]]:
    there = tmp_path / "there"
    there.mkdir()
    slots: list[Slot] = []

    def place(owner: int, size: int) -> Slot:
        if not slots:
            slots.append(Slot.create(there, SlotName("a-run", "0123456789ab", 3, owner, "copy", 0)))
        return slots[0]

    receiver = CopyReceiver("127.0.0.1", b"secret", 2, place)
    yield receiver, slots
    receiver.close()
    for slot in slots:
        slot.close(delete=True)


@contextlib.contextmanager
def sending(folder: Path, to: CopyReceiver, *more: Any, secret: bytes = b"secret") -> Iterator[tuple[CopySender, Slot]]:
    slot, sender = sealed(folder), CopySender(1, ("127.0.0.1", to.port), secret, *more)
    try:
        sender.offer(slot)
        yield sender, slot
    finally:
        assert sender.close()
        slot.close(delete=True)


def test_a_copy_arrives_whole_and_says_so(receiver: tuple[CopyReceiver, list[Slot]], tmp_path: Path) -> None:
    server, slots = receiver
    with sending(tmp_path, server) as (sender, slot):
        wait_until(lambda: sender.arrived == 7)
        assert slots[0].step == 7
        assert torch.equal(slots[0].memory(SIZE), slot.memory(SIZE))


def test_copies_keep_to_the_cap_that_uploads_have(
    receiver: tuple[CopyReceiver, list[Slot]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = StandInClock()
    monkeypatch.setattr(rate_limit, "time", clock)
    server, slots = receiver
    cap = Pace(2 * SIZE)
    cap.take(SIZE)  # half a second of an upload, for which the copy waits
    begun = clock.now
    with sending(tmp_path, server, cap) as (sender, _):
        wait_until(lambda: sender.arrived == 7)
        last_piece = SIZE % cap.piece_bytes
        assert clock.now == pytest.approx(begun + 0.5 + (SIZE - last_piece) / (2 * SIZE))
        assert slots[0].read() is not None


def test_a_copy_under_way_is_given_up_at_once(receiver: tuple[CopyReceiver, list[Slot]], tmp_path: Path) -> None:
    server, slots = receiver
    with sending(tmp_path, server, Pace(SIZE / 60)) as (sender, _):
        wait_until(lambda: bool(slots))
    assert sender.arrived is None


def test_whoever_does_not_know_the_secret_places_nothing(
    receiver: tuple[CopyReceiver, list[Slot]], tmp_path: Path
) -> None:
    server, slots = receiver
    with sending(tmp_path, server, secret=b"guess") as (sender, _):
        wait_until(lambda: bool(sender.error))
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            stranger.settimeout(60)
            assert len(stranger.recv(4096)) == 32  # the random bytes
            stranger.sendall(json.dumps({"rank": 1}).encode() * 100)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(4096) == b""  # the receiver closed the connection
        assert sender.arrived is None and not slots


def test_a_rank_that_trains_nothing_has_an_empty_snapshot(tmp_path: Path) -> None:
    slot = Slot.create(tmp_path, NAME)
    assert slot.memory(0).numel() == 0
    assert slot.memory(SIZE).numel() == SIZE
    slot.close()
