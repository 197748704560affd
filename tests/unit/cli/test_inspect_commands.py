"""status, list, history, events and logs, on the records of runs in a directory."""

import dataclasses
import json
import math
import time
from types import SimpleNamespace

import pytest

from raypp.cli import inspect_commands
from raypp.cli.main import run
from raypp.control import find_run
from raypp.control.clusters.known_runs import RunPlace, remember_run
from raypp.control.run_record import RunRecord
from raypp.job.load import parse_job
from raypp.records import Coordinates, Event, RunState, StepReport
from raypp.state.run_records.json_lines import LogLine, document
from raypp.state.run_records.recorder import RunRecorder
from raypp.state.run_records.status import STATUS_KEYS, RankStatus, RunStatus

MESH = {"pp": 2, "dp_replicate": 1, "fsdp": 2, "cp": 1, "tp": 1, "ep": 1}
RANKS = tuple(
    RankStatus(rank, Coordinates(pp=rank // 2, fsdp=rank % 2), f"node{rank // 2}", 100 + rank, "running")
    for rank in range(4)
)
STATUS = RunStatus("kjv", RunState.RUNNING, 4, 10, 2.5, 12345.0, 2, 1, "DIR/kjv/step-00000002", MESH, RANKS)


def report(step: int, attempt: int = 1, loss: float = 2.0) -> StepReport:
    return StepReport(step, loss, 0.5, 1000, 64, 0.1, 10000.0, attempt)


def record(store, status=STATUS, events=(), logs=(), steps=()):
    with RunRecorder(store, status.run, f"a{status.attempt}", interval_s=60) as recorder:
        for step in steps:
            recorder.step(step)
        for event in events:
            recorder.event(event)
        for line in logs:
            recorder.log(line)
        recorder.status(status)


@pytest.fixture
def kjv(store):
    """Returns URL/NAME of a run in its second attempt."""
    steps = [report(step, 1, 1 / 3) for step in (1, 2, 3)] + [report(step, 2, 0.1 + step) for step in (3, 4)]
    events = [
        Event("submitted", "sent to the cluster", 100.0),
        Event("rank_failed", "rank 3 died", 200.0, 1, 3, 3, "node1", {"cause": "signal 9"}),
    ]
    logs = [
        LogLine("from one", 1, "pp0-fsdp1", 1, time=1.0),
        LogLine("from [bold]zero[/bold]", 0, "pp0-fsdp0", 1, time=2.0),
    ]
    record(store, STATUS, events, logs, steps)
    return f"{store.url}/kjv"


def test_status_json_is_one_object_with_the_keys_of_the_contract(kjv, capsys):
    assert run(["status", kjv, "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert tuple(status) == STATUS_KEYS
    assert status["state"] == "RUNNING"
    assert status["ranks"][3] == {
        "rank": 3,
        "coordinates": {"pp": 1, "dp_replicate": 0, "fsdp": 1, "cp": 0, "tp": 0},
        "node": "node1",
        "pid": 103,
        "state": "running",
    }


def test_history_is_json_lines_with_the_last_attempts_values_at_full_precision(kjv, capsys):
    assert run(["history", kjv]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["step"], row["attempt"], row["loss"]) for row in rows] == [
        (1, 1, 1 / 3),
        (2, 1, 1 / 3),
        (3, 2, 0.1 + 3),
        (4, 2, 0.1 + 4),
    ]
    assert list(rows[0]) == ["step", "loss", "grad_norm", "tokens", "seq_len", "step_s", "tokens_per_s", "attempt"]


@pytest.mark.parametrize("retries", [0, 3])
def test_status_says_that_a_gpu_was_full_and_what_helps(store, capsys, retries):
    of_run = RunRecord(store, parse_job({"name": "kjv"}), "c-1")
    of_run.add_step(dataclasses.replace(report(1), alloc_retries=retries), 1)
    of_run.close()
    record(store, of_run.status())
    assert run(["status", f"{store.url}/kjv"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert ("waited, 3 times: lower train.micro_batch_size" in shown) == (retries > 0)


def test_a_loss_that_is_no_number_does_not_break_history_or_status(store, capsys):
    record(store, dataclasses.replace(STATUS, loss=math.nan), steps=[report(1, 2, math.nan), report(2, 2, math.inf)])
    assert run(["history", f"{store.url}/kjv"]) == 0
    assert [str(json.loads(line)["loss"]) for line in capsys.readouterr().out.splitlines()] == ["nan", "inf"]
    assert run(["status", f"{store.url}/kjv"]) == 0


def test_samples_are_printed_in_full_each_step_once(store, capsys):
    def sampled(step, text, attempt):
        samples = [{"prompt": "In the ", "text": text, "tokens": [1], "finish": "length"}, "no sample"]
        return Event("sampled", "In the |beg", 1.0, attempt, step, details={"samples": samples})

    events = [sampled(2, "be" + "g" * 300, 1), sampled(4, "old", 1), sampled(4, "a\n\x1b[2Jb", 2)]
    record(store, events=[*events, Event("sampled", "", step=5, details={"samples": "none"})])
    place = f"{store.url}/{STATUS.run}"
    assert run(["events", place, "--samples"]) == 0
    assert capsys.readouterr().out == f"step 2\nIn the be{'g' * 300}\n\nstep 4\nIn the a\n\\x1b[2Jb\n\n"
    assert run(["events", place, "--samples", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["step"], one["attempt"], one["samples"][0]["text"][:3]) for one in found] == [
        (2, 1, "beg"), (4, 2, "a\n\x1b"),
    ]  # fmt: skip


def test_events_show_time_rank_node_and_cause(kjv, capsys):
    assert run(["events", kjv]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for words in ("rank_failed", "rank 3 died: signal 9", "step 3", "rank 3", "on node1"):
        assert words in lines[1]
    assert run(["events", kjv, "--json"]) == 0
    events = json.loads(capsys.readouterr().out)
    assert events[1] == {
        "time": 200.0, "kind": "rank_failed", "message": "rank 3 died", "attempt": 1, "step": 3, "rank": 3,
        "node": "node1", "cause": "signal 9", "details": {"cause": "signal 9"},
    }  # fmt: skip


def test_logs_are_one_stream_tagged_with_coordinates(kjv, capsys):
    assert run(["logs", kjv]) == 0
    assert capsys.readouterr().out.splitlines() == ["pp0-fsdp1 | from one", "pp0-fsdp0 | from [bold]zero[/bold]"]
    assert run(["logs", kjv, "--rank", "1"]) == 0
    assert capsys.readouterr().out == "pp0-fsdp1 | from one\n"
    for tail, lines in (("0", []), ("1", ["pp0-fsdp0 | from [bold]zero[/bold]"])):
        assert run(["logs", kjv, "-n", tail]) == 0
        assert capsys.readouterr().out.splitlines() == lines


@pytest.fixture
def between_looks(monkeypatch):
    """What happens while a command that follows a run sleeps."""

    def happens(*steps):
        ahead = iter(steps)
        clock = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: next(ahead)()})
        monkeypatch.setattr(inspect_commands, "time", clock)
        monkeypatch.setattr(find_run, "time", clock)

    return happens


def test_logs_follow_prints_new_lines_until_the_run_ends(store, capsys, between_looks):
    recorder = RunRecorder(store, "kjv", "a1", interval_s=0.05)
    recorder.status(STATUS)
    recorder.log(LogLine("first", 0, "pp0", 1))
    recorder.flush()

    def more():
        recorder.log(LogLine("second", 0, "pp0", 1))
        recorder.flush()

    def end():
        recorder.log(LogLine("last", 0, "pp0", 1))
        recorder.status(dataclasses.replace(STATUS, state=RunState.SUCCEEDED))
        recorder.close()

    between_looks(more, end)
    assert run(["logs", f"{store.url}/kjv", "--follow", "--tail", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == ["pp0 | first", "pp0 | second", "pp0 | last"]


def test_status_watch_prints_each_change_until_the_run_ends(store, capsys, between_looks):
    recorder = RunRecorder(store, "kjv", "a1", interval_s=0.05)
    recorder.status(STATUS)
    recorder.flush()

    def end():
        recorder.status(dataclasses.replace(STATUS, state=RunState.STOPPED, step=5))
        recorder.close()

    between_looks(lambda: None, end)
    assert run(["status", f"{store.url}/kjv", "--watch", "--json"]) == 0
    seen = [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()]
    assert seen == ["RUNNING", "STOPPED"]


def test_a_run_that_has_been_silent_for_long_does_not_show_as_running(store, capsys):
    old = {**STATUS.as_dict(), "updated_at": time.time() - 3600}
    store.put("kjv/status.json", document(old))
    assert run(["status", f"{store.url}/kjv", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["state"] == "FAILED"
    assert "no sign of life since" in status["error"]
    assert {rank["state"] for rank in status["ranks"]} == {"gone"}


def test_a_run_without_a_status_yet_is_pending(store, capsys):
    store.put("kjv/spec.json", b"{}")
    assert run(["status", f"{store.url}/kjv", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "PENDING"


def test_a_run_known_here_is_found_by_its_bare_name_and_listed(kjv, store, capsys):
    remember_run(RunPlace(store.url, "kjv", None, "", time.time() - 60))
    remember_run(RunPlace(store.url, "broken", None, "", time.time() - 3600))
    store.put("broken/status.json", b"<html>")
    assert run(["history", "kjv"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert run(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {entry["run"]: entry["state"] for entry in listed} == {"kjv": "RUNNING", "broken": None}
    assert [entry["run"] for entry in listed] == ["kjv", "broken"]
    assert all(set(entry) == {*STATUS_KEYS, "waited_s"} - {"ranks"} for entry in listed)
    assert run(["list"]) == 0
    shown = capsys.readouterr().out
    assert "kjv     RUNNING" in shown
    assert "cannot read its records" in shown.splitlines()[2]
    assert run(["list", "--state", "running", "--mine", "--json"]) == 0
    assert [entry["run"] for entry in json.loads(capsys.readouterr().out)] == ["kjv"]
    assert run(["list", "--state", "STOPPED"]) == 0
    assert "no such runs found" in capsys.readouterr().out


def test_before_the_first_step_of_a_resume_the_figures_are_those_of_the_history(store, capsys):
    record(store, dataclasses.replace(STATUS, step=2, loss=None, tokens_per_s=None), steps=[report(1), report(2)])
    remember_run(RunPlace(store.url, "kjv", None, "", time.time()))
    assert run(["list", "--json"]) == 0 and run(["status", "kjv", "--json"]) == 0
    (listed,), reported = map(json.loads, capsys.readouterr().out.splitlines())
    for status in (listed, reported):
        assert (status["step"], status["loss"], status["tokens_per_s"]) == (2, 2.0, 10000.0)


def test_a_name_close_to_a_known_one_is_proposed(store, capsys):
    remember_run(RunPlace(store.url, "kjv-pp2", None, "", time.time()))
    assert run(["status", "kjv-p2"]) == 2
    assert "did you mean 'kjv-pp2'?" in capsys.readouterr().err
