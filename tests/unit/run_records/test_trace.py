"""Traces: stored, read back, analysed, and as Chrome's trace events."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from traces import TIMES, chrome_faults, two_ranks

from raypp.errors import CheckpointError
from raypp.planning.schedules.catalogue import build_program
from raypp.planning.schedules.simulate import simulate
from raypp.records import Coordinates, Event
from raypp.state.run_records.trace import RankTrace, Span, TracePlace, is_complete, list_traces, read_trace
from raypp.storage import open_store
from raypp.tools.chrome_trace import chrome_trace
from raypp.tools.trace_analysis import analyse, messages_of


def test_a_trace_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for one in two_ranks():
        store.put(one.key(), one.to_bytes())
    store.put("r/traces/a1-s00000004/other.json", b"")
    place = TracePlace(1, 4)
    assert list_traces(store, "r") == {place: [0, 1]}
    found = read_trace(store, "r", place, [0, 1])
    assert is_complete(found) and not is_complete(found[1:])
    for read, wrote in zip(found, two_ranks(), strict=True):
        assert replace(read, spans=()) == replace(wrote, spans=())
        for one, other in zip(read.spans, wrote.spans, strict=True):
            assert one.kind == other.kind and one[3:] == other[3:]
            assert one[1:3] == pytest.approx(other[1:3], abs=1e-7)


@pytest.mark.parametrize(
    "change",
    [
        {"spans": [["F", 0.0, -1.0, 1, 0, 0]]}, {"spans": [["F", 0.0, 1e300, 1, 0, 0]]},
        {"spans": [["F" * 41, 0.0, 1.0, 1, 0, 0]]}, {"spans": [["F", 0.0, 1.0, 1, 0, 10**12]]},
        {"spans": [["F", "0", 1.0, 1, 0, 0]]}, {"spans": 7}, {"rank": -1}, {"coordinates": {"pp": "x"}},
        {"began": 1e300},
    ],
)  # fmt: skip
def test_a_part_that_is_no_trace_is_an_error_with_its_key(tmp_path: Path, change: dict[str, Any]) -> None:
    store = open_store(str(tmp_path))
    one = two_ranks()[0]
    store.put(one.key(), json.dumps(json.loads(one.to_bytes()) | change).encode())
    with pytest.raises(CheckpointError, match=r"rank-00000.json.* is not a trace"):
        read_trace(store, "r", TracePlace(1, 4), [0])


def test_waits_are_divided_into_what_the_peer_did_and_what_the_message_took() -> None:
    found = analyse(two_ranks())
    below, above = found.ranks
    assert len(found.messages) == 16
    # Each of the first forwards of the last stage waits for its message, which takes 5 ms.
    first = next(m for m in found.messages if m.direction == "F")
    assert first.under_way_s == pytest.approx(0.005) and first.wait.seconds == pytest.approx(0.035)
    assert first.sender == 0 and first.receiver == 1 and not first.arrived
    assert set(above.waits_for) == {0} and set(below.waits_for) == {1}
    assert below.compute == pytest.approx(2 * 4 * (0.03 + 0.06)) and above.compute == pytest.approx(2 * 4 * 0.12)
    waited = [sum(one.waits_for.values()) + one.messages for one in found.ranks]
    waits = [sum(s.seconds for s in one.trace.spans if s.kind.startswith("wait ")) for one in found.ranks]
    assert waited == pytest.approx(waits)
    assert found.error_s == 1e-4


def test_the_prediction_is_the_simulation_of_the_program_that_ran() -> None:
    links = [0.005]
    prediction = analyse(two_ranks(), links).prediction
    assert prediction is not None
    assert prediction.makespan == pytest.approx(simulate(build_program("1f1b", 2, 1, 4), TIMES).makespan)
    free = analyse(two_ranks()).prediction
    assert free is not None and free.makespan < prediction.makespan


@pytest.mark.parametrize(
    "spans",
    [
        (),
        (Span("F", 0.0, 1.0, 4, 0, 0),),
        (Span("F", 0.0, 1.0, 4, 7, 3), Span("B", 1.0, 1.0, 4, 7, 3)),
        (Span("F", 0.0, 1.0, 4, 0, 1 << 31), Span("B", 1.0, 1.0, 4, 0, 1 << 31)),
        (Span("F", 0.0, 1.0, 4), Span("B", 1.0, 1.0, 4)),
        (Span("B", 0.0, 1.0, 4, 0, 0), Span("F", 1.0, 1.0, 4, 0, 0)),
    ],
)
def test_actions_that_are_no_program_have_no_prediction(spans: tuple[Span, ...]) -> None:
    one = RankTrace("r", 1, 4, 1, 0, 1, "pp0", Coordinates(), "n", "cpu", 1.5e9, 0.0, spans)
    found = analyse([one])
    assert found.prediction is None
    assert chrome_faults(chrome_trace([one], found), 0.0) == []


def test_the_chrome_trace_is_valid_and_has_both_groups() -> None:
    ranks = two_ranks()
    events = [
        Event("committed", "step 4", time=1.5e9 + 0.5, step=4, details={"seconds": 0.3}),
        Event("straggler", "pp1", time=1.5e9 + 0.2, step=4),
        Event("succeeded", "long after", time=1.6e9),
    ]
    document = json.loads(json.dumps(chrome_trace(ranks, analyse(ranks, [0.005]), events)))
    assert chrome_faults(document, 1e-4) == []
    names = {e["args"]["name"]: e["pid"] for e in document["traceEvents"] if e["name"] == "process_name"}
    assert set(names) == {"run", "pp0 · rank 0 · 10.0.0.1", "pp1 · rank 1 · 10.0.0.2", "predicted"}
    shown = [e for e in document["traceEvents"] if e["ph"] in "Xi"]
    assert sum(e["pid"] == names["predicted"] for e in shown) == 2 * 16
    assert sorted(e["name"] for e in shown if e["pid"] == names["run"]) == ["save of step 4", "straggler"]
    assert sum(e["ph"] == "s" for e in document["traceEvents"]) == 16


def test_predicted_steps_follow_each_other_where_a_replica_begins_one_before_another_ends_the_last() -> None:
    ranks = two_ranks()
    early = replace(ranks[0], spans=tuple(Span("pipeline", 0.1 * number, 0.05, 4 + number) for number in range(3)))
    assert chrome_faults(chrome_trace([early], analyse(ranks, [0.005])), 1e-4) == []


def test_messages_stay_within_a_replica() -> None:
    below, above = two_ranks()
    elsewhere = replace(above, coordinates=Coordinates(1, fsdp=1))
    assert list(messages_of([below, elsewhere])) == []
