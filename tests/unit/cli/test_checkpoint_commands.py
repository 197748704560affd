"""checkpoints list, verify and prune, on checkpoints in a directory."""

import hashlib
import json
import os
from pathlib import Path
from urllib.parse import quote

import pytest

from raypp.cli.main import run
from raypp.control.clusters.known_runs import RunPlace, remember_run
from raypp.state.checkpoint.commit import Commit, ObjectRecord, claim_next_attempt, newest_attempt, write_commit
from raypp.state.checkpoint.layout import commit_key, rank_key
from raypp.state.checkpoint.run_spec import write_spec
from raypp.storage.directory import DirectoryStore


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DirectoryStore:
    monkeypatch.setenv("RAYPP_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RAYPP_ADDRESS", raising=False)
    store = DirectoryStore(tmp_path / "store")
    write_spec(store, "kjv", {"checkpoint": {"keep": 2}})
    for step in (10, 20, 30):
        records = []
        for rank in range(2):
            key, data = rank_key("kjv", step, 1, rank), f"{step} {rank}".encode() * 100
            store.put(key, data)
            records.append(ObjectRecord(key, len(data), hashlib.sha256(data).hexdigest(), rank))
        mesh = {"pp": 2, "dp_replicate": 1, "fsdp": 1, "cp": 1, "tp": 1}
        write_commit(store, Commit("kjv", step, 1, mesh, {}, {}, tuple(records)))
    return store


def damage(store: DirectoryStore, key: str) -> None:
    path = store.root / key
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)


def test_list_shows_what_is_committed(store: DirectoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    store.put(commit_key("kjv", 40), b"garbage")
    assert run(["checkpoints", "list", f"{store.url}/kjv", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in rows] == [10, 20, 30, 40]
    assert rows[0]["checkpoint"] == f"{store.url}/kjv/step-00000010"
    assert (rows[0]["objects"], rows[0]["attempt"], rows[0]["bytes"]) == (2, 1, 800)
    assert "is not a valid COMMIT" in rows[3]["error"]
    assert run(["checkpoints", "list", f"{store.url}/kjv"]) == 0
    shown = capsys.readouterr().out
    assert "pp" in shown and "0.0 MB" in shown and "is not a valid COMMIT" in shown


def test_a_runs_bare_name_is_enough_where_it_was_submitted(
    store: DirectoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    remember_run(RunPlace(store.url, "kjv", None))
    assert run(["checkpoints", "verify", "kjv/step-10"]) == 0
    assert "step 10: intact" in capsys.readouterr().out


def test_verify_names_the_damaged_object_and_exits_1(store: DirectoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    bad = rank_key("kjv", 20, 1, 1)
    damage(store, bad)
    assert run(["checkpoints", "verify", f"{store.url}/kjv"]) == 1
    printed = capsys.readouterr()
    assert f"{bad}: is corrupt" in printed.err
    assert printed.out.count("intact") == 2
    assert run(["checkpoints", "verify", f"{store.url}/kjv/step-00000030"]) == 0
    capsys.readouterr()
    assert run(["checkpoints", "verify", f"{store.url}/kjv/step-20", "--json"]) == 1
    (result,) = json.loads(capsys.readouterr().out)
    assert (result["ok"], [problem["object"] for problem in result["problems"]]) == (False, [bad])


@pytest.mark.parametrize(
    ("argument", "said"),
    [("{}/kjv/step-99", "committed steps: 10, 20, 30"), ("{}/other", "there is no run 'other'"), ("{}/No", "'No'")],
)
def test_what_is_not_there_is_reported(
    store: DirectoryStore, capsys: pytest.CaptureFixture[str], argument: str, said: str
) -> None:
    assert run(["checkpoints", "verify", argument.format(store.url)]) == 2
    assert said in capsys.readouterr().err


def test_prune_keeps_as_many_as_the_job_says(store: DirectoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoints", "prune", f"{store.url}/kjv", "--dry-run"]) == 0
    assert "would remove 3 objects" in capsys.readouterr().out
    assert run(["checkpoints", "prune", f"{store.url}/kjv"]) == 0
    assert "removed 3 objects" in capsys.readouterr().out
    assert run(["checkpoints", "verify", f"{store.url}/kjv", "--json"]) == 0
    assert [row["step"] for row in json.loads(capsys.readouterr().out)] == [20, 30]


def test_prune_removes_nothing_when_the_newest_is_damaged(
    store: DirectoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(store, rank_key("kjv", 30, 1, 0))
    assert run(["checkpoints", "prune", f"{store.url}/kjv", "--keep", "1"]) == 1
    assert "nothing was removed" in capsys.readouterr().err
    assert len(list(store.list("kjv/step-"))) == 9


def test_prune_finds_what_broken_off_attempts_left_and_spares_the_newest(
    store: DirectoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = max(1, newest_attempt(store, "kjv"))
    while newest < 3:
        newest = claim_next_attempt(store, "kjv")
    incoming = store.root / f".raypp-incoming-{os.geteuid()}"
    for attempt in (2, 3):
        (incoming / f"{quote(rank_key('kjv', 40, attempt, 0), safe='')}~0123456789abcdef").write_bytes(b"half")
    store.put(rank_key("kjv", 40, 2, 1), b"whole, and never committed")
    assert run(["checkpoints", "prune", f"{store.url}/kjv", "--keep", "9", "--dry-run", "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert (reported["objects"], reported["uploads"], reported["under_way"], reported["steps"]) == (1, 1, 1, [])
    assert run(["checkpoints", "prune", f"{store.url}/kjv", "--keep", "9"]) == 0
    text = capsys.readouterr().out
    assert "removed 1 unfinished uploads and 1 uncommitted objects" in text
    assert "kept 1 uploads of the newest attempt" in text
    assert [left.key for left in store.unfinished()] == [rank_key("kjv", 40, 3, 0)]
    assert store.head(rank_key("kjv", 40, 2, 1)) is None


def test_prune_counts_no_weights_of_an_import_as_freed(
    store: DirectoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    claim_next_attempt(store, "imported")
    key = rank_key("imported", 0, 1, 0)
    store.put(key, b"weights")
    records = (ObjectRecord(key, 7, hashlib.sha256(b"weights").hexdigest(), 0),)
    write_commit(store, Commit("imported", 0, 1, {"pp": 1}, {}, {}, records))
    claim_next_attempt(store, "imported")
    command = ["checkpoints", "prune", f"{store.url}/imported", "--keep", "1", "--keep-every", "0"]
    assert run([*command, "--dry-run", "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert (reported["steps"], reported["objects"], reported["bytes"], reported["uploads"]) == ([], 0, 0, 0)
