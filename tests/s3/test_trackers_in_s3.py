"""Files of trackers reach a run's folder in S3, where TensorBoard reads them."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from seaweed import BUCKET

from raypp.job.load import parse_job
from raypp.records import Event, StepReport
from raypp.state.run_records.recorder import RunRecorder
from raypp.state.run_records.tracking import Trackers, identity
from raypp.storage import open_store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_seaweed")]
URL = f"s3://{BUCKET}/tracked"


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_reads_a_resumed_run_from_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    job = parse_job({"name": "far", "checkpoint": {"url": URL}, "observe": {"trackers": ["tensorboard"]}})
    events: list[Event] = []
    for steps in (range(1, 5), range(3, 8)):
        trackers = Trackers(job, events.append)
        for step in steps:
            trackers.step(StepReport(step, 1.0 / step, 0.5, 10, 10, 0.1, 100.0, 1))
        trackers.close("STOPPED", 200.0)
    where = f"{URL}/far/trackers/tensorboard"
    reported = f"tracker tensorboard: raypp tensorboard far, or tensorboard --logdir {where}"
    assert [event.message for event in events] == [reported] * 2
    curve = EventAccumulator(where).Reload().Scalars("loss")
    assert [(one.step, one.value) for one in curve] == [(step, pytest.approx(1 / step)) for step in range(1, 8)]
    assert not list(tmp_path.glob("raypp-tracker-*"))  # nothing stays on the node
    with RunRecorder(open_store(URL), "far", "c") as recorder:
        recorder.event(events[-1])
    opened = [sys.executable, "-m", "raypp", "tensorboard", f"{URL}/far", "--", "--inspect"]
    shown = subprocess.run(opened, capture_output=True, text=True, check=True).stdout
    assert "last_step            7" in shown, shown


def test_the_id_of_a_run_stays_and_a_damaged_one_is_not_used() -> None:
    store = open_store(URL)
    first = identity(store, "named")
    assert first.startswith("named-") and identity(store, "named") == first
    store.put("named/trackers/id", b"../\x1b[2J'; DROP")
    assert identity(store, "named") == "named-damaged"
