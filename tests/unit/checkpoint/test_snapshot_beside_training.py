"""The copy overlaps with training: it holds the state at the save, whatever the scheduler does."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from collecting_reporter import CollectingReporter
from stand_in_clock import StandInClock, wait_until
from test_save_and_load import RUN, adamw, model, restored, same, same_state, saver, state_of, train
from torch import Tensor, nn

from raypp.rank.optimizers.bf16_weights import Bf16Weights
from raypp.rank.optimizers.muon import Muon
from raypp.rank.optimizers.sgd import Sgd
from raypp.stages.pipeline import device_clock
from raypp.state.checkpoint import snapshot as snapshot_module
from raypp.state.checkpoint.snapshot import SnapshotBuffer
from raypp.state.checkpoint.state import gather_state, state_in_objects
from raypp.state.memory.files import DIRECTORY_VARIABLE
from raypp.state.memory.rank_slots import RunLife
from raypp.state.memory.tier import MemoryTier
from raypp.storage.directory import DirectoryStore

COPY_S = 0.1


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy of a state begins late and goes on slowly, tensor by tensor."""
    real = SnapshotBuffer._copy_still

    def slowly(self: SnapshotBuffer, pairs: list[Any]) -> None:
        for pair in pairs:
            time.sleep(COPY_S / len(pairs))
            real(self, [pair])

    monkeypatch.setattr(snapshot_module.SnapshotBuffer, "_copy_still", slowly)


@pytest.fixture
def held_copies(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No copy of a state begins before the event is set."""
    real, begin = SnapshotBuffer._copy_still, threading.Event()

    def held(self: SnapshotBuffer, pairs: list[Any]) -> None:
        assert begin.wait(60)
        real(self, pairs)

    monkeypatch.setattr(snapshot_module.SnapshotBuffer, "_copy_still", held)
    return begin


def optimizer_of(kind: str, stage: nn.Module) -> torch.optim.Optimizer:
    if kind == "adamw":
        return adamw(stage)
    groups: list[dict[str, Any]] = [{"params": list(stage.parameters()), "weight_decay": 0.1}]
    if kind == "sgd":
        return Sgd(groups, 0.1, 0.9, Bf16Weights([]))
    matrices = [{"params": [p for p in stage.parameters() if p.ndim > 1], "weight_decay": 0.1}]
    rest = [{"params": [p for p in stage.parameters() if p.ndim <= 1], "weight_decay": 0.0}]
    adam = lambda groups: torch.optim.AdamW(groups, lr=0.01)  # noqa: E731
    settings: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "dtype": torch.float32}
    return Muon(matrices, rest, adam, **settings, weights=Bf16Weights([]))


@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
def test_the_next_update_waits_for_a_slow_copy_and_every_bit_is_that_of_the_save(
    tmp_path: Path, held_copies: threading.Event, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = StandInClock()
    monkeypatch.setattr(device_clock, "time", clock)

    def begin_copy(*_: Any) -> None:
        clock.now += 5
        held_copies.set()

    stage, store = model(), DirectoryStore(tmp_path)
    optimizer = optimizer_of(kind, stage)
    train(stage, optimizer, 2)
    before = state_of(stage, optimizer)
    saving = saver(store, CollectingReporter())
    optimizer.register_step_pre_hook(lambda *_: threading.Timer(COPY_S, begin_copy).start())
    saving.save(2, [stage], optimizer, {})  # would wait for ever if it waited for the copy
    assert not held_copies.is_set()
    train(stage, optimizer, 1)
    assert saving._snapshot is not None and saving._snapshot.held_s == 5, "the time that the update waits"
    assert saving.wait() == 2
    assert not same(before, state_of(stage, optimizer))
    fresh, fresh_optimizer = restored(store, 2, optimizer=lambda fresh: optimizer_of(kind, fresh))
    assert same(before, state_of(fresh, fresh_optimizer))
    train(fresh, fresh_optimizer, 1)
    assert same_state(stage, fresh, optimizer, fresh_optimizer), "the held-up run goes on like the resumed one"


def test_without_the_hook_the_slow_copy_would_have_been_torn(held_copies: threading.Event) -> None:
    stage = model()
    optimizer, buffer = adamw(stage), SnapshotBuffer()
    train(stage, optimizer, 1)
    before = state_of(stage, optimizer)
    snapshot = buffer.take(gather_state([stage], optimizer).values())
    train(stage, optimizer, 1)  # without a call of `before_update`
    held_copies.set()
    data = snapshot.data()
    entries = {entry.name: entry for entry in snapshot.entries}
    copied = {
        name: torch.frombuffer(data[entries[name].begin : entries[name].end], dtype=before[name].dtype)
        for name in before
    }
    assert any(not torch.equal(copied[name], before[name].flatten()) for name in before)


class Counts(nn.Module):
    """A buffer that a forward pass changes, as a router's balance."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x * self.weight.sum()


def test_a_buffer_that_a_forward_changes_is_copied_at_once(slow_copies: None) -> None:
    stage, buffer = Counts(), SnapshotBuffer()
    snapshot = buffer.take(gather_state([stage], None).values())
    stage(torch.ones(1))
    data = snapshot.data()
    seen = next(entry for entry in snapshot.entries if entry.name == "seen")
    assert torch.frombuffer(data[seen.begin : seen.end], dtype=torch.float32).tolist() == [0.0] * 4


def test_a_caller_may_bring_the_memory_and_a_copy_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Tensor] = []

    def allocate(size: int, pinned: bool) -> Tensor:
        assert not pinned
        taken.append(torch.zeros(size + 100, dtype=torch.uint8))
        return taken[0]

    buffer = SnapshotBuffer(allocate)
    slices = list(gather_state([model()], None).values())
    snapshot = buffer.take(slices)
    assert bytes(snapshot.data()) == taken[0][: len(snapshot.data())].numpy().tobytes()
    snapshot.release()

    def fails(self: SnapshotBuffer, pairs: list[Any]) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(SnapshotBuffer, "_copy_still", fails)
    snapshot = buffer.take(slices)
    with pytest.raises(MemoryError, match="no room"):
        snapshot.data()
    snapshot.release()
    assert not buffer.busy


def test_a_snapshot_released_early_lets_nobody_write_where_the_next_one_is(slow_copies: None) -> None:
    buffer, slices = SnapshotBuffer(), list(gather_state([model()], None).values())
    buffer.take(slices).release()
    assert not [thread for thread in threading.enumerate() if thread.name == "raypp-snapshot"]


class Held(DirectoryStore):
    goes_on: threading.Event

    def put_stream(self, *arguments: Any) -> Any:
        assert self.goes_on.wait(60)
        return super().put_stream(*arguments)


def test_a_save_uploads_the_newest_snapshot_while_others_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no buffer of its own, and its file is not overwritten until the upload ends."""
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "memory"))
    Held.goes_on = threading.Event()
    stage, store, reporter = model(), Held(tmp_path / "store"), CollectingReporter()
    optimizer, saving = adamw(stage), saver(store, reporter)
    tier = MemoryTier(RunLife(RUN, "0" * 12, "0" * 16), saving.seat, 1, reporter)
    tier.start([0], [None], 0, None, optimizer, -1)
    state = lambda: state_in_objects([stage], optimizer, saving.seat.coordinates)  # noqa: E731
    kept: set[int] = set()

    def step(number: int) -> None:
        train(stage, optimizer, 1)
        wait_until(lambda: (tier.signals().own == tier._expected and tier._ready) or number < 2)
        tier.step_begins(number, tier.signals(), state, lambda: "{}", saving.busy)
        kept.update(slot.step for slot in tier._slots.slots if slot.step)

    for number in range(1, 4):
        step(number)
    saved = state_of(stage, optimizer)
    saving.save(3, [stage], optimizer, {}, lambda: tier.pin(3, state, lambda: "{}"))
    for number in range(4, 9):
        step(number)
    assert kept >= {3, 4, 5, 6, 7} and 3 in {slot.step for slot in tier._slots.slots}
    Held.goes_on.set()
    assert saving.wait() == 3 and saving._buffer._memory is None
    assert same(saved, state_of(*restored(store, 3)))
    for number in range(9, 12):
        step(number)
    assert 3 not in {slot.step for slot in tier._slots.slots}
    tier.close(delete=True)
