"""The protocol without tensors: objects, COMMIT, retention, attempts, and crashes in between."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from newest_usable import newest_usable

from raypp.errors import CheckpointError
from raypp.state.checkpoint.commit import (
    Commit,
    ObjectRecord,
    StaleAttemptError,
    claim_attempt,
    claim_next_attempt,
    list_checkpoints,
    newest_attempt,
    read_commit,
    write_commit,
)
from raypp.state.checkpoint.layout import commit_key, rank_key, split_location
from raypp.state.checkpoint.ranged_reads import verify_checkpoint
from raypp.state.checkpoint.retention import find_leftovers, prune
from raypp.storage import AlreadyExists, ObjectStore
from raypp.storage.directory import DirectoryStore

RUN = "kjv"


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path)


def content(step: int, attempt: int, rank: int) -> bytes:
    return f"state of rank {rank} at step {step} by attempt {attempt} ".encode() * 50


def put_objects(store: ObjectStore, step: int, attempt: int, ranks: int = 2) -> tuple[ObjectRecord, ...]:
    records = []
    for rank in range(ranks):
        key, data = rank_key(RUN, step, attempt, rank), content(step, attempt, rank)
        store.put_stream(key, [data[:30], data[30:]], len(data))
        records.append(ObjectRecord(key, len(data), hashlib.sha256(data).hexdigest(), rank))
    return tuple(records)


def commit_of(step: int, attempt: int, records: tuple[ObjectRecord, ...]) -> Commit:
    return Commit(RUN, step, attempt, {"pp": 2}, {"model": {}}, {"data_position": {"row": step}}, records)


def save(store: ObjectStore, step: int, attempt: int = 1, keep: int = 9) -> None:
    write_commit(store, commit_of(step, attempt, put_objects(store, step, attempt)))
    prune(store, RUN, keep, newest=step, attempt=attempt)


def steps(store: ObjectStore) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(store, RUN)]


def test_a_checkpoint_exists_when_its_commit_does(store: DirectoryStore) -> None:
    records = put_objects(store, 10, 1)
    assert list_checkpoints(store, RUN) == []
    write_commit(store, commit_of(10, 1, records))
    assert steps(store) == [10]
    commit = read_commit(store, RUN, 10)
    assert (commit.objects, commit.mesh, commit.extra) == (records, {"pp": 2}, {"data_position": {"row": 10}})
    assert verify_checkpoint(store, RUN, 10) == []


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_a_byte, "is corrupt"),
        (Path.unlink, "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-7]), "bytes"),
    ],
)
def test_a_damaged_object_is_named_and_the_older_commit_is_used(
    store: DirectoryStore, damage: Callable[[Path], Any], message: str
) -> None:
    save(store, 10)
    save(store, 20)
    bad = rank_key(RUN, 20, 1, 1)
    damage(store.root / bad)
    newest, (problem,) = newest_usable(store, RUN)
    assert newest is not None and newest.step == 10
    assert problem.key == bad and message in problem.fault


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b'{"format": 99}', b'{"format": 1, "objects": [{"x": 1}]}'])
def test_a_commit_that_cannot_be_read_is_named_and_the_older_one_is_used(store: DirectoryStore, garbage: bytes) -> None:
    save(store, 10)
    save(store, 20)
    store.put(commit_key(RUN, 20), garbage)
    newest, problems = newest_usable(store, RUN)
    assert newest is not None and newest.step == 10
    assert problems[0].key == commit_key(RUN, 20)


def test_nothing_usable_is_none(store: DirectoryStore) -> None:
    assert newest_usable(store, RUN) == (None, [])
    save(store, 10)
    bad = rank_key(RUN, 10, 1, 0)
    (store.root / bad).unlink()
    newest, (problem,) = newest_usable(store, RUN)
    assert newest is None and problem.key == bad


def test_an_attempt_can_be_claimed_once(store: DirectoryStore) -> None:
    claim_attempt(store, RUN, 1)
    with pytest.raises(AlreadyExists):
        claim_attempt(store, RUN, 1)
    assert claim_next_attempt(store, RUN) == 2
    assert newest_attempt(store, RUN) == 2


def test_an_attempt_that_came_back_from_the_dead_cannot_commit(store: DirectoryStore) -> None:
    claim_attempt(store, RUN, 1)
    save(store, 10)
    late = put_objects(store, 20, 1)
    claim_attempt(store, RUN, 2)
    with pytest.raises(StaleAttemptError, match="attempt 1 is over: attempt 2 has begun"):
        write_commit(store, commit_of(20, 1, late))
    assert steps(store) == [10]


@pytest.mark.parametrize(
    ("stalls_after", "refusal"), [("get", "attempt 2 is over: attempt 3 has begun"), ("delete", "already exists")]
)
def test_an_attempt_that_stalls_over_an_older_commit_leaves_a_newer_attempts_commit(
    tmp_path: Path, stalls_after: str, refusal: str
) -> None:
    """A newer attempt begins and commits the step once this one has read or deleted the commit."""
    store, stalls = DirectoryStore(tmp_path), DirectoryStore(tmp_path)
    real = getattr(stalls, stalls_after)

    def stalled(keys: str | list[str], *more: Any) -> Any:
        answer = real(keys, *more)
        if commit_key(RUN, 20) in (keys, *keys):
            claim_attempt(store, RUN, 3)
            store.delete([commit_key(RUN, 20)])
            write_commit(store, commit_of(20, 3, put_objects(store, 20, 3)))
        return answer

    claim_attempt(store, RUN, 1)
    save(store, 20)
    claim_attempt(store, RUN, 2)
    late = commit_of(20, 2, put_objects(store, 20, 2))
    setattr(stalls, stalls_after, stalled)
    with pytest.raises((StaleAttemptError, AlreadyExists), match=refusal):
        write_commit(stalls, late)
    assert read_commit(store, RUN, 20).attempt == 3


def test_an_attempt_cannot_commit_objects_of_another(store: DirectoryStore) -> None:
    records = put_objects(store, 20, 1)
    with pytest.raises(CheckpointError, match="is not an object of attempt 2"):
        write_commit(store, commit_of(20, 2, records))


def test_a_step_is_committed_once_per_attempt(store: DirectoryStore) -> None:
    save(store, 10)
    with pytest.raises(AlreadyExists):
        write_commit(store, commit_of(10, 1, put_objects(store, 10, 1)))


def test_a_commit_tried_again_after_a_lost_answer_succeeds(store: DirectoryStore) -> None:
    commit = commit_of(10, 1, put_objects(store, 10, 1))
    write_commit(store, commit)
    write_commit(store, commit)
    assert read_commit(store, RUN, 10).nonce == commit.nonce


def test_a_later_attempt_replaces_a_commit_it_did_not_start_from(store: DirectoryStore) -> None:
    save(store, 10, attempt=1)
    save(store, 20, attempt=1)
    flip_a_byte(store.root / rank_key(RUN, 20, 1, 0))
    claim_attempt(store, RUN, 2)
    save(store, 20, attempt=2)
    assert read_commit(store, RUN, 20).attempt == 2
    assert verify_checkpoint(store, RUN, 20) == []
    assert not (store.root / rank_key(RUN, 20, 1, 0)).exists()


def test_the_newest_k_stay_and_leftovers_of_dead_attempts_go(store: DirectoryStore) -> None:
    put_objects(store, 15, 1)  # died before its commit
    for step in (10, 20, 30):
        save(store, step)
    put_objects(store, 40, 2)  # in progress
    pruned = prune(store, RUN, 2)
    assert steps(store) == [20, 30]
    assert pruned.steps == (10,)
    assert list(store.list(f"{RUN}/step-00000015")) == []
    assert len(list(store.list(f"{RUN}/step-00000040"))) == 2
    assert newest_usable(store, RUN)[1] == []


def test_the_last_checkpoint_is_never_removed(store: DirectoryStore) -> None:
    save(store, 10)
    prune(store, RUN, 1)
    assert steps(store) == [10]
    with pytest.raises(ValueError, match="at least 1"):
        prune(store, RUN, 0)


def test_a_void_newer_commit_does_not_push_the_good_one_out(store: DirectoryStore) -> None:
    """Step 20 of attempt 1 is corrupt; attempt 2 started from 10 and commits 15, with keep 1."""
    save(store, 10)
    save(store, 20)
    claim_attempt(store, RUN, 2)
    save(store, 15, attempt=2, keep=1)
    assert steps(store) == [15]


@pytest.mark.parametrize("old_commit", [False, True])
def test_a_prune_by_hand_spares_a_save_in_progress_below_the_newest_commit(
    store: DirectoryStore, old_commit: bool
) -> None:
    """Attempt 2 could not use step 100, and saves step 90, which attempt 1 may have committed."""
    claim_attempt(store, RUN, 1)
    for step in (90, 100) if old_commit else (100,):
        save(store, step)
    claim_attempt(store, RUN, 2)
    under_way = rank_key(RUN, 90, 2, 0)
    store.put(under_way, content(90, 2, 0))
    assert under_way not in prune(store, RUN, 1).objects
    assert store.head(under_way) is not None
    assert steps(store) == [100]
    assert not any(store.list(f"{RUN}/step-00000090/attempt-1"))


def test_a_prune_by_hand_removes_what_the_newest_attempt_left_below_its_own_commit(store: DirectoryStore) -> None:
    claim_attempt(store, RUN, 1)
    save(store, 100)
    claim_attempt(store, RUN, 2)
    failed = put_objects(store, 80, 2)
    write_commit(store, commit_of(90, 2, put_objects(store, 90, 2)))
    assert set(prune(store, RUN, 2).objects) == {record.key for record in failed}
    assert steps(store) == [90, 100]


def test_the_objects_of_an_imported_step_0_are_no_leftovers(store: DirectoryStore) -> None:
    claim_attempt(store, RUN, 1)
    write_commit(store, commit_of(0, 1, put_objects(store, 0, 1)))
    claim_attempt(store, RUN, 2)
    assert not find_leftovers(store, RUN, 2, just_begun=True)
    assert not find_leftovers(store, RUN, 3)


def test_an_import_that_may_be_about_to_commit_step_0_keeps_its_objects(store: DirectoryStore) -> None:
    claim_attempt(store, RUN, 1)
    put_objects(store, 0, 1)
    claim_attempt(store, RUN, 2)
    assert not find_leftovers(store, RUN, 2, just_begun=True)
    assert len(find_leftovers(store, RUN, 2).objects) == 2


class Died(BaseException):
    """The process is gone: nothing after this runs, not even handlers of Exception."""


class DyingStore:
    """A store whose process dies at its n-th operation, before or after its effect."""

    def __init__(self, store: ObjectStore, dies_at: int, after: bool) -> None:
        self._store, self._left, self._after = store, dies_at, after
        self.url = store.url

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)

        def act(*arguments: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left == 0 and not self._after:
                raise Died
            result = real(*arguments, **options)
            if self._left == 0:
                raise Died
            return result

        return act


@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_any_operation_of_a_save_leaves_the_old_or_the_new_state_whole(tmp_path: Path, after: bool) -> None:
    seen, place = set(), 0
    while True:
        place += 1
        store = DirectoryStore(tmp_path / f"{place}")
        for step in (10, 20):
            save(store, step, keep=2)
        try:
            save(DyingStore(store, place, after), 30, keep=1)  # type: ignore[arg-type]
            finished = True
        except Died:
            finished = False
        newest, problems = newest_usable(store, RUN)
        assert newest is not None and problems == []
        assert newest.step in (20, 30)
        seen.add(newest.step)
        claim_attempt(store, RUN, 2)
        save(store, 40, attempt=2, keep=1)
        assert steps(store) == [40]
        left = {info.key for info in store.list(f"{RUN}/step-")}
        assert left == {commit_key(RUN, 40), rank_key(RUN, 40, 2, 0), rank_key(RUN, 40, 2, 1)}
        if finished:
            break
    assert place > 8
    assert seen == {20, 30}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("kjv", (None, "kjv", None)),
        ("s3://b/p/kjv", ("s3://b/p", "kjv", None)),
        ("s3://b/p/kjv/step-00000100", ("s3://b/p", "kjv", 100)),
        ("/data/kjv/step-7/", ("/data", "kjv", 7)),
        ("kjv/step-7", (None, "kjv", 7)),
        ("/kjv", ("/", "kjv", None)),
    ],
)
def test_a_commands_argument_is_a_name_a_url_or_a_step(text: str, parts: tuple[str | None, str, int | None]) -> None:
    assert split_location(text) == parts
