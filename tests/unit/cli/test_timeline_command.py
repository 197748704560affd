"""`raypp timeline` of runs whose traces are in the store, and of runs that have none."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from traces import chrome_faults, two_ranks

from raypp.cli.main import run
from raypp.cli.timeline_command import _parts_of
from raypp.control.clusters.known_runs import RunPlace
from raypp.errors import JobError
from raypp.records import Event, RunState
from raypp.state.run_records.reader import RunReader
from raypp.state.run_records.recorder import RunRecorder
from raypp.state.run_records.status import RunStatus
from raypp.state.run_records.trace import RankTrace, TracePlace, newest_trace
from raypp.storage import ObjectStore
from raypp.tools.trace_analysis import analyse, measured_links

LINKS = Event("lookahead", "chosen", time=1.5e9, attempt=1, details={"link_s": [0.005]})


def write(store: ObjectStore, trace: list[RankTrace], state: RunState = RunState.SUCCEEDED) -> None:
    with RunRecorder(store, "r", "a1", interval_s=60) as recorder:
        recorder.status(RunStatus("r", state, 6, 6, attempt=1))
        recorder.event(LINKS)
    for one in trace:
        store.put(one.key(), one.to_bytes())


def test_the_trace_of_an_ended_run_is_shown_and_written(
    store: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(store, two_ranks())
    assert run(["timeline", f"{store.url}/r", "--out", "t.json"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "r  steps 4 to 5 of attempt 1",
        f"{sum(m.arrived for m in analyse(two_ranks()).messages)} of 16 had arrived",
        "580 ms for the pipeline, by simulation",
        "agree within 100 µs",
        "wrote t.json",
    ):
        assert words in " ".join(shown.split()).replace("r steps", "r  steps"), words
    below = next(line for line in shown.splitlines() if line.strip().startswith("pp0"))
    assert below.split()[1] == "61%" and below.split()[2] == "pp1"
    assert chrome_faults(json.loads((tmp_path / "t.json").read_text()), 1e-4) == []


def test_the_newest_trace_that_is_complete_is_taken(store: ObjectStore) -> None:
    assert newest_trace(store, "r") is None
    write(store, two_ranks())
    later = two_ranks(first_step=9)
    store.put(later[0].key(), later[0].to_bytes())
    found = newest_trace(store, "r")
    assert found is not None and found[0].first_step == 4
    store.put(later[1].key(), later[1].to_bytes())
    found = newest_trace(store, "r")
    assert found is not None and found[0].first_step == 9


def test_a_trace_with_a_damaged_part_names_it(store: ObjectStore, capsys: pytest.CaptureFixture[str]) -> None:
    trace = two_ranks()
    write(store, trace)
    (Path(store.url.removeprefix("file://")) / trace[1].key()).write_bytes(b"[" * 10_000)
    assert run(["timeline", f"{store.url}/r"]) == 1
    assert "rank-00001.json" in capsys.readouterr().err


def test_links_are_those_of_the_attempt_or_the_newest() -> None:
    later = replace(LINKS, attempt=2, details={"link_s": [0.5]})
    assert measured_links([LINKS, later], 1) == [0.005]
    assert measured_links([LINKS, later]) == [0.5]
    assert measured_links([LINKS], 7) == measured_links([]) == []
    assert measured_links([replace(LINKS, details={"link_s": ["x", -1.0, 1e300]})]) == []


def test_an_attempt_that_ends_gives_its_trace_or_none(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raypp.cli.timeline_command._LATE_PARTS_S", 0.2)
    monkeypatch.setattr("raypp.cli.timeline_command._POLL_S", 0.05)
    place, reader = RunPlace(store.url, "r", ""), RunReader(store, "r")
    write(store, [], RunState.RUNNING)
    assert _parts_of(place, reader, store, set(), attempt=0) is None, "attempt 1 has followed"
    write(store, two_ranks()[:1], RunState.RUNNING)
    assert _parts_of(place, reader, store, set(), attempt=0) is None, "a rank died before it wrote its part"
    write(store, two_ranks(), RunState.RUNNING)
    found = _parts_of(place, reader, store, set(), attempt=1)
    assert found is not None and len(found) == 2
    write(store, [], RunState.FAILED)
    with pytest.raises(JobError, match="r is FAILED in attempt 1; the steps were not traced"):
        _parts_of(place, reader, store, {TracePlace(1, 4)}, attempt=1)
