"""Whatever goes wrong while a run ends, its processes are ended; and a run is not ended by the
records of an earlier submission. The leader has no cluster here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from raypp.checkpoint.run_spec import RunEnd, write_end, write_spec
from raypp.control import leader as leader_module
from raypp.control import placement
from raypp.control.leader import Leader
from raypp.control.machine import Finish
from raypp.control.protocol import RunRequest
from raypp.control.report import relay
from raypp.control.run_events import end_event, with_submission
from raypp.observe.reader import RunReader
from raypp.observe.recorder import RunRecorder
from raypp.observe.status import RunStatus
from raypp.records import Event, RunState, StepReport
from raypp.retry import Backoff
from raypp.spec.load import job_document, parse_job
from raypp.storage import ObjectInfo, StoreError, open_store
from raypp.storage.directory import DirectoryStore


class _Failing(Leader):
    """Fails at its first turn, and has processes that cannot be ended one by one."""

    def __init__(self, store: Path, has_resources: bool) -> None:
        job = parse_job({"name": "r", "checkpoint": {"url": str(store)}})
        super().__init__(RunRequest("r", job_document(job)), None, restarted=False)
        self.ended: list[str] = []
        self._has = has_resources

    def _begin(self) -> None:
        self._has_resources = self._has
        raise KeyError(0)

    def _end_by_handle(self) -> None:
        self.ended.append("one by one")
        raise AttributeError("a worker without a name")

    def _end_by_name(self) -> None:
        self.ended.append("by name")


@pytest.mark.parametrize(("has_resources", "ways"), [(True, ["one by one", "by name"]), (False, ["by name"])])
def test_processes_that_cannot_be_ended_one_by_one_are_ended_by_the_name_of_their_run(
    tmp_path: Path, has_resources: bool, ways: list[str]
) -> None:
    leader = _Failing(tmp_path, has_resources)
    leader.run()
    assert leader.ended == ways
    outcome = leader.outcome
    assert outcome is not None and (outcome.state, outcome.exit_code) == ("FAILED", 1)
    assert outcome.reason == "the controller failed: KeyError: 0"


_REFUSED = 5


class _Away(DirectoryStore):
    """Does not answer the first reads of each key and each folder."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked: Counter[str] = Counter()

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        self._ask(key)
        return super().get(key, start, end)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self._ask(prefix)
        return super().list(prefix)

    def _ask(self, key: str) -> None:
        self.asked[key] += 1
        if self.asked[key] <= _REFUSED:
            raise StoreError(f"{key}: no answer")


class _Restarted(_Failing):
    """The controller's second process, which takes the run over; it ends at its first turn."""

    def __init__(self, store: Path) -> None:
        job = parse_job(
            {
                "name": "r",
                "checkpoint": {"url": str(store)},
                "resources": {"device": "cpu"},
                "recovery": {"orphan_timeout_s": 60},
            }
        )
        Leader.__init__(self, RunRequest("r", job_document(job)), None, restarted=True)
        self.ended = []

    def _begin(self) -> None:
        Leader._begin(self)

    def _turn(self) -> None:
        self.outcome = RunEnd("r", RunState.RUNNING, 0, self.record.step)


def test_a_controller_that_restarts_while_the_store_is_away_ends_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store comes back later than a retry usually lasts, but before the ranks would give up."""
    with RunRecorder(open_store(str(tmp_path)), "r", "c-first") as recorder:
        recorder.event(Event("submitted", "submitted", attempt=0))
        recorder.step(StepReport(7, 1.0, 1.0, 10, 10, 0.1, 100.0, 1))
        recorder.status(RunStatus("r", RunState.RUNNING, steps=20, step=5, attempt=1))
    store = _Away(tmp_path)
    monkeypatch.setattr(leader_module, "open_store", lambda url: store)
    monkeypatch.setattr(leader_module, "_STORE_RETRY", Backoff(timeout_s=0.02, first_s=0.02, longest_s=0.02))
    monkeypatch.setattr(leader_module, "find_workers", lambda run: [])
    monkeypatch.setattr(placement, "existing_group", lambda name: None)
    monkeypatch.setattr(relay, "actors_of", lambda run: ([], []))
    leader = _Restarted(tmp_path)
    leader.run()
    leader.record.close()
    assert leader.ended == []
    assert all(store.asked[key] > _REFUSED for key in ("r/status.json", "r/events/", "r/history/"))
    outcome = leader.outcome
    assert outcome is not None and (outcome.state, outcome.step) == ("RUNNING", 7)
    told = [event.kind for event in RunReader(DirectoryStore(tmp_path), "r").events()]
    assert told == ["submitted", "controller_restarted"]


class _SecondLife(Leader):
    """Was restarted by Ray, and has no processes to end."""

    def __init__(self, store: Path, submission: str) -> None:
        sections = {"name": "r", "checkpoint": {"url": str(store)}, "resources": {"device": "cpu"}}
        request = RunRequest("r", job_document(parse_job(sections)), submission)
        super().__init__(request, None, restarted=True)

    def _end_by_name(self) -> None:
        pass


def _write(folder: Path, submission: str, *, ended: bool) -> None:
    """Writes the records of a submission that failed, or that has just begun."""
    with RunRecorder(DirectoryStore(folder), "r", f"c-{submission or 'none'}") as recorder:
        recorder.event(with_submission(Event("submitted", "", 100.0), submission))
        if ended:
            end = end_event(Finish(RunState.FAILED, "the data is all wrong", 2), 3, 40)
            recorder.event(with_submission(end, submission))
            recorder.status(RunStatus("r", RunState.FAILED, 40, error="the data is all wrong"))


def test_a_restarted_controller_returns_the_outcome_that_its_submission_had(tmp_path: Path) -> None:
    _write(tmp_path, "old", ended=True)
    write_spec(DirectoryStore(tmp_path), "r", {})
    write_end(DirectoryStore(tmp_path), RunEnd("r", RunState.FAILED, 2, 40), 1)
    leader = _SecondLife(tmp_path, "old")
    leader._begin()
    outcome = leader.outcome
    assert outcome is not None and (outcome.state, outcome.exit_code, outcome.step) == ("FAILED", 2, 40)


@pytest.mark.parametrize("old", ["old", ""], ids=["of this raypp", "of an older raypp"])
def test_a_run_whose_controller_was_killed_before_it_recorded_anything_begins(tmp_path: Path, old: str) -> None:
    _write(tmp_path, old, ended=True)
    write_spec(DirectoryStore(tmp_path), "r", job_document(parse_job({"name": "r"})))
    leader = _SecondLife(tmp_path, "new")
    leader._begin()
    assert leader.outcome is None and leader.record.flush()
    reader = RunReader(DirectoryStore(tmp_path), "r")
    assert (reader.status() or {})["state"] == "PENDING"
    assert [event.details.get("submission_id", "") for event in reader.events() if event.kind == "submitted"] == [
        old,
        "new",
    ]
    leader.record.close()


def test_a_directory_that_the_head_does_not_share_with_the_submitting_machine_ends_the_run(tmp_path: Path) -> None:
    leader = _SecondLife(tmp_path, "new")
    leader.run()
    outcome = leader.outcome
    assert outcome is not None and (outcome.state, outcome.exit_code) == ("FAILED", 2)
    assert f"checkpoint.url: {tmp_path} on the head" in outcome.reason
    assert "does not hold what `raypp submit` wrote there" in outcome.reason


def test_the_status_of_an_earlier_submission_is_not_the_end_of_one_that_was_recorded(tmp_path: Path) -> None:
    """The controller was killed after it wrote the event of the submission and before it wrote its
    status."""
    _write(tmp_path, "old", ended=True)
    _write(tmp_path, "new", ended=False)
    record = _SecondLife(tmp_path, "new").record
    assert record.is_begun() and record.earlier_status() is None
    assert [event.kind for event in record.earlier_events()] == ["submitted"]
    record.close()
