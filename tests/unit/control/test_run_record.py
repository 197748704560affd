"""What the controller keeps of what ranks tell, some of it twice."""

from __future__ import annotations

from pathlib import Path

from raypp.control.machine import Machine
from raypp.control.run_record import RunRecord
from raypp.control.seats import Rank
from raypp.observe.reader import RunReader
from raypp.observe.status import RunStatus
from raypp.records import Coordinates, Event, StepReport
from raypp.recovery.policy import Policy
from raypp.spec.load import parse_job
from raypp.storage.directory import DirectoryStore


def _report(step: int, attempt: int = 1) -> StepReport:
    return StepReport(step, 1.0 / step, 1.0, 10, 10, 0.1, 100.0, attempt)


def _record(store: DirectoryStore, writer: str) -> RunRecord:
    return RunRecord(store, parse_job({"name": "told"}), writer)


def test_what_a_rank_tells_again_is_kept_once_also_by_a_later_life(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    event = Event("committed", "step 2", attempt=1, step=2)
    first = _record(store, "c-1")
    first.begin(None, None)
    for report in (_report(1), _report(2), _report(2)):
        first.took_step(report)
    first.event(event)
    first.event(event)
    assert first.taken == 3 and len(first.lines_since(0, 0.0)[0]) == 3
    assert first.close() and first.durable == 3

    later = _record(store, "c-2")
    told = later.begin(2, {**RunStatus("told", first.status().state, step=2).as_dict(), "restarts": 1}, going_on=True)
    assert [one.kind for one in told] == ["committed"]
    later.event(event)
    later.took_step(_report(2))
    later.took_step(_report(3))
    assert later.taken == 1 and later.step == 3
    assert later.close()
    reader = RunReader(store, "told")
    assert [row["step"] for row in reader.history()] == [1, 2, 3]
    assert [one.kind for one in reader.events()] == ["committed"]


def test_the_status_says_how_each_rank_stands_now(tmp_path: Path) -> None:
    record = _record(DirectoryStore(tmp_path), "c-1")
    record.begin(None, None)
    ranks = [Rank(n, f"pp{n}", Coordinates(n), n, "", "10.0.0.1", 100 + n, "step") for n in range(3)]
    machine = Machine(policy=Policy(3))
    record.show(machine, ranks)
    ranks[1].state, ranks[2].pid, ranks[2].node = "save", 77, "10.0.0.2"
    record.show(machine, ranks)
    told = [(one.rank, one.coordinates, one.node, one.pid, one.state) for one in record.status().ranks]
    assert told == [(one.rank, one.coordinates, one.node, one.pid, one.state) for one in ranks]
    record.show(machine, ranks[:2])
    assert len(record.status().ranks) == 2
