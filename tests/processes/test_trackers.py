"""Trackers: what the libraries read back, and what a broken one does to a run."""

import importlib.util
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import run_python

from raypp.control.run_record import RunRecord
from raypp.job.load import parse_job
from raypp.records import Event, RunState, StepReport
from raypp.state.run_records.reader import RunReader
from raypp.state.run_records.tracking import Trackers
from raypp.storage import open_store

pytestmark = pytest.mark.slow

END_S = 250.0
"""The libraries take long to import on a busy machine."""


def needs(library: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(library) is None, reason=f"{library} is not installed")


def report(step: int, attempt: int = 1) -> StepReport:
    return StepReport(
        step, 10 * attempt + step / 8, 0.5, 1000, 64, 0.25, 1e4, attempt, lr=0.125, extras={"aux_loss": 2.0}
    )


class Collected(list[Event]):
    def of(self, kind: str) -> list[str]:
        return [event.message for event in self if event.kind == kind]

    def until(self, kind: str) -> str:
        end = time.monotonic() + END_S
        while not self.of(kind):
            assert time.monotonic() < end, [event.message for event in self]
            time.sleep(0.02)
        return self.of(kind)[0]


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Trackers, Collected]]:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)

    def start(kind: str, options: dict[str, str] | None = None, **how: Any) -> tuple[Trackers, Collected]:
        observe = {"trackers": [{"kind": kind, "options": options or {}}]}
        secret, url = {"env": {"MY_TOKEN": "open-sesame"}}, str(tmp_path / "store")
        job = parse_job({"name": "tracked", "checkpoint": {"url": url}, "observe": observe, "resources": secret})
        reported = Collected()
        return Trackers(job, reported.append, **how), reported

    return start


def live(trackers: Trackers, steps: Iterator[StepReport] | list[StepReport], state: str = "SUCCEEDED") -> None:
    last = 0
    for one in steps:
        trackers.step(one)
        last = one.step
    trackers.event(Event("evaluated", "…", step=last, details={"loss": 4.5}))
    trackers.event(
        Event("sampled", "…", step=last, details={"samples": [{"prompt": "In the ", "text": "<b>beginning"}]})
    )
    trackers.close(state, END_S)


def two_lives(begin: Callable[..., tuple[Trackers, Collected]], kind: str, options: dict[str, str]) -> list[Collected]:
    """Trains to step 6, then resumes from step 4 to step 8."""
    first, reported = begin(kind, options)
    live(first, [report(step) for step in range(1, 7)], "STOPPED")
    second, reported_again = begin(kind, options)
    live(second, [report(step, 2) for step in range(5, 9)])
    assert not reported.of("tracker_stopped") and not reported_again.of("tracker_stopped"), [*reported, *reported_again]
    return [reported, reported_again]


@pytest.mark.gate
@needs("tensorboard")
def test_tensorboard_shows_one_curve_and_forgets_what_was_repeated(begin: Any, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reported, _ = two_lives(begin, "tensorboard", {})
    folder = tmp_path / "store/tracked/trackers/tensorboard"
    assert reported.of("tracking") == [
        f"tracker tensorboard: raypp tensorboard tracked, or tensorboard --logdir {folder}"
    ]
    curves = EventAccumulator(str(folder)).Reload()
    assert [(one.step, one.value) for one in curves.Scalars("loss")] == [
        *((step, 10 + step / 8) for step in range(1, 5)),
        *((step, 20 + step / 8) for step in range(5, 9)),
    ]
    assert {"grad_norm", "lr", "tokens_per_s", "aux_loss", "eval_loss"} < set(curves.Tags()["scalars"])
    assert [(one.step, one.value) for one in curves.Scalars("eval_loss")] == [(8, 4.5)]  # that of step 6 is void
    samples = curves.Tensors("samples")[-1]
    assert samples.step == 8 and samples.tensor_proto.string_val[0].decode() == "**In the **<b>beginning"


@needs("mlflow")
@needs("sqlalchemy")
def test_mlflow_has_one_run_with_each_step_once(begin: Any, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    two_lives(begin, "mlflow", {"uri": uri, "experiment": "tries"})

    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("tries")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    curve = client.get_metric_history(run.info.run_id, "loss")
    assert sorted((one.step, one.value) for one in curve) == [
        *((step, 10 + step / 8) for step in range(1, 7)),
        *((step, 20 + step / 8) for step in range(7, 9)),
    ]
    assert [one.step for one in client.get_metric_history(run.info.run_id, "eval_loss")] == [6, 8]
    assert run.info.status == "FINISHED" and run.data.params["train.steps"] == "50"
    assert "open-sesame" not in str(run.to_dictionary())
    assert [one.path for one in client.list_artifacts(run.info.run_id, "samples")] == [
        "samples/step-00000006.md",
        "samples/step-00000008.md",
    ]


@needs("wandb")
def test_wandb_offline_writes_runs_of_one_id_for_sync(begin: Any, tmp_path: Path) -> None:
    reported, _ = two_lives(begin, "wandb", {"mode": "offline", "project": "tries"})
    assert reported.of("tracking")[0].startswith("tracker wandb: offline runs in ")
    lives = sorted((tmp_path / "store/tracked/trackers/wandb/wandb").glob("offline-run-*/run-*.wandb"))
    assert len(lives) == 2 and len({path.name for path in lives}) == 1
    assert not any(b"open-sesame" in path.read_bytes() for path in lives)
    rows = [dict(row) for path in lives for row in wandb_rows(path)]
    losses = [(int(row["step"]), float(row["loss"])) for row in rows if "loss" in row]
    assert losses == [(step, 10 + step / 8) for step in range(1, 7)] + [(step, 20 + step / 8) for step in range(5, 9)]
    assert [row["step"] for row in rows if "eval_loss" in row] == ["6", "8"]


def wandb_rows(path: Path) -> Iterator[list[tuple[str, str]]]:
    """Reads the rows of an offline run: LevelDB's log format with protobufs of wandb."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        if kind == 0 or 32768 - place % 32768 < 7:  # the rest of a block is padding
            place += 32768 - place % 32768
            continue
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            parsed = Record.FromString(record)
            record = b""
            if parsed.HasField("history"):
                yield [(item.key or item.nested_key[0], item.value_json) for item in parsed.history.item]


BROKEN = """
import os, sys, time

class Tracker:
    where, newest = "nowhere", 0
    def values(self, step, when, values): pass
    def text(self, *rest): pass
    def rewind(self, step): return True
    def close(self, state): pass

class Hangs(Tracker):
    def values(self, step, when, values): time.sleep(600)

class Raises(Tracker):
    def values(self, step, when, values): raise ConnectionError("no route to the server")

class Late(Tracker):
    def close(self, state): time.sleep(600)

class Notes(Tracker):
    def __init__(self, run): self.file, self.gate = open(run.folder / "steps", "a"), run.options.get("gate")
    def values(self, step, when, values):
        while self.gate and not os.path.exists(self.gate): time.sleep(0.01)
        self.file.write(f"{step}={values['loss']:g} ")
    def rewind(self, step): self.file.write("| "); return True
    def close(self, state):
        self.file.write(state)
        self.file.close()
        raise ConnectionError("the server refused the key sesame-0123456789")

def notes(run): return Notes(run)
def hangs(run): return Hangs()
def raises(run): return Raises()
def late(run): return Late()
def stuck(run):
    import atexit, raypp.state.run_records.tracking as tracking
    tracking.Trackers.close.__defaults__ = (1.0,)
    atexit.register(time.sleep, 600)
    return Hangs()
def leaves(run): sys.exit("the library says goodbye")
"""


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_trackers.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("hangs", "it did not answer for 1 s"),
        ("raises", "ConnectionError: no route to the server"),
        ("leaves", "SystemExit: the library says goodbye"),
    ],
)
def test_a_broken_tracker_is_reported_once_and_nothing_waits(begin: Any, broken: None, function: str, why: str) -> None:
    trackers, reported = begin(f"broken_trackers:{function}", patience_s=1.0 if function == "hangs" else 60.0)
    trackers.step(report(1))
    end = time.monotonic() + END_S
    while not reported.of("tracker_stopped"):  # a hanging call is found when the next record comes
        assert time.monotonic() < end
        trackers.step(report(2))
        time.sleep(0.02)
    [message] = reported.of("tracker_stopped")
    for step in range(3, 100):
        trackers.step(report(step))
    assert trackers.close("SUCCEEDED", 0.5) == (function != "hangs")
    assert reported.of("tracker_stopped") == [message]
    assert message.startswith(f"tracker broken_trackers:{function}: {why}")
    assert message.endswith(": stopped; the run continues")
    assert ("broken_trackers.py:" in message) == (function in ("raises", "leaves"))


@pytest.mark.gate
def test_records_that_a_slow_tracker_cannot_take_are_dropped_and_counted(
    begin: Any, broken: None, tmp_path: Path
) -> None:
    trackers, reported = begin("broken_trackers:notes", {"gate": str(tmp_path / "gate")}, waiting=20)
    trackers.step(report(1))
    reported.until("tracking")
    for step in range(2, 101):
        trackers.step(report(step))
    (tmp_path / "gate").touch()
    trackers.close("SUCCEEDED", END_S)
    first, last = reported.of("tracker_dropped")
    assert first.endswith("too slow: 20 records wait for it; more are dropped")
    kept = (tmp_path / "store/tracked/trackers/broken-trackers-notes/steps").read_text().count("=")
    assert last.endswith(f": {100 - kept} records were dropped: it was too slow") and kept in (20, 21)


def test_a_run_does_not_wait_long_for_a_tracker_that_does_not_finish(begin: Any, broken: None) -> None:
    trackers, reported = begin("broken_trackers:late")
    trackers.step(report(1))
    reported.until("tracking")
    trackers.close("SUCCEEDED", 1.0)
    assert "it did not finish within 1 s of the run's end" in reported.until("tracker_stopped")


def test_the_controller_gives_each_step_once_and_masks_secrets(
    broken: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raypp.control.credentials._values", {"sesame-0123456789"})
    store = open_store(str(tmp_path / "store"))
    entry = [{"kind": "broken_trackers:notes"}]
    job = parse_job({"name": "led", "checkpoint": {"url": store.url}, "observe": {"trackers": entry}})
    record = RunRecord(store, job, "c-1")
    record.begin(None)
    for step, attempt in ((1, 1), (2, 1), (3, 1), (3, 1), (2, 2), (1, 1), (3, 2)):  # 1 is reported again, late
        record.add_step(report(step, attempt), attempt)
    record.end_trackers(RunState.SUCCEEDED)
    assert record.close()
    notes = tmp_path / "store/led/trackers/broken-trackers-notes/steps"
    loss = [f"{step}={10 * attempt + step / 8:g}" for step, attempt in ((1, 1), (2, 1), (3, 1), (2, 2), (3, 2))]
    assert notes.read_text() == f"| {' '.join(loss[:3])} | {' '.join(loss[3:])} SUCCEEDED"
    [stopped] = [event.message for event in RunReader(store, "led").events() if event.kind == "tracker_stopped"]
    assert "the server refused the key *** (at " in stopped and "sesame" not in stopped


@needs("tensorboard")
def test_under_torchrun_rank_0_writes(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "job.yaml").write_text(
        f"name: alone\ndata: {{kind: synthetic}}\ntrain: {{steps: 3}}\n"
        f"checkpoint: {{url: {tmp_path}/store, memory_tier: false}}\nobserve: {{trackers: [tensorboard]}}\n"
    )
    words = ("-m", "torch.distributed.run", "--nproc-per-node=1", "-m", "raypp.rank", "--job")
    run_python(*words, str(tmp_path / "job.yaml"), timeout=END_S)
    reader = RunReader(open_store(str(tmp_path / "store")), "alone")
    assert [event.kind for event in reader.events() if event.kind.startswith("track")] == ["tracking"]
    curve = EventAccumulator(str(tmp_path / "store/alone/trackers/tensorboard")).Reload().Scalars("loss")
    assert [(one.step, pytest.approx(one.value)) for one in curve] == [
        (row["step"], row["loss"]) for row in reader.history()
    ]


def test_under_torchrun_a_tracker_that_hangs_at_exit_does_not_keep_the_rank(broken: None, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        f"name: alone\ndata: {{kind: synthetic}}\ntrain: {{steps: 3}}\n"
        f"checkpoint: {{url: {tmp_path}/store, memory_tier: false}}\n"
        "observe: {trackers: [{kind: 'broken_trackers:stuck'}]}\n"
    )
    words = ("-m", "torch.distributed.run", "--nproc-per-node=1", "-m", "raypp.rank", "--job")
    run_python(*words, str(tmp_path / "job.yaml"), timeout=END_S, env={"PYTHONPATH": str(tmp_path)})
    [stopped] = [
        event.message
        for event in RunReader(open_store(str(tmp_path / "store")), "alone").events()
        if event.kind == "tracker_stopped"
    ]
    assert "it did not finish within 1 s of the run's end" in stopped
