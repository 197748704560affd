"""Files of trackers reach a run's folder in S3, where TensorBoard reads them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from seaweed import BUCKET, seaweed

from raypp.clusters.seaweed import SeaweedServer
from raypp.observe.tracker_process import identity
from raypp.observe.tracking import Trackers
from raypp.records import Event, StepReport
from raypp.spec.load import parse_job
from raypp.storage import open_store

pytestmark = pytest.mark.slow
URL = f"s3://{BUCKET}/tracked"


@pytest.fixture(scope="module")
def server() -> Iterator[SeaweedServer]:
    with seaweed() as running:
        yield running


@pytest.fixture(autouse=True)
def here(server: SeaweedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_reads_a_resumed_run_from_s3(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    job = parse_job({"name": "far", "checkpoint": {"url": URL}, "observe": {"trackers": ["tensorboard"]}})
    events: list[Event] = []
    for steps in (range(1, 5), range(3, 8)):
        trackers = Trackers(job, events.append)
        for step in steps:
            trackers.step(StepReport(step, 1.0 / step, 0.5, 10, 10, 0.1, 100.0, 1))
        trackers.close("STOPPED", 200.0)
    where = f"{URL}/far/trackers/tensorboard"
    assert [event.message for event in events] == [f"tracker tensorboard: tensorboard --logdir {where}"] * 2
    curve = EventAccumulator(where).Reload().Scalars("loss")
    assert [(one.step, one.value) for one in curve] == [(step, pytest.approx(1 / step)) for step in range(1, 8)]
    assert not list(tmp_path.glob("raypp-tracker-*"))  # nothing stays on the node


def test_the_id_of_a_run_stays_and_a_damaged_one_is_not_used() -> None:
    store = open_store(URL)
    first = identity(store, "named")
    assert first.startswith("named-") and identity(store, "named") == first
    store.put("named/trackers/id", b"../\x1b[2J'; DROP")
    assert identity(store, "named") == "named-damaged"
