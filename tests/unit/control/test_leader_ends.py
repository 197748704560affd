"""However a run ends, its processes end; and records of an earlier submission do not end it."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from raypp.control import leader as leader_module
from raypp.control import placement
from raypp.control.leader import Leader
from raypp.control.machine import Claimed, Machine, Seated, Start, step
from raypp.control.machine_log import MachineLog
from raypp.control.protocol import RunRequest
from raypp.job.load import job_document, parse_job
from raypp.records import Event, RunState, StepReport
from raypp.retry import Backoff
from raypp.state.checkpoint.commit import claim_attempt
from raypp.state.checkpoint.run_spec import RunEnd, write_end, write_spec
from raypp.state.run_records.reader import RunReader
from raypp.state.run_records.recorder import RunRecorder
from raypp.state.run_records.status import RunStatus
from raypp.storage import ObjectInfo, StoreError, open_store
from raypp.storage.directory import DirectoryStore


class _Failing(Leader):
    """Fails at its first turn, and has processes that cannot be ended."""

    def __init__(self, store: Path, submission: str = "", *, restarted: bool = False) -> None:
        sections = {"checkpoint": {"url": str(store)}, "resources": {"device": "cpu"}}
        job = parse_job({"name": "r", "recovery": {"orphan_timeout_s": 60}, **sections})
        super().__init__(RunRequest("r", job_document(job), submission), None, restarted=restarted)
        self.ended = 0

    def _begin(self) -> None:
        raise KeyError(0)

    def _end_processes(self) -> None:
        self.ended += 1
        raise AttributeError("a worker without a name")


def test_a_run_whose_processes_cannot_be_ended_ends_all_the_same(tmp_path: Path) -> None:
    leader = _Failing(tmp_path)
    leader.run()
    assert leader.ended == 1
    outcome = leader.outcome
    assert outcome is not None and (outcome.state, outcome.exit_code) == ("FAILED", 1)
    assert outcome.reason.startswith("the controller failed: KeyError: 0 (at ")


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

    _begin = Leader._begin

    def _turn(self) -> None:
        self.outcome = RunEnd("r", RunState.RUNNING, 0, self.record.step)


def test_a_controller_that_restarts_while_the_store_is_away_ends_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store comes back later than a retry usually lasts, but before the ranks would give up."""
    _write_machine(tmp_path, 0)
    with RunRecorder(open_store(str(tmp_path)), "r", "c-first") as recorder:
        recorder.event(Event("submitted", "submitted", attempt=0))
        recorder.step(StepReport(7, 1.0, 1.0, 10, 10, 0.1, 100.0, 1))
        recorder.status(RunStatus("r", RunState.RUNNING, steps=20, step=5, attempt=1))
    store = _Away(tmp_path)
    monkeypatch.setattr(leader_module, "open_store", lambda url: store)
    monkeypatch.setattr(leader_module, "_STORE_RETRY", Backoff(timeout_s=0.02, first_s=0.02, longest_s=0.02))
    monkeypatch.setattr(leader_module, "find_workers", lambda run: [])
    monkeypatch.setattr(placement, "existing_group", lambda name: None)
    leader = _Restarted(tmp_path, restarted=True)
    leader.run()
    leader.record.close()
    assert leader.ended == 0
    assert all(store.asked[key] > _REFUSED for key in ("r/status.json", "r/events/", "r/history/", "r/machine/0-"))
    outcome = leader.outcome
    assert outcome is not None and (outcome.state, outcome.step) == ("RUNNING", 7)
    kinds = [event.kind for event in RunReader(DirectoryStore(tmp_path), "r").events()]
    assert kinds == ["submitted", "controller_restarted"]


class _SecondLife(_Failing):
    """Was restarted by Ray, and has no processes to end."""

    _begin = Leader._begin

    def __init__(self, store: Path, submission: str) -> None:
        super().__init__(store, submission, restarted=True)

    def _end_processes(self) -> None:
        pass


def _write_machine(folder: Path, number: int) -> None:
    machine = Machine()
    for event in (Start(0, None, device="cpu"), Claimed(1), Seated()):
        machine, _ = step(machine, event)
    log = MachineLog(DirectoryStore(folder), "r", "c-first")
    log.open(number)
    log.put(machine)
    log.write()


def _write_failed(folder: Path) -> None:
    """Writes a first submission that failed, as raypp did when it had no machine in the store."""
    store = DirectoryStore(folder)
    of_old = {"submission_id": "old"}
    write_spec(store, "r", job_document(parse_job({"name": "r"})))
    claim_attempt(store, "r", 1)
    with RunRecorder(store, "r", "c-old") as recorder:
        recorder.event(Event("submitted", "", 100.0, details=of_old))
        recorder.event(Event("failed", "the data is all wrong", 200.0, 1, 40, details={**of_old, "exit_code": 2}))
        recorder.step(StepReport(40, 1.0, 1.0, 10, 10, 0.1, 100.0, 1))
        recorder.status(RunStatus("r", RunState.FAILED, 40, error="the data is all wrong"))


def test_a_restarted_controller_returns_the_outcome_that_its_submission_had(tmp_path: Path) -> None:
    _write_failed(tmp_path)
    _write_machine(tmp_path, 1)
    write_end(DirectoryStore(tmp_path), RunEnd("r", RunState.FAILED, 2, 40), 1)
    leader = _SecondLife(tmp_path, "old")
    leader._begin()
    outcome = leader.outcome
    assert outcome is not None and (outcome.state, outcome.exit_code, outcome.step) == ("FAILED", 2, 40)


def test_a_run_whose_controller_was_killed_before_it_recorded_anything_begins(tmp_path: Path) -> None:
    _write_failed(tmp_path)
    _write_machine(tmp_path, 1)
    write_end(DirectoryStore(tmp_path), RunEnd("r", RunState.FAILED, 2, 40, attempt=1), 1)
    write_spec(DirectoryStore(tmp_path), "r", job_document(parse_job({"name": "r"})), 2)
    leader = _SecondLife(tmp_path, "new")
    leader._begin()
    assert leader.outcome is None and leader.record.flush()
    reader = RunReader(DirectoryStore(tmp_path), "r")
    assert (reader.status() or {})["state"] == "PENDING"
    assert [event.kind for event in reader.events()] == ["submitted", "failed", "submitted"]
    assert [row["step"] for row in reader.history()] == [40]
    left = MachineLog(DirectoryStore(tmp_path), "r", "c-next").open(2)
    assert left is not None and (left.attempt, left.device) == (1, "cpu")
    leader.record.close()


def test_a_directory_that_the_head_does_not_share_with_the_submitting_machine_ends_the_run(tmp_path: Path) -> None:
    leader = _SecondLife(tmp_path, "new")
    leader.run()
    outcome = leader.outcome
    assert outcome is not None and (outcome.state, outcome.exit_code) == ("FAILED", 2)
    assert f"checkpoint.url: {tmp_path} on the head" in outcome.reason
    assert "does not hold what `raypp submit` wrote there" in outcome.reason


def test_the_status_of_an_earlier_submission_is_not_the_end_of_one_that_was_recorded(tmp_path: Path) -> None:
    """The controller was killed between the event of the submission and its status."""
    _write_failed(tmp_path)
    write_spec(DirectoryStore(tmp_path), "r", {}, 2)
    _write_machine(tmp_path, 2)
    record = _SecondLife(tmp_path, "new").record
    left = record.machines.open(2)
    assert left is not None
    record.resume(left, None)
    assert (record.status().state, record.status().error) == (RunState.PENDING, None)
    record.close()
