"""What the controller records of the ranks' reports, some of which arrive twice."""

from dataclasses import asdict
from io import StringIO
from pathlib import Path

from raypp.cli.console import Console
from raypp.cli.render import runs_table, status_view
from raypp.control.clusters.known_runs import RunPlace
from raypp.control.find_run import present_status
from raypp.control.machine import Machine
from raypp.control.protocol import BatchAnswer
from raypp.control.report.reporter import ReportBuffer
from raypp.control.run_record import RunRecord, stop_event
from raypp.control.seats import Rank
from raypp.job.load import parse_job
from raypp.records import Coordinates, Event, Requests, RunState, Seat, StepReport
from raypp.state.checkpoint.commit import Commit, claim_attempt, write_commit
from raypp.state.run_records.json_lines import document
from raypp.state.run_records.reader import RunReader
from raypp.state.run_records.status import RankStatus, RunStatus
from raypp.storage.directory import DirectoryStore


def _report(step: int, attempt: int = 1) -> StepReport:
    return StepReport(step, 1.0 / step, 1.0, 10, 10, 0.1, 100.0, attempt)


def _record(store: DirectoryStore, writer: str) -> RunRecord:
    return RunRecord(store, parse_job({"name": "noted"}), writer)


def test_what_a_rank_reports_again_is_kept_once_also_by_a_later_life(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    event = Event("committed", "step 2", attempt=1, step=2)
    first = _record(store, "c-1")
    first.begin(None)
    for report in (_report(1), _report(2), _report(2)):
        first.add_step(report)
    first.event(event)
    first.event(event)
    assert first.taken == 3 and len(first.lines_since(0, 0.0)[0]) == 3
    assert first.close() and first.durable == 3

    later = _record(store, "c-2")
    later.resume(Machine(), 2)
    later.event(event)
    later.add_step(_report(2))
    later.add_step(_report(3))
    assert later.taken == 1 and later.step == 3
    assert later.close()
    reader = RunReader(store, "noted")
    assert [row["step"] for row in reader.history()] == [1, 2, 3]
    assert [one.kind for one in reader.events()] == ["committed"]


def test_a_stop_is_recorded_once_when_the_next_controller_is_asked_again(tmp_path: Path) -> None:
    """The event was written, the machine that knows of the stop was not."""
    store = DirectoryStore(tmp_path)
    for writer in ("c-1", "c-2"):
        record = _record(store, writer)
        if writer == "c-2":
            record.resume(Machine(), None)
        record.event(stop_event(Requests(stop=True, save_before_stop=True), 1))
        assert record.close()
    assert [one.kind for one in RunReader(store, "noted").events()] == ["stop_requested"]


def test_steps_reported_again_after_newer_ones_do_not_take_the_status_back(tmp_path: Path) -> None:
    """The controller dies with unwritten steps; the next answers only the rank's last report."""
    seat = Seat("noted", 1, 0, 1, Coordinates(), Coordinates(1, 1, 1, 1, 1))
    buffer = ReportBuffer(seat)
    for step in range(1, 11):
        buffer.add_step(_report(step))
    buffer.sent(buffer.next_batch("step 10", 0.0), BatchAnswer(Requests(), "c-1"))  # and that life dies
    for step in range(11, 41):
        buffer.add_step(_report(step))
    last = buffer.next_batch("step 40", 0.0)
    buffer.sent(last, BatchAnswer(Requests(), "c-2"))
    left = buffer.unwritten()
    assert left is not None

    record = _record(DirectoryStore(tmp_path), "c-2")
    record.resume(Machine(), 40)
    assert [record.add_step(report, 1) for report in last.steps] == [True] * 30
    assert {report.step for report in left.steps} == set(range(1, 41))
    for report in left.steps:
        record.add_step(report, 1)
    status = record.status()
    assert (status.step, status.loss, status.tokens_per_s) == (40, 1.0 / 40, 100.0)
    assert record.close()
    assert [row["step"] for row in RunReader(DirectoryStore(tmp_path), "noted").history()] == list(range(1, 41))


def test_an_attempt_that_begins_from_a_checkpoint_takes_the_status_back_to_it(tmp_path: Path) -> None:
    record = _record(DirectoryStore(tmp_path), "c-1")
    record.begin(None)
    for step in range(1, 13):
        record.add_step(_report(step), 1)
    for step in range(1, 11):  # out of the checkpoint of step 10
        record.add_step(_report(step), 2)
    assert record.step == 10
    assert record.add_step(_report(11, 2), 2) and record.step == 11
    assert not record.add_step(_report(12), 1)
    record.close()


def test_a_later_life_begins_with_the_history_where_the_status_is_older(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    first = _record(store, "c-1")
    first.begin(None)
    for step in range(1, 21):
        first.add_step(_report(step), 1)
    assert first.close()
    ranks = (RankStatus(0, Coordinates(), "10.0.0.1", 7, "step"),)
    older = RunStatus("noted", RunState.RUNNING, 3, 40, 0.5, 9.0, 1, 2, mesh={"pp": 1}, ranks=ranks, error="pp0 died")
    store.put("noted/status.json", document(older.as_dict()))

    later = _record(store, "c-2")
    later.resume(Machine(), 15)
    status = later.status()
    assert (status.step, status.loss, status.tokens_per_s) == (20, 1.0 / 20, 100.0)
    assert status.checkpoint == f"{store.url}/noted/step-00000015"
    assert (status.attempt, status.restarts, status.ranks, status.error) == (1, 2, ranks, "pp0 died")
    assert later.close()


def test_what_only_a_checkpoint_knows_is_read_from_it(tmp_path: Path) -> None:
    """Rank 0 is gone with its last reports: of steps after the 5th, and of the second commit."""
    store = DirectoryStore(tmp_path)
    first = _record(store, "c-1")
    first.begin(None)
    for step in range(1, 6):
        first.add_step(_report(step), 1)
    first.event(Event("committed", "step 5: by its rank", attempt=1, step=5))
    assert first.close()
    claim_attempt(store, "noted", 1)
    for step in (5, 10):
        steps = [asdict(_report(done)) for done in range(1, step + 1)]
        write_commit(store, Commit("noted", step, 1, {}, {}, {"recent_steps": steps}, ()))

    later = _record(store, "c-2")
    later.resume(Machine(), 10)
    later.recover_from_commits()
    assert later.step == 10 and later.close()
    reader = RunReader(store, "noted")
    assert [row["step"] for row in reader.history()] == list(range(1, 11))
    commits = [(event.step, event.attempt) for event in reader.events() if event.kind == "committed"]
    assert commits == [(5, 1), (10, 1)]


def test_the_status_says_how_each_rank_stands_now(tmp_path: Path) -> None:
    record = _record(DirectoryStore(tmp_path), "c-1")
    record.begin(None)
    ranks = [Rank(n, f"pp{n}", Coordinates(n), n, "", "10.0.0.1", 100 + n, "step") for n in range(3)]
    machine = Machine()
    record.update_status(machine, ranks)
    ranks[1].state, ranks[2].pid, ranks[2].node = "save", 77, "10.0.0.2"
    record.update_status(machine, ranks)
    statuses = [(one.rank, one.coordinates, one.node, one.pid, one.state) for one in record.status().ranks]
    assert statuses == [(one.rank, one.coordinates, one.node, one.pid, one.state) for one in ranks]
    record.update_status(machine, ranks[:2])
    assert len(record.status().ranks) == 2


def test_saves_that_fail_are_reported_once_and_the_status_says_what_is_in_memory_only(tmp_path: Path) -> None:
    record = _record(DirectoryStore(tmp_path), "c-1")
    record.begin(6)
    machine = Machine(RunState.RUNNING, committed_step=6, error="an earlier failure")
    for step in (8, 10, 12):
        record.add_step(_report(step), 1)
        for rank in (0, 1):
            record.event(Event("save_failed", f"step {step}: the disk is full", attempt=1, step=step, rank=rank))
    record.update_status(machine, ())
    says = "last save failed, newest checkpoint step 6, 6 steps in memory only: step 8: the disk is full"
    assert record.status().error == f"{says}\nan earlier failure"
    for rank in (0, 1):
        record.event(Event("save_failed", "waits", attempt=1, step=12, rank=rank, details={"waits_s": 600.0}))
    record.update_status(machine, ())
    assert (record.status().error or "").partition("\n")[0].endswith("6 steps in memory only: waits")
    record.event(Event("committed", "step 12", attempt=1, step=12))
    record.update_status(machine, ())
    assert record.status().error == "an earlier failure" and not record.unsaved(12)
    record.event(Event("save_failed", "step 14: the disk is full", attempt=1, step=14))
    record.close()
    kinds = [event.kind for event in RunReader(DirectoryStore(tmp_path), "noted").events()]
    assert kinds == ["save_failed", "save_failed", "committed", "save_failed"]


def test_what_a_run_waits_for_is_one_event_and_is_shown_until_it_has_it(tmp_path: Path) -> None:
    record, reader = _record(DirectoryStore(tmp_path), "c-1"), RunReader(DirectoryStore(tmp_path), "noted")
    record.begin(None)
    for words in ("waits for 4 places: a has 2", "waits for 4 places: a has 1"):
        record.waits(words, 1)
        record.update_status(Machine(RunState.PENDING), ())
        assert record.flush() and record.status().error == words
    place = RunPlace(str(tmp_path), "noted", "http://10.0.0.1:8265")
    shown, screen = present_status(place, reader), StringIO()
    console = Console(file=screen, width=200)
    console.print(runs_table([(shown, place)], None), status_view(shown, [], console), sep="\n")
    assert [line.split()[0] for line in screen.getvalue().splitlines() if words in line] == ["noted", "note"]
    record.waits(None, 1)
    record.update_status(Machine(RunState.RUNNING), ())
    assert record.status().error is None and record.close()
    assert [(one.kind, one.message) for one in reader.events()] == [("waiting", "waits for 4 places: a has 2")]
