"""Saving and loading in one process: what is restored, what is rejected, what delays training."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from collecting_reporter import CollectingReporter
from in_one_process import InOneProcess
from safetensors.torch import load_file
from stand_in_clock import StandInClock, wait_until
from torch import nn

from raypp.control.worker import kind_and_cause
from raypp.errors import CheckpointError
from raypp.failure_kinds import FailureKind
from raypp.records import Coordinates, SaveProgress, Seat
from raypp.state.checkpoint import save
from raypp.state.checkpoint.commit import claim_attempt, list_checkpoints, read_commit
from raypp.state.checkpoint.layout import rank_key
from raypp.state.checkpoint.load_checkpoint import load_checkpoint
from raypp.state.checkpoint.ranged_reads import verify_checkpoint
from raypp.state.checkpoint.save import CheckpointSaver, NotSavedError
from raypp.state.checkpoint.snapshot import SnapshotBuffer
from raypp.state.checkpoint.state import gather_state
from raypp.state.checkpoint.tensor_file import BLOCK_BYTES
from raypp.storage import StoreError
from raypp.storage.directory import DirectoryStore

RUN = "tiny"
ONE = Coordinates(1, 1, 1, 1, 1)


def model(width: int = 48, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(2048, width), nn.Linear(width, 16 * width), nn.LayerNorm(16 * width))


def adamw(stage: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(stage.parameters(), lr=0.01)


def train(stage: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    tokens = torch.arange(64)
    for _ in range(steps):
        optimizer.zero_grad()
        stage(tokens).square().mean().backward()
        optimizer.step()


State = dict[str, torch.Tensor]


def state_of(stage: nn.Module, optimizer: torch.optim.Optimizer | None) -> State:
    return {name: part.tensor.clone() for name, part in gather_state([stage], optimizer).items()}


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def same_state(a: nn.Module, b: nn.Module, of_a: torch.optim.Optimizer, of_b: torch.optim.Optimizer) -> bool:
    return same(state_of(a, of_a), state_of(b, of_b))


def restored(
    store: Any,
    step: int | None,
    fresh: nn.Module | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    fresh = fresh or model(seed=1)
    fresh_optimizer = optimizer(fresh)
    assert load_checkpoint(store, RUN, step, [fresh], fresh_optimizer) is not None
    return fresh, fresh_optimizer


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path)


def saver(
    store: Any,
    reporter: CollectingReporter,
    *,
    attempt: int = 1,
    keep: int = 9,
    rank: int = 0,
    world: int = 1,
    pp: int = 1,
    commit_timeout_s: float = 5,
    last_save_s: float = 0.0,
    talk: InOneProcess | None = None,
) -> CheckpointSaver:
    seat = Seat(RUN, attempt, rank, world, Coordinates(pp=rank % pp), Coordinates(pp, 1, 1, 1, 1))
    job = {"model": {"kind": "llama"}, "resources": {"env": {"TOKEN": "secret"}}}
    talk = talk or InOneProcess(patient=False)
    limits: dict[str, Any] = {"commit_timeout_s": commit_timeout_s, "last_save_s": last_save_s}
    made = CheckpointSaver(store, RUN, job, seat, talk, reporter, keep, **limits)
    made._given_up.wait = lambda timeout=None: threading.Event.wait(made._given_up, 0.01)  # type: ignore[method-assign]
    return made


def begun(store: Any, step: int = 1, **how: Any) -> tuple[CheckpointSaver, CollectingReporter]:
    reporter, stage = CollectingReporter(), model()
    saving = saver(store, reporter, **how)
    saving.save(step, [stage], adamw(stage), {})
    return saving, reporter


def saved(store: DirectoryStore) -> tuple[nn.Module, torch.optim.Optimizer]:
    stage = model()
    optimizer, saving = adamw(stage), saver(store, CollectingReporter())
    train(stage, optimizer, 3)
    saving.save(3, [stage], optimizer, {"data_position": {"row": 3}})
    assert saving.wait() == 3
    return stage, optimizer


def test_what_is_loaded_into_fresh_objects_is_what_was_saved_bit_for_bit(store: DirectoryStore) -> None:
    stage, optimizer = saved(store)
    fresh = model(seed=1)
    fresh_optimizer = adamw(fresh)
    loaded = load_checkpoint(store, RUN, None, [fresh], fresh_optimizer)
    assert loaded is not None and loaded.step == 3
    assert loaded.data_position == {"row": 3} and loaded.extra == {"data_position": {"row": 3}}
    assert same_state(stage, fresh, optimizer, fresh_optimizer)
    train(stage, optimizer, 2)
    train(fresh, fresh_optimizer, 2)
    assert same_state(stage, fresh, optimizer, fresh_optimizer)


def test_training_may_go_on_while_the_snapshot_is_stored(store: DirectoryStore) -> None:
    stage = model()
    optimizer, reporter = adamw(stage), CollectingReporter()
    train(stage, optimizer, 1)
    before = state_of(stage, optimizer)
    saving = saver(store, reporter)
    saving.save(1, [stage], optimizer, {})
    train(stage, optimizer, 3)
    assert saving.wait() == 1
    assert same(before, state_of(*restored(store, 1)))
    assert reporter.kinds() == ["committed"]
    assert saving.last_stall_s > 0


def test_nothing_committed_loads_nothing(store: DirectoryStore) -> None:
    assert load_checkpoint(store, RUN, None, [model()], None) is None
    with pytest.raises(CheckpointError, match="step 7 of tiny is not committed"):
        load_checkpoint(store, RUN, 7, [model()], None)


def test_the_commit_names_what_is_needed_and_no_secret(store: DirectoryStore) -> None:
    saved(store)
    commit = read_commit(store, RUN, 3)
    assert (commit.run, commit.step, commit.attempt) == (RUN, 3, 1)
    assert commit.mesh == ONE.as_dict()
    assert [record.key for record in commit.objects] == [rank_key(RUN, 3, 1, 0)]
    assert b"secret" not in store.get("tiny/step-00000003/COMMIT")
    assert verify_checkpoint(store, RUN, 3) == []


def test_an_object_is_a_safetensors_file_with_global_names_and_every_bit(store: DirectoryStore) -> None:
    stage, optimizer = saved(store)
    loaded, state = load_file(store.root / rank_key(RUN, 3, 1, 0)), state_of(stage, optimizer)
    assert same(loaded, state) and all(loaded[name].dtype == state[name].dtype for name in state)


@pytest.mark.parametrize("place", [3, 100, 40_000, BLOCK_BYTES + 5, -1])
def test_a_flipped_byte_anywhere_is_found_and_nothing_is_changed(store: DirectoryStore, place: int) -> None:
    saved(store)
    path = store.root / rank_key(RUN, 3, 1, 0)
    data = bytearray(path.read_bytes())
    assert len(data) > BLOCK_BYTES + 5
    data[place] ^= 4
    path.write_bytes(data)
    fresh = model(seed=1)
    before, optimizer = state_of(fresh, None), adamw(fresh)
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors.*corrupt"):
        load_checkpoint(store, RUN, 3, [fresh], optimizer)
    assert same(before, state_of(fresh, None)) and not optimizer.state
    assert verify_checkpoint(store, RUN, 3)[0].key == rank_key(RUN, 3, 1, 0)


def test_a_missing_or_torn_object_is_named(store: DirectoryStore) -> None:
    saved(store)
    path = store.root / rank_key(RUN, 3, 1, 0)
    path.write_bytes(path.read_bytes()[:-100])
    fresh = model()
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: is torn"):
        load_checkpoint(store, RUN, 3, [fresh], adamw(fresh))
    path.unlink()
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: is missing"):
        load_checkpoint(store, RUN, 3, [model()], None)


def test_tensors_that_do_not_fit_are_all_named(store: DirectoryStore) -> None:
    saved(store)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(store, RUN, 3, [model(width=40)], None)
    assert "0.weight: has shape [2048, 40] here and [2048, 48] in the checkpoint" in str(caught.value)
    assert "2.bias" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"0\.0\.weight: is not in the checkpoint"):
        load_checkpoint(store, RUN, 3, [nn.Sequential(model())], None)


def test_a_tied_weight_comes_back_tied(store: DirectoryStore) -> None:
    def tied(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        stage = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16, bias=False))
        stage[1].weight = stage[0].weight
        return stage

    stage = tied(0)
    optimizer = adamw(stage)
    stage(torch.arange(4)).sum().backward()
    optimizer.step()
    saving = saver(store, CollectingReporter())
    saving.save(1, [stage], optimizer, {})
    saving.wait()
    fresh, fresh_optimizer = restored(store, 1, tied(1))
    assert fresh[0].weight is fresh[1].weight
    assert same_state(stage, fresh, optimizer, fresh_optimizer)


class SlowStore(DirectoryStore):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.go = threading.Event()

    def put_stream(self, key: str, chunks: Any, size: int) -> None:
        assert self.go.wait(60)
        super().put_stream(key, chunks, size)


def test_a_save_that_is_due_too_early_waits_for_the_last_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = StandInClock()
    monkeypatch.setattr(save, "time", clock)
    slow, reporter = SlowStore(tmp_path), CollectingReporter()
    stage = model()
    optimizer, saving = adamw(stage), saver(slow, reporter)
    saving.save(1, [stage], optimizer, {})

    def release() -> None:
        clock.now += 5
        slow.go.set()

    threading.Timer(0.2, release).start()
    saving.save(2, [stage], optimizer, {})
    assert saving._before_s == 5, "the wait counts as a stall"
    assert saving.wait() == 2
    assert reporter.kinds() == ["committed", "save_waited", "committed"]
    with pytest.raises(ValueError, match="saved once"):
        saving.save(2, [stage], optimizer, {})


class FailingStore(DirectoryStore):
    def __init__(self, root: Path, failures: int) -> None:
        super().__init__(root)
        self.failures = failures

    def put_stream(self, key: str, chunks: Any, size: int) -> None:
        if self.failures:
            self.failures -= 1
            raise StoreError("the server is having a bad day")
        super().put_stream(key, chunks, size)


def test_an_upload_is_tried_again_before_it_counts_as_failed(tmp_path: Path) -> None:
    store = FailingStore(tmp_path, 1)
    saving, reporter = begun(store)
    assert saving.wait() == 1
    assert reporter.kinds() == ["committed"]
    assert verify_checkpoint(store, RUN, 1) == []


def test_saves_that_fail_are_one_event_until_one_succeeds_and_training_goes_on(tmp_path: Path) -> None:
    store, reporter, stage = FailingStore(tmp_path, 0), CollectingReporter(), model()
    saving, optimizer = saver(store, reporter), adamw(stage)
    for step, failures in [(1, 10**9), (2, 10**9), (3, 10**9), (4, 0), (5, 10**9)]:
        store.failures = failures
        saving.save(step, [stage], optimizer, {})
        assert saving.wait() == (None if step < 4 else 4)
    assert reporter.kinds() == ["save_failed", "committed", "save_failed"]
    assert "rank 0 tries again: the server is having a bad day" in reporter.events[0].message


def test_a_save_that_is_due_gives_up_one_that_the_store_does_not_take(tmp_path: Path) -> None:
    store, reporter, stage = FailingStore(tmp_path, 10**9), CollectingReporter(), model()
    saving, optimizer = saver(store, reporter, last_save_s=90.0), adamw(stage)
    for step in (1, 2):
        saving.save(step, [stage], optimizer, {})
    store.failures = 0
    assert saving.finish() == 2
    # If the second one has met the store before it takes writes, its wait is another event.
    assert list(dict.fromkeys(reporter.kinds())) == ["save_failed", "committed"]
    assert [checkpoint.step for checkpoint in list_checkpoints(store, RUN)] == [2]


def test_the_last_save_waits_for_a_store_that_takes_no_writes_and_says_so(tmp_path: Path) -> None:
    store, reporter, stage = FailingStore(tmp_path, 10**9), CollectingReporter(), model()
    saving = saver(store, reporter, last_save_s=90.0)
    saving.save(1, [stage], adamw(stage), {})
    ended: list[int | None] = []
    waiting = threading.Thread(target=lambda: ended.append(saving.finish()), daemon=True)
    waiting.start()
    wait_until(lambda: any("waits up to 1.5 min" in event.message for event in reporter.events))
    assert "waits_s" in reporter.events[-1].details
    store.failures = 0
    waiting.join()
    assert ended == [1]


class FullStore(DirectoryStore):
    full = True

    def put_stream(self, key: str, chunks: Any, size: int) -> None:
        if self.full:
            error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.root / key))
            raise self._failure(error, key) from error
        super().put_stream(key, chunks, size)


def test_the_last_save_of_an_attempt_raises_what_made_it_fail(tmp_path: Path) -> None:
    store, stage = FullStore(tmp_path), model()
    saving, optimizer = saver(store, CollectingReporter()), adamw(stage)
    assert saving.finish() is None, "no save was asked for"
    saving.save(1, [stage], optimizer, {})
    with pytest.raises(NotSavedError, match=r"of step 1, was not saved: .* the disk is full") as full:
        saving.finish()
    kind, cause = kind_and_cause(full.value)
    assert kind is FailureKind.NOT_SAVED and f"{tmp_path}/" in cause and "it was tried again for 0 min" in cause
    assert kind.traits.permanent, "another attempt would wait as long"
    assert "fix: free some space" in str(full.value)
    store.full = False
    saving.save(2, [stage], optimizer, {})
    assert saving.finish() == 2, "an earlier failure does not count once a newer step is committed"


def both_saved(*stores: DirectoryStore) -> list[tuple[CheckpointSaver, CollectingReporter]]:
    """Ranks 0 and 1 save step 4, each to its store: rank 1 first, and to the end."""
    talk, ranks = InOneProcess(patient=False), []
    for rank in (1, 0):
        ranks.insert(0, begun(stores[rank], 4, rank=rank, world=2, talk=talk))
        wait_until(lambda: ranks[0][0].progress is not SaveProgress.BUSY)
        if ranks[0][0].progress is SaveProgress.STUCK:
            ranks[0][0]._given_up.set()
        ranks[0][0]._thread.join()
    return ranks


@pytest.mark.parametrize(
    ("at_fault", "why"), [(1, "bad day"), (0, "attempt 1 is over")], ids=["an upload fails", "the commit fails"]
)
def test_ranks_agree_that_the_last_save_failed_and_on_whose_fault_it_was(
    tmp_path: Path, at_fault: int, why: str
) -> None:
    store, ends = DirectoryStore(tmp_path), []
    if at_fault == 0:
        claim_attempt(store, RUN, 2)
    for saving, _ in both_saved(store, FailingStore(tmp_path, 10**9) if at_fault == 1 else store):
        with pytest.raises(NotSavedError, match=rf"of step 4, was not saved: .*{why}") as failed:
            saving.finish()
        ends.append(kind_and_cause(failed.value)[0])
    fault = FailureKind.NOT_SAVED if at_fault == 1 else FailureKind.SAVE_FAILED
    assert ends == [fault if rank == at_fault else FailureKind.LOST_PEER for rank in (0, 1)]


def test_what_fails_after_the_commit_does_not_make_the_save_a_failed_one(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_arguments: Any, **_options: Any) -> None:
        raise OSError("no listing")

    monkeypatch.setattr(save, "prune", broken)
    ranks = both_saved(store, store)
    assert [saving.finish() for saving, _ in ranks] == [4, 4]
    assert [reporter.kinds() for _, reporter in ranks] == [["committed", "prune_failed"], []]


def test_a_rank_that_says_nothing_prevents_the_commit_and_is_named(store: DirectoryStore) -> None:
    saving, reporter = begun(store, world=2)
    assert saving.wait() is None
    assert list_checkpoints(store, RUN) == []
    assert "ranks [1] did not report" in reporter.events[0].message


def test_a_saver_whose_attempt_is_over_commits_nothing(store: DirectoryStore) -> None:
    for attempt in (1, 2):
        claim_attempt(store, RUN, attempt)
    saving, reporter = begun(store, attempt=1)
    assert saving.wait() is None
    assert list_checkpoints(store, RUN) == []
    assert "attempt 1 is over" in reporter.events[0].message


def test_committed_objects_are_not_written_again_by_the_same_attempt_number(store: DirectoryStore) -> None:
    saved(store)
    before = store.get(rank_key(RUN, 3, 1, 0))
    saving, reporter = begun(store, 3)
    saving.wait()
    assert store.get(rank_key(RUN, 3, 1, 0)) == before
    assert "already committed" in reporter.events[0].message


def test_a_snapshot_buffer_is_not_used_twice_at_once_but_again_after_release() -> None:
    buffer, slices = SnapshotBuffer(), gather_state([model()], None).values()
    first = buffer.take(slices)
    with pytest.raises(RuntimeError, match="still in use"):
        buffer.take(slices)
    where = first.data()
    first.release()
    second = buffer.take(slices)
    assert second.data().obj.ctypes.data == where.obj.ctypes.data
    with pytest.raises(RuntimeError, match="was released"):
        first.data()
