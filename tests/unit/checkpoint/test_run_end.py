"""How a submission ended is one object, and everybody reads it."""

import time
from pathlib import Path

import pytest

from raypp.control.clusters.known_runs import RunPlace
from raypp.control.find_run import ended_status, present_status
from raypp.errors import CheckpointError
from raypp.records import RunState
from raypp.state.checkpoint.run_spec import RunEnd, read_end, write_end, write_spec
from raypp.state.run_records.reader import RunReader
from raypp.state.run_records.recorder import RunRecorder
from raypp.state.run_records.status import RunStatus
from raypp.storage import AlreadyExists
from raypp.storage.directory import DirectoryStore

NOBODY = "http://127.0.0.1:1"


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    store = DirectoryStore(tmp_path)
    write_spec(store, "r", {})
    return store


def status_of(store: DirectoryStore, submitted_at: float | None = None) -> dict[str, object]:
    return present_status(RunPlace(store.url, "r", NOBODY, "job", submitted_at), RunReader(store, "r"))


def write_status(store: DirectoryStore, state: RunState, **more: object) -> None:
    with RunRecorder(store, "r", f"c-{time.monotonic_ns()}") as recorder:
        recorder.status(RunStatus("r", state, **more))  # type: ignore[arg-type]


def test_the_first_end_of_a_submission_counts(store: DirectoryStore) -> None:
    assert read_end(store, "r") is None and ended_status(RunReader(store, "r")) is None
    first = write_end(store, RunEnd("r", RunState.FAILED, 4, 7, reason="no room", attempt=2), 1)
    assert write_end(store, RunEnd("r", RunState.SUCCEEDED, 0, 9), 1) == first == read_end(store, "r")
    status = status_of(store)
    assert (status["state"], status["step"], status["error"]) == ("FAILED", 7, "no room")


def test_a_resumed_run_has_not_ended(store: DirectoryStore) -> None:
    write_status(store, RunState.STOPPED, step=5)
    write_end(store, RunEnd("r", RunState.STOPPED, 0, 5, attempt=1), 1)
    assert status_of(store)["state"] == "STOPPED"
    write_spec(store, "r", {}, 2)
    with pytest.raises(AlreadyExists, match="resumed by somebody else"):
        write_spec(store, "r", {}, 2)
    assert ended_status(RunReader(store, "r")) is None
    status = status_of(store, time.time())
    assert (status["state"], status["step"], status["error"]) == ("PENDING", 5, None)
    write_end(store, RunEnd("r", RunState.SUCCEEDED, 0, 9, attempt=2), 2)
    assert (status_of(store)["state"], status_of(store)["step"]) == ("SUCCEEDED", 9)


def test_an_end_counts_more_than_a_status_that_was_never_brought_up_to_date(store: DirectoryStore) -> None:
    write_status(store, RunState.RUNNING, step=5)
    path = Path(store.url) / "r" / "status.json"
    path.write_text(path.read_text().replace('"updated_at"', '"updated_at": 1.0, "was"'))
    assert status_of(store)["state"] == "FAILED", "nobody leads it"
    write_end(store, RunEnd("r", RunState.SUCCEEDED, 0, 6, attempt=1), 1)
    assert (status_of(store)["state"], status_of(store)["step"]) == ("SUCCEEDED", 6)


@pytest.mark.parametrize("damage", ["{", '{"run": "r"}', '{"run": "r", "state": "FAILED", "exit_code": -1}'])
def test_a_damaged_end_is_named_with_what_is_known(store: DirectoryStore, damage: str) -> None:
    write_status(store, RunState.STOPPED, step=5)
    (Path(store.url) / "r" / "end.json").write_text(damage)
    with pytest.raises(CheckpointError, match=r"r/end\.json"):
        read_end(store, "r")
    status = status_of(store)
    assert (status["state"], status["step"]) == ("STOPPED", 5)
    assert "r/end.json" in str(status["error"]) and "its status says STOPPED" in str(status["error"])
