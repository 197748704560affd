"""Tests writers of a directory store that are killed, and a full disk."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from programs import run_program

from raypp.state.checkpoint.commit import claim_next_attempt
from raypp.state.checkpoint.layout import rank_key
from raypp.state.checkpoint.retention import find_leftovers, remove_leftovers
from raypp.state.run_records.reader import RunReader
from raypp.storage.directory import DirectoryStore

_SLOW_WRITER = """
import sys, time
from raypp.storage.directory import DirectoryStore
from pathlib import Path
def chunks():
    for _ in range(1000):
        yield bytes(1 << 16)
        print("wrote", flush=True)
        time.sleep(0.01)
DirectoryStore(Path(sys.argv[1])).put_stream(sys.argv[2], chunks(), 1000 << 16)
"""


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


def kill_a_writer(store: DirectoryStore, key: str) -> None:
    command = [sys.executable, "-c", _SLOW_WRITER, str(store.root), key]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for _ in range(3):
            assert writer.stdout.readline() == "wrote\n"
        writer.send_signal(signal.SIGKILL)


def test_a_writer_that_is_killed_in_the_middle_leaves_no_object_and_is_found(store: DirectoryStore) -> None:
    run = "kjv"
    assert claim_next_attempt(store, run) == 1
    key = rank_key(run, 10, 1, 0)
    kill_a_writer(store, key)
    assert store.head(key) is None
    assert list(store.list()) == [info for info in store.list() if "attempts/" in info.key]
    assert [left.key for left in store.unfinished(f"{run}/step-")] == [key]
    assert list(store.unfinished("another/")) == []

    assert [left.key for left in find_leftovers(store, run).under_way] == [key]  # attempt 1 may still be running
    assert claim_next_attempt(store, run) == 2
    with_it = find_leftovers(store, run)
    assert [left.key for left in with_it.uploads] == [key]
    remove_leftovers(store, run, with_it)
    assert list(store.unfinished()) == []
    left = sorted(path.name for path in store.root.rglob("*") if path.is_file())
    assert left == ["attempt-1", "attempt-2"]


_ON_A_FULL_DISK = """
import subprocess, sys
from pathlib import Path
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", sys.argv[1]], check=True)
from raypp.storage import StoreError
from raypp.storage.directory import DirectoryStore
store = DirectoryStore(Path(sys.argv[1]) / "store")
store.put("run/step-00000001/a", bytes(1 << 20))
for put in (lambda: store.put("run/step-00000002/big", bytes(8 << 20)),
            lambda: store.put_stream("run/step-00000002/big", (bytes(1 << 16) for _ in range(128)), 8 << 20)):
    try:
        put()
        sys.exit("it fitted")
    except StoreError as error:
        assert "run/step-00000002/big: the disk is full" in str(error), error
assert [info.key for info in store.list()] == ["run/step-00000001/a"]
assert list(store.unfinished()) == []
assert store.get("run/step-00000001/a") == bytes(1 << 20)
store.put("run/step-00000002/a", bytes(1 << 20))
store.put("run/step-00000002/COMMIT", b"{}", if_absent=True)
print("fine")
"""


@pytest.mark.slow
def test_a_full_disk_is_reported_with_the_object_and_leaves_what_was_there_and_no_half(tmp_path: Path) -> None:
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    try:
        allowed = run_program(*unshare, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path), code=None)
    except FileNotFoundError:
        pytest.skip("no `unshare` on this machine")
    if allowed.returncode:
        pytest.skip(f"this machine lets nobody mount a small disk of their own: {allowed.stderr.strip()}")
    assert run_program(*unshare, sys.executable, "-c", _ON_A_FULL_DISK, str(tmp_path)).stdout == "fine\n"


WRITER = """
import sys
from raypp.state.run_records.recorder import RunRecorder
from raypp.state.run_records.json_lines import LogLine
from raypp.records import StepReport
from raypp.storage import open_store
recorder = RunRecorder(open_store(sys.argv[1]), "r", sys.argv[2], interval_s=0.005, part_bytes=3000)
step = 0
while True:
    step += 1
    recorder.step(StepReport(step, 1 / step, 0.5, 10, 8, 0.1, 100.0, int(sys.argv[2][1:])))
    recorder.log(LogLine("x" * 200, 0, "pp0", 1))
    if step % 50 == 0:
        recorder.flush()
        print(step, flush=True)
"""


@pytest.mark.gate
def test_a_writer_that_is_killed_leaves_whole_lines_and_every_flushed_step(store: DirectoryStore) -> None:
    """Kills the writer with kill -9 during a write, in three consecutive lives."""
    for attempt in (1, 2, 3):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, store.url, f"a{attempt}"], stdout=subprocess.PIPE, text=True
        )
        flushed = [int(process.stdout.readline()) for _ in range(3)][-1]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        reader = RunReader(store, "r")
        rows = reader.history()
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
        assert len(rows) >= flushed
        assert {row["attempt"] for row in rows} == {attempt}
        assert all(row["loss"] == 1 / row["step"] for row in rows)
        assert len(list(reader.logs())) >= flushed
        assert reader.damaged == 0
