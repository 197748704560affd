"""The recorder: nothing is lost and nothing raises, whatever the store does."""

import json
import time
from pathlib import Path

import pytest

from raypp.records import Coordinates, Event, RunState, StepReport
from raypp.state.run_records import recorder as recorder_module
from raypp.state.run_records.json_lines import LogLine
from raypp.state.run_records.reader import RunReader
from raypp.state.run_records.recorder import RunRecorder
from raypp.state.run_records.status import RankStatus, RunStatus
from raypp.storage import open_store


def report(step: int, attempt: int = 1, loss: float = 1.0) -> StepReport:
    return StepReport(step, loss, 0.5, 1000, 64, 0.1, 10000.0, attempt, 1e-3, {"pipeline": 0.08})


def wait_until(true, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


@pytest.fixture
def store(tmp_path: Path):
    return open_store(str(tmp_path / "store"))


def test_what_was_recorded_is_read_back_after_a_flush(store):
    with RunRecorder(store, "r", "a1", interval_s=60) as recorder:
        event = Event("committed", "step 2 is durable", attempt=1, step=2, rank=0, node="n1", details={"seconds": 0.5})
        line = LogLine("hello", 1, "pp0-fsdp1", 1)
        recorder.step(report(1))
        recorder.event(event)
        recorder.log(line)
        assert recorder.flush()
        reader = RunReader(store, "r")
        assert reader.reports() == [report(1)]
        assert reader.events() == [event]
        assert list(reader.logs()) == [line]


def test_records_appear_by_themselves_within_the_interval(store):
    with RunRecorder(store, "r", "a1", interval_s=0.1) as recorder:
        recorder.step(report(1))
        wait_until(lambda: RunReader(store, "r").history(), 5)


def test_an_event_does_not_wait_for_the_interval(store):
    with RunRecorder(store, "r", "a1", interval_s=60) as recorder:
        recorder.event(Event("rank_failed", "rank 3 died"))
        wait_until(lambda: RunReader(store, "r").events(), 5)


def test_the_status_is_rewritten_as_a_sign_of_life_also_when_the_clock_is_set_back(store, monkeypatch):
    monkeypatch.setattr(recorder_module, "HEARTBEAT_S", 0.1)
    with RunRecorder(store, "r", "a1", interval_s=0.02) as recorder:
        recorder.status(RunStatus("r", RunState.RUNNING, step=1))
        wait_until(lambda: store.head("r/status.json") is not None)
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() - 3600)
        before = json.loads(store.get("r/status.json"))
        wait_until(lambda: json.loads(store.get("r/status.json")) != before)


def test_a_change_of_state_does_not_wait_for_the_interval(store):
    with RunRecorder(store, "r", "a1", interval_s=60) as recorder:
        recorder.status(RunStatus("r", RunState.PENDING))
        wait_until(lambda: (RunReader(store, "r").status() or {}).get("state") == "PENDING", 5)
        recorder.status(RunStatus("r", RunState.RUNNING))
        wait_until(lambda: RunReader(store, "r").status()["state"] == "RUNNING", 5)


def test_full_parts_are_followed_by_new_ones_and_never_touched_again(store, tmp_path):
    with RunRecorder(store, "r", "a1", interval_s=60, part_bytes=1000) as recorder:
        for step in range(1, 11):
            recorder.step(report(step))
            recorder.flush()
        first = tmp_path / "store" / "r" / "history" / "a1-00001.jsonl"
        before = first.stat().st_mtime_ns
        for step in range(11, 21):
            recorder.step(report(step))
        recorder.flush()
        assert first.stat().st_mtime_ns == before
    parts = sorted(info.key for info in store.list("r/history/"))
    assert parts[:2] == ["r/history/a1-00001.jsonl", "r/history/a1-00002.jsonl"]
    assert len(parts) > 3
    assert [row["step"] for row in RunReader(store, "r").history()] == list(range(1, 21))


def test_an_unchanged_part_is_not_rewritten(store, tmp_path):
    with RunRecorder(store, "r", "a1", interval_s=60) as recorder:
        recorder.step(report(1))
        recorder.flush()
        part = tmp_path / "store" / "r" / "history" / "a1-00001.jsonl"
        before = part.stat().st_mtime_ns
        recorder.log(LogLine("only a log line"))
        recorder.flush()
        assert part.stat().st_mtime_ns == before


def test_a_writer_of_a_name_used_before_goes_on_after_its_parts(store):
    for start in (1, 11):
        with RunRecorder(store, "r", "a1", interval_s=60) as recorder:
            recorder.step(report(start))
    assert [row["step"] for row in RunReader(store, "r").history()] == [1, 11]


def test_two_writers_of_one_name_at_once_lose_nothing(store):
    one = RunRecorder(store, "r", "a1", interval_s=60)
    two = RunRecorder(store, "r", "a1", interval_s=60)
    for step in range(1, 6):
        one.step(report(2 * step))
        two.step(report(2 * step + 1))
        assert one.flush()
        assert two.flush()
    one.close()
    two.close()
    assert [row["step"] for row in RunReader(store, "r").history()] == list(range(2, 12))


def test_a_write_that_was_stored_although_it_failed_is_not_doubled(store):
    """The store stored the part but the response was lost: the recorder retries with more lines."""
    event = Event("submitted", "x", time=1.0)
    with RunRecorder(store, "r", "c1", interval_s=60) as recorder:
        recorder.event(event)
        recorder.flush()
        recorder._events._written = 0
        recorder.event(Event("seated", "y", time=2.0))
        recorder.flush()
    assert [event.kind for event in RunReader(store, "r").events()] == ["submitted", "seated"]
    assert len(list(store.list("r/events/"))) == 1


def test_a_store_that_is_away_for_a_while_costs_no_step_and_no_event(tmp_path):
    place = tmp_path / "store"
    place.write_text("a file where the directory should be")
    recorder = RunRecorder(open_store(str(place)), "r", "a1", interval_s=0.05)
    recorder.status(RunStatus("r", RunState.RUNNING))
    for step in range(1, 201):
        recorder.step(report(step))
        recorder.event(Event("committed", f"step {step}", time=float(step)))
    assert not recorder.flush()
    assert str(place) in recorder.last_error
    place.unlink()
    assert recorder.close()
    assert recorder.last_error is None
    reader = RunReader(open_store(str(place)), "r")
    assert [row["step"] for row in reader.history()] == list(range(1, 201))
    assert len(reader.events()) == 200
    assert reader.status()["state"] == "RUNNING"


def test_log_lines_are_bounded_while_the_store_is_away_and_the_loss_is_said(tmp_path):
    place = tmp_path / "store"
    place.write_text("")
    recorder = RunRecorder(open_store(str(place)), "r", "a1", interval_s=0.05, log_memory_bytes=5000, part_bytes=2000)
    for number in range(1000):
        recorder.log(LogLine(f"line {number}", 0, "pp0"))
    assert recorder._logs._waiting_bytes <= 5000
    place.unlink()
    assert recorder.close()
    lines = [line.text for line in RunReader(open_store(str(place)), "r").logs()]
    assert lines[-1] == "line 999"
    notices = [text for text in lines if "log lines were dropped here" in text]
    dropped = sum(int(text.split()[0]) for text in notices)
    assert dropped > 900 and len(lines) - len(notices) + dropped == 1000


def test_close_gives_up_on_a_dead_store_in_time(tmp_path):
    place = tmp_path / "store"
    place.write_text("")
    recorder = RunRecorder(open_store(str(place)), "r", "a1", interval_s=0.05)
    recorder.step(report(1))
    assert not recorder.close(timeout_s=0.2), "it does not wait for the store to come back"
    assert recorder.last_error


def test_details_that_are_no_json_do_not_raise(store):
    with RunRecorder(store, "r", "a1") as recorder:
        recorder.event(Event("odd", "x", details={"path": Path("/x"), ("a", "b"): 1, "n": {1, 2}.__class__}))
    assert RunReader(store, "r").events()[0].details["path"] == "/x"


def test_the_status_of_many_ranks_is_written_less_often_but_a_new_state_and_a_flush_at_once(store):
    ranks = tuple(RankStatus(rank, Coordinates(fsdp=rank)) for rank in range(2000))
    with RunRecorder(store, "r", "a1", interval_s=0.05) as recorder:
        recorder.status(RunStatus("r", RunState.RUNNING, step=1, ranks=ranks))
        wait_until(lambda: (RunReader(store, "r").status() or {}).get("step") == 1)
        recorder.status(RunStatus("r", RunState.RUNNING, step=2, ranks=ranks))
        recorder.event(Event("committed", "more rounds than one", attempt=1))
        wait_until(lambda: recorder.durable == 1)
        assert RunReader(store, "r").status()["step"] == 1
        assert recorder.flush()
        assert RunReader(store, "r").status()["step"] == 2
        recorder.status(RunStatus("r", RunState.STOPPING, step=3, ranks=ranks))
        wait_until(lambda: RunReader(store, "r").status()["step"] == 3, 2.0)


def test_the_status_in_the_store_has_the_keys_of_the_contract(store):
    rank = RankStatus(1, Coordinates(pp=1), "n1", 42, "running")
    status = RunStatus("r", RunState.RUNNING, 3, 9, 1.5, 100.0, 1, 0, "s3://b/r/step-2", {"pp": 2}, (rank,))
    before = time.time()
    with RunRecorder(store, "r", "a1") as recorder:
        recorder.status(status)
    stored = RunReader(store, "r").status()
    assert before <= stored.pop("updated_at") <= time.time()
    assert stored == {
        "run": "r",
        "state": "RUNNING",
        "step": 3,
        "steps": 9,
        "loss": 1.5,
        "tokens_per_s": 100.0,
        "attempt": 1,
        "restarts": 0,
        "checkpoint": "s3://b/r/step-2",
        "mesh": {"pp": 2},
        "ranks": [
            {
                "rank": 1,
                "coordinates": {"pp": 1, "dp_replicate": 0, "fsdp": 0, "cp": 0, "tp": 0},
                "node": "n1",
                "pid": 42,
                "state": "running",
            }
        ],
        "error": None,
    }
