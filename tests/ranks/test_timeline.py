"""Steps of real ranks are traced, on one clock, and tracing changes no number."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from collecting_reporter import CollectingReporter
from harness import run_in_turn, run_ranks
from traces import chrome_faults
from training import document

from raypp.cli.main import run
from raypp.job.load import parse_job
from raypp.planning.decide import decide
from raypp.rank.own_seat import local_seat
from raypp.rank.rank import run_rank
from raypp.records import Requests, RunState
from raypp.state.run_records.recorder import RunRecorder
from raypp.state.run_records.status import RunStatus
from raypp.state.run_records.trace import COMPUTE, RankTrace, TracePlace, is_complete, list_traces, read_trace
from raypp.storage import open_store
from raypp.tools.chrome_trace import chrome_trace
from raypp.tools.trace_analysis import analyse

STEPS, FIRST, TRACED, MICROBATCHES = 6, 3, 2, 8


def live(rank: int, world: int, port: int, job: dict[str, Any], trace: int, nodes: list[int]) -> dict[str, Any]:
    """Runs a rank on the node that its seat names: clocks of nodes are compared by messages."""
    parsed = parse_job(job)
    seat = replace(local_seat(rank, world, port, parsed), node_rank=nodes[rank])
    reported = CollectingReporter(lambda asked: Requests(trace=trace if rank == 0 and asked == FIRST else 0))
    run_rank(decide(parsed), seat, reported)
    parts = [report.parts_s for report in reported.reports]
    return {"losses": [report.loss for report in reported.reports], "parts": parts, "kinds": reported.kinds()}


def job_in(folder: Path, **mesh: int) -> dict[str, Any]:
    return document(
        **{"pp": 2, **mesh},
        pipeline={"microbatches": MICROBATCHES},
        train={"steps": STEPS},
        checkpoint={"url": str(folder), "every_steps": FIRST},
    )


def trace_of(folder: Path, first: int, world: int) -> list[RankTrace]:
    store = open_store(str(folder))
    assert list_traces(store, "numbers") == {TracePlace(1, first): list(range(world))}
    found = read_trace(store, "numbers", TracePlace(1, first), range(world))
    assert is_complete(found)
    return found


def check(trace: list[RankTrace], first: int, steps: int) -> None:
    """Checks that every action of the steps is there, and that messages do not go back in time."""
    assert all((one.first_step, one.steps, one.cut) == (first, steps, False) for one in trace)
    for one in trace:
        for step in range(first, first + steps):
            kinds = [span.kind for span in one.spans if span.step == step]
            assert sum(kind in COMPUTE for kind in kinds) == 2 * MICROBATCHES
            assert {"step", "data", "negotiate", "pipeline", "reduce", "optimizer"} <= set(kinds)
            assert sum(kind in ("wait F", "wait B") for kind in kinds) == MICROBATCHES
    found = analyse(trace)
    columns = len(trace) // 2
    assert len(found.messages) == columns * steps * 2 * MICROBATCHES
    assert all(m.send.begin <= m.wait.end + found.error_s for m in found.messages)
    assert found.prediction is not None
    assert chrome_faults(chrome_trace(trace, found), found.error_s) == []
    for one in found.ranks:
        named = one.compute + sum(one.waits_for.values()) + one.messages + one.gathers + one.sums
        assert 0 < named <= one.parts["pipeline"] * 1.001


def test_a_trace_of_two_pipeline_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [(job_in(tmp_path / name), steps, [0, 1]) for name, steps in (("on", TRACED), ("off", 0))]
    traced, plain = run_in_turn(2, live, cases)
    assert traced[0]["losses"] == plain[0]["losses"] and len(plain[0]["losses"]) == STEPS
    assert "traced" in traced[0]["kinds"] and "traced" not in plain[0]["kinds"]
    assert not (tmp_path / "off/numbers/traces").exists()
    trace = trace_of(tmp_path / "on", FIRST, 2)
    check(trace, FIRST, TRACED)
    assert trace[0].clock_error_s == 0 < trace[1].clock_error_s
    assert any(span.kind == "save" and span.step == FIRST for span in trace[0].spans)

    store = open_store(str(tmp_path / "on"))
    with RunRecorder(store, "numbers", "a1") as recorder:
        recorder.status(RunStatus("numbers", RunState.SUCCEEDED, STEPS, STEPS))
    out = tmp_path / "trace.json"
    assert run(["timeline", f"{tmp_path}/on/numbers", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    for words in ("steps 3 to 4 of attempt 1", "by simulation", "had arrived when they were needed", "pp1"):
        assert words in shown
    assert chrome_faults(json.loads(out.read_text()), trace[1].clock_error_s) == []


@pytest.mark.gate
def test_a_trace_shows_gathers_and_sums_and_ends_with_the_run(tmp_path: Path) -> None:
    ranks = run_ranks(4, live, job_in(tmp_path, fsdp=2), 50, [0, 0, 1, 1])
    assert ranks[0]["kinds"].count("traced") == 1
    trace = trace_of(tmp_path, FIRST, 4)
    check(trace, FIRST, STEPS - FIRST + 1)
    for one in trace:
        kinds = {span.kind for span in one.spans}
        assert {"gather", "wait gather", "gathering", "sum", "wait sums", "summing"} <= kinds
    assert [one.clock_error_s > 0 for one in trace] == [False, False, True, True]
    assert trace[2].clock_error_s == trace[3].clock_error_s


def test_a_trace_shows_exchanges_of_replicas_that_train_apart_on_a_row_of_their_own(tmp_path: Path) -> None:
    job = job_in(tmp_path, dp_replicate=2, pp=1)
    job["train"]["sync"] = {"kind": "outer", "every_steps": FIRST, "overlap_steps": 1}
    ranks = run_ranks(2, live, job, 50, [0, 1])
    assert ["outer" in parts for parts in ranks[0]["parts"]] == [False, True, True, False, True, True]
    trace = trace_of(tmp_path, FIRST, 2)
    for one in trace:
        exchanges = [span for span in one.spans if span.kind == "exchanging"]
        beside, last = exchanges[-2:]  # that of step 3 may have ended before the trace
        assert beside.step in (5, 6) and last.step == 6 and beside.end <= last.begin
    shown = chrome_trace(trace, analyse(trace))
    assert chrome_faults(shown, trace[1].clock_error_s) == []
    rows = [(one["pid"], one["tid"]) for one in shown["traceEvents"] if one["name"] == "exchange between replicas"]
    assert len(set(rows)) == 2 and not {(1, 1), (2, 1)} & set(rows)
