"""`raypp delete`: a run that has ended goes, with all that is its own and nothing else."""

import time
from pathlib import Path

import pytest

from raypp.cli.main import run
from raypp.control.clusters.known_runs import RunPlace, known_runs, remember_run
from raypp.records import RunState
from raypp.state.checkpoint.layout import commit_key
from raypp.state.checkpoint.run_spec import RunEnd, write_end, write_spec
from raypp.state.run_records.recorder import RunRecorder
from raypp.state.run_records.status import RunStatus
from raypp.storage.directory import DirectoryStore


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DirectoryStore:
    """Runs `mine` and `mine-2`, and below the name of the first a run of another store."""
    monkeypatch.setenv("RAYPP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RAYPP_ADDRESS", "http://127.0.0.1:1")
    store = DirectoryStore(tmp_path / "store")
    for name in ("mine", "mine-2"):
        write_spec(store, name, {"name": name})
        with RunRecorder(store, name, "a1", interval_s=60) as recorder:
            recorder.status(RunStatus(name, RunState.RUNNING, 20, 20))
        for key in ("attempts/attempt-1", "machine/1-000001.json", "files/0123456789abcdef/t.jinja", "trackers/id"):
            store.put(f"{name}/{key}", b"x")
        for step in (10, 20):
            store.put(f"{name}/step-{step:08d}/attempt-1/rank-00000.safetensors", bytes(2048))
            store.put(commit_key(name, step), b"{}")
        remember_run(RunPlace(store.url, name, None, "", time.time()))
    store.put("mine/other/spec.json", b"{}")
    return store


def _end(store: DirectoryStore) -> None:
    write_end(store, RunEnd("mine", RunState.STOPPED, 0, 20, attempt=1), 1)
    with RunRecorder(store, "mine", "a1", interval_s=60) as recorder:
        recorder.status(RunStatus("mine", RunState.STOPPED, 20, 20))


def _keys(store: DirectoryStore) -> set[str]:
    return {info.key for info in store.list()}


def test_a_run_that_lives_is_refused(store: DirectoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    before = _keys(store)
    assert run(["delete", "mine", "--yes"]) == 2
    reported = capsys.readouterr().err
    assert "mine is RUNNING" in reported and "raypp stop mine" in reported and _keys(store) == before


def test_a_run_that_has_ended_goes_with_its_own_objects_only(
    store: DirectoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    _end(store)
    before = _keys(store)
    assert run(["delete", "mine", "--dry-run"]) == 0
    would = capsys.readouterr().out
    assert would.startswith("mine: would free 4.") and "2 checkpoints, " in would and "1 others there" in would
    assert run(["delete", "mine"]) == 2  # nobody can be asked
    assert "--yes" in capsys.readouterr().err and _keys(store) == before
    assert run(["delete", "mine", "--yes"]) == 0
    assert capsys.readouterr().out == would.replace("would free", "freed")
    assert _keys(store) == {key for key in before if key.startswith("mine-2/")} | {"mine/other/spec.json"}
    assert [place.name for place in known_runs()] == ["mine-2"]
    assert run(["status", "mine"]) == 2


def test_an_interrupted_deletion_leaves_no_checkpoint_and_keeps_the_name(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _end(store)
    delete = DirectoryStore.delete
    calls: list[list[str]] = []

    def interrupted(self: DirectoryStore, keys: list[str]) -> None:
        if calls:
            raise KeyboardInterrupt
        calls.append(keys)
        delete(self, keys)

    monkeypatch.setattr(DirectoryStore, "delete", interrupted)
    assert run(["delete", "mine", "--yes"]) == 130
    left = _keys(store)
    assert "mine/spec.json" in left and not any(key.startswith("mine/") and key.endswith("COMMIT") for key in left)
    monkeypatch.setattr(DirectoryStore, "delete", delete)
    assert run(["delete", "mine", "-y"]) == 0
