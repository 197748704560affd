"""Which checkpoints are kept, over any sequence of commits, failures and damage."""

import hashlib
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from newest_usable import newest_usable

from raypp.api.checkpoints import best_checkpoint
from raypp.errors import JobError
from raypp.records import Event
from raypp.state.checkpoint.commit import Commit, ObjectRecord, claim_next_attempt, list_checkpoints, write_commit
from raypp.state.checkpoint.layout import commit_key, rank_key, step_of, steps_prefix
from raypp.state.checkpoint.ranged_reads import verify_checkpoint
from raypp.state.checkpoint.retention import BestOf, prune
from raypp.state.run_records.recorder import RunRecorder
from raypp.storage.directory import DirectoryStore

RUN = "r"
RANKS = 2
MESH = {"pp": RANKS, "dp_replicate": 1, "fsdp": 1, "cp": 1, "tp": 1}


class History:
    """A run's checkpoints as a sequence of events, with the expected result after each."""

    def __init__(self, root: Path, keep: int, keep_every: int) -> None:
        self.store = DirectoryStore(root)
        self.keep, self.keep_every = keep, keep_every
        self.step = 0
        self.attempt = claim_next_attempt(self.store, RUN)

    def upload(self, ranks: int = RANKS) -> tuple[ObjectRecord, ...]:
        records = []
        for rank in range(ranks):
            key, data = rank_key(RUN, self.step, self.attempt, rank), f"{self.step} {self.attempt} {rank}".encode()
            self.store.put(key, data)
            records.append(ObjectRecord(key, len(data), hashlib.sha256(data).hexdigest(), rank))
        return tuple(records)

    def committed(self) -> list[int]:
        return [checkpoint.step for checkpoint in list_checkpoints(self.store, RUN)]

    def whole(self) -> list[int]:
        return [step for step in self.committed() if not verify_checkpoint(self.store, RUN, step, every_byte=False)]

    def save(self, torn: int | None = None) -> None:
        """Runs a save, followed by retention, before which the object of `torn` may be lost."""
        self.step += 1
        records = self.upload()
        write_commit(self.store, Commit(RUN, self.step, self.attempt, MESH, {}, {}, records))
        if torn is not None:
            self.store.delete([records[torn].key])
        self.prune()

    def prune(self) -> None:
        before, whole = set(self.committed()), self.whole()
        pruned = prune(self.store, RUN, self.keep, keep_every=self.keep_every, newest=self.step, attempt=self.attempt)
        after = set(self.committed())
        assert after == before - set(pruned.steps)
        reachable = [step for step in whole if step <= self.step]
        if reachable:
            assert reachable[-1] in self.whole(), "the newest whole checkpoint was removed"
        if self.keep_every:
            assert all(step in after for step in before if step % self.keep_every == 0 and step <= self.step)
        below = sorted(step for step in before if step <= self.step)
        assert set(below[-self.keep :]) <= after
        ordinary = [step for step in after if not (self.keep_every and step % self.keep_every == 0)]
        assert len(ordinary) <= self.keep + 1, "one more than keep only while the newest are damaged"
        if self.step in self.whole():
            assert len([step for step in ordinary if step <= self.step]) <= self.keep

    def fail(self) -> None:
        self.step += 1
        self.upload(RANKS - 1)

    def restart(self) -> None:
        self.attempt = claim_next_attempt(self.store, RUN)
        usable, _ = newest_usable(self.store, RUN)
        self.step = usable.step if usable else 0

    def lose(self, which: int) -> None:
        steps = self.committed()
        if steps:
            step = steps[which % len(steps)]
            keys = sorted(i.key for i in self.store.list(f"{RUN}/step-{step:08d}/") if not i.key.endswith("COMMIT"))
            if keys:
                path = self.store.root / keys[which % len(keys)]
                path.unlink() if which % 2 else path.write_bytes(path.read_bytes()[:-1])


EVENTS = st.one_of(
    st.just(("save",)), st.just(("save",)), st.just(("fail",)), st.just(("restart",)), st.just(("prune",)),
    st.tuples(st.just("lose"), st.integers(0, 9)),
    st.tuples(st.just("save"), st.integers(0, RANKS - 1)),
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.sampled_from([0, 2, 3, 5]), st.lists(EVENTS, max_size=14))
def test_over_any_history_the_newest_whole_checkpoint_and_every_nth_stay(
    keep: int, keep_every: int, events: list[tuple[str, int]]
) -> None:
    with tempfile.TemporaryDirectory() as root:
        history = History(Path(root), keep, keep_every)
        for name, *arguments in events:
            getattr(history, name)(*arguments)
        history.save()
        left = {step_of(RUN, info.key) for info in history.store.list(steps_prefix(RUN))}
        assert left <= set(history.committed()), "what belongs to no checkpoint was left behind"


def test_a_commit_that_cannot_be_read_is_no_newer_attempts(tmp_path: Path) -> None:
    history = History(tmp_path, keep=1, keep_every=0)
    history.save()
    history.store.put(commit_key(RUN, 1), b"{")
    history.save()
    assert history.committed() == [2]


def test_when_the_kept_one_is_damaged_an_older_whole_one_stays(tmp_path: Path) -> None:
    history = History(tmp_path, keep=1, keep_every=0)
    history.save()
    history.save(torn=0)
    assert history.committed() == [1, 2]
    history.save()
    assert history.committed() == [3]


@pytest.mark.parametrize(("keep_every", "left"), [(0, [6, 7]), (3, [3, 6, 7]), (1, [1, 2, 3, 4, 5, 6, 7])])
def test_multiples_of_keep_every_stay_for_ever(tmp_path: Path, keep_every: int, left: list[int]) -> None:
    history = History(tmp_path, keep=2, keep_every=keep_every)
    for _ in range(7):
        history.save()
    assert history.committed() == left


def test_the_best_stay_beside_the_newest(tmp_path: Path) -> None:
    history = History(tmp_path, keep=7, keep_every=0)
    for _ in range(7):
        history.save()
    losses = {1: 3.0, 2: 2.0, 3: float("nan"), 4: 2.5, 5: 2.0, 7: 4.0, 9: 0.0}
    prune(history.store, RUN, 1, best=BestOf(2, losses), newest=7, attempt=history.attempt)
    assert history.committed() == [2, 5, 7]
    prune(history.store, RUN, 1, best=BestOf(1, losses), newest=7, attempt=history.attempt)
    assert history.committed() == [2, 7], "of equal ones the first"


def test_the_best_checkpoint_is_found_by_the_runs_evaluations(tmp_path: Path) -> None:
    history = History(tmp_path, keep=7, keep_every=0)
    for _ in range(3):
        history.save()
    url = f"{history.store.url}/{RUN}"
    with pytest.raises(JobError, match="no checkpoint of r was evaluated"):
        best_checkpoint(url)
    recorder = RunRecorder(history.store, RUN, "test")
    for step, loss in ((1, 3.0), (2, 2.5), (3, 2.75), (4, 0.5)):
        recorder.event(Event("evaluated", "", step=step, details={"loss": loss}))
    assert recorder.close()
    assert best_checkpoint(url) == f"{url}/step-00000002"
    with pytest.raises(JobError, match="step 1 is named, too"):
        best_checkpoint(f"{url}/step-00000001")
