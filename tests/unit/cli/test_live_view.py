"""The live view of a run, on real records, with and without a terminal."""

import dataclasses
import io
import itertools
import threading
import time
from collections.abc import Callable

import pytest
from rich.console import Console

from raypp.cli.run_commands import LiveView, next_commands
from raypp.control.clusters.known_runs import RunPlace
from raypp.control.find_run import Records
from raypp.records import Event, RunState, StepReport
from raypp.state.checkpoint.run_spec import RunEnd, write_end, write_spec
from raypp.state.run_records.json_lines import document
from raypp.state.run_records.reader import RunReader
from raypp.state.run_records.recorder import RunRecorder
from raypp.state.run_records.status import RunStatus
from raypp.storage import StoreError

STATUS = RunStatus("r", RunState.RUNNING, 0, 100, mesh={"pp": 1})


def report(step: int, attempt: int = 1, loss: float | None = None) -> StepReport:
    return StepReport(step, 5.0 - step / 50 if loss is None else loss, 0.5, 1000, 64, 0.1, 10000.0, attempt)


def place_of(store) -> RunPlace:
    return RunPlace(store.url, "r", None)


def console(terminal: bool = False, width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, highlight=False, color_system=None)


def train(
    store, end: RunState = RunState.SUCCEEDED, first: int = 1, last: int = 100, seen: Callable[[], bool] = lambda: True
) -> threading.Thread:
    """Records a run; waits at step 50 until `seen` says that it was looked at, for 60 s at most."""

    def life():
        with RunRecorder(store, "r", f"t{first}", interval_s=0.05) as recorder:
            recorder.event(Event("seated", f"from step {first}"))
            for step in range(first, last + 1):
                recorder.step(report(step))
                recorder.status(dataclasses.replace(STATUS, step=step))
                if step % 50 == 0:
                    recorder.event(Event("committed", f"step {step} is durable", step=step))
                time.sleep(0.01)
                until = time.monotonic() + 60 * (step == 50)
                while not seen() and time.monotonic() < until:
                    time.sleep(0.01)
            recorder.status(dataclasses.replace(STATUS, state=end, step=last))

    thread = threading.Thread(target=life)
    thread.start()
    return thread


def test_without_a_terminal_a_whole_run_is_about_twenty_lines_and_its_events(store):
    screen = console()
    thread = train(store, seen=lambda: "\nstep " in screen.file.getvalue())
    last = LiveView(screen, poll_s=0.01).follow(place_of(store), RunReader(store, "r"))
    thread.join()
    assert last.status["state"] == "SUCCEEDED"
    lines = screen.file.getvalue().splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert 2 <= len(steps) <= 21
    assert steps[-1].startswith("step 100/100  loss 3.0000  10k tokens/s  ETA 0:00")
    assert sum("committed" in line for line in lines) == 2
    assert "\x1b" not in screen.file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_on_a_terminal_one_line_moves_and_events_stay(store, width):
    screen, thread = console(terminal=True, width=width), train(store)
    LiveView(screen, poll_s=0.05).follow(place_of(store), RunReader(store, "r"))
    thread.join()
    shown = screen.file.getvalue()
    assert "━" in shown
    assert "ETA" in shown
    assert shown.count("step 50 is durable") == 1


def test_the_past_of_a_resumed_run_is_neither_shown_nor_taken_for_the_end(store):
    train(store, RunState.STOPPED, last=50).join()
    write_spec(store, "r", {})
    write_end(store, RunEnd("r", RunState.STOPPED, 0), 1)
    write_spec(store, "r", {}, 2)
    reader, screen = RunReader(store, "r"), console()
    view = LiveView(screen, poll_s=0.01)
    view.skip_earlier_records(reader)

    def trained_on() -> None:
        train(store, first=51).join()
        write_end(store, RunEnd("r", RunState.SUCCEEDED, 0), 2)

    timer = threading.Timer(0.3, trained_on)
    timer.start()
    last = view.follow(place_of(store), reader)
    timer.join()
    assert last.status["state"] == "SUCCEEDED"
    shown = screen.file.getvalue()
    assert "from step 51" in shown
    assert "from step 1\n" not in shown
    assert "step  50/100" not in shown


def test_after_the_event_of_the_end_no_state_that_was_read_before_it_is_reported(store):
    view = LiveView(screen := console(), poll_s=0.01)
    recovering = dataclasses.replace(STATUS, state=RunState.RECOVERING).as_dict()
    view.update(Records(STATUS.as_dict(), [], []))
    view.update(Records(recovering, [], [Event("failed", "rank 0: my bug")]))
    assert "failed" in screen.file.getvalue() and "RECOVERING" not in screen.file.getvalue()


def test_following_ends_when_the_run_has_been_silent_for_long(store):
    store.put("r/status.json", document({**STATUS.as_dict(), "updated_at": time.time() - 3600}))
    view = LiveView(console(), poll_s=0.01)
    assert view.follow(place_of(store), RunReader(store, "r")).status["state"] == "FAILED"


def test_a_store_that_does_not_answer_for_a_while_is_reported_once(store, monkeypatch):
    train(store, RunState.RUNNING, last=2).join()
    screen, answers = console(), itertools.chain([False, False, True, True], itertools.repeat(False))
    history = RunReader.history

    def now_and_then(self: RunReader):
        if next(answers):
            raise StoreError("no answer")
        return history(self)

    monkeypatch.setattr(RunReader, "history", now_and_then)
    looks = iter([False, False, False, True])
    last = LiveView(screen, poll_s=0.01).follow(place_of(store), RunReader(store, "r"), lambda: next(looks))
    assert not last.trouble and last.step == 2
    assert screen.file.getvalue().count("cannot read the run's records at the moment: no answer") == 1


@pytest.mark.parametrize(
    ("state", "checkpoint", "command"),
    [
        ("SUCCEEDED", "step-00000040", "raypp submit job.yaml --set a=1 --resume --set train.steps=80"),
        ("STOPPED", "step-00000040", "raypp submit job.yaml --set a=1 --set train.steps=40 --resume"),
        ("FAILED", None, "raypp delete mine"),
    ],
)
def test_the_next_commands_of_a_resumed_run_name_each_option_once(
    state: str, checkpoint: str | None, command: str
) -> None:
    again = "raypp submit job.yaml --set a=1 --set train.steps=40"
    facts = {"state": state, "checkpoint": checkpoint, "steps": 40}
    assert command in dict(next_commands(RunPlace("s3://bucket", "mine", None), facts, again))
