"""What the controller does with batches of ranks; it leads an attempt without processes."""

import time
from pathlib import Path

import pytest
from stand_in_clock import StandInClock

from raypp.control.hang_watch import HangWatch
from raypp.control.leader import Leader
from raypp.control.protocol import ReportBatch, RunRequest
from raypp.control.report import reports
from raypp.control.seats import Rank
from raypp.job.load import job_document, parse_job
from raypp.records import Coordinates, Event, Requests
from raypp.state.run_records.json_lines import LogLine


@pytest.fixture
def leader(tmp_path: Path) -> Leader:
    job = parse_job({"name": "r", "mesh": {"pp": 4}, "checkpoint": {"url": str(tmp_path)}})
    leader = Leader(RunRequest("r", job_document(job)), None, restarted=False)
    leader.record.begin(None)
    leader._workers = leader._placement = None  # type: ignore[assignment]
    attempt = leader._attempt = leader._new_attempt(3)
    attempt.ranks = [Rank(n, f"pp{n}", Coordinates(n), n, "", state="starting") for n in range(4)]
    leader.reports.start_attempt(3)
    leader.reports.watch = HangWatch(attempt.ranks, 60.0, time.monotonic() - 30)
    return leader


def _news(rank: int, number: int, *texts: str, attempt: int = 3) -> ReportBatch:
    lines = tuple(LogLine(text, rank, f"pp{rank}", attempt, "out") for text in texts)
    return ReportBatch(
        attempt, rank, number, "step 1", 0.0, events=tuple(Event("heard", text) for text in texts), logs=lines
    )


def _written(leader: Leader) -> list[str]:
    leader._process_reports(wait_s=0.0)
    lines, _ = leader.record.lines_since(0, 0.0)
    return [line.partition("heard: ")[2] for line in lines if "heard: " in line]


def test_a_batch_that_comes_twice_is_written_once(leader: Leader) -> None:
    for batch in (_news(1, 7, "a"), _news(2, 1, "b"), _news(1, 7, "a"), _news(1, 8, "c"), _news(1, 8, "c")):
        leader.reports.report(batch)
    assert _written(leader) == ["a", "b", "c"]
    assert leader.record.taken == 3


def test_older_heartbeats_change_nothing(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StandInClock()
    clock.advance(time.monotonic() + 100)
    monkeypatch.setattr(reports, "time", clock)
    assert leader.reports.watch is not None and leader._attempt is not None
    leader.reports.watch._listened_at = clock.now  # no pause
    leader.reports.report(ReportBatch(3, 1, 5, "step 9", 0.5))
    leader.reports.report(ReportBatch(3, 0, 4, "step 2F1", 11.0))
    leader.reports.report(ReportBatch(3, 1, 4, "step 8", 0.0))
    leader._process_reports(wait_s=0.0)
    activities = leader.reports.watch._activities
    assert (activities[0].phase, activities[0].idle_s, activities[1].phase) == ("step 2F1", 11.0, "step 9")
    assert leader.reports.watch._heartbeat_at[:2] == [clock.now, clock.now]
    assert [rank.state for rank in leader._attempt.ranks[:3]] == ["step", "step", "starting"]


def test_the_answer_names_the_written_batches_and_passes_on_the_stop_request(leader: Leader) -> None:
    leader.reports.report(_news(2, 4, "b"))
    leader.reports.report(_news(1, 7, "a"))
    _written(leader)
    leader.record.close()
    _written(leader)
    beats = [ReportBatch(3, 1, 8, "step 1"), ReportBatch(3, 3, 1, "step 1"), ReportBatch(2, 1, 8, "step 1")]
    assert [leader.reports.report(beat).durable for beat in beats] == [7, 0, 0]
    leader.reports.save_wanted, leader.reports.stop = True, Requests(stop=True, save_before_stop=True)
    answer = leader.reports.report(ReportBatch(3, 1, 9, "step 1"))
    assert answer.incarnation == leader.reports.incarnation
    assert answer.requests == Requests(stop=True, save_before_stop=True)
    assert leader.reports.report(ReportBatch(3, 0, 1, "step 1")).requests.save, "the save was asked of another rank"


def test_a_trace_is_asked_of_rank_0_once(leader: Leader) -> None:
    leader.reports.trace_wanted = 3
    asked = [leader.reports.report(ReportBatch(3, rank, number, "step 1")).requests.trace for rank, number in
             ((1, 1), (0, 1), (0, 2))]  # fmt: skip
    assert asked == [0, 3, 0]


def test_news_of_another_attempt_is_left_alone(leader: Leader) -> None:
    for batch in (_news(1, 1, "old", attempt=2), _news(1, 1, "new"), ReportBatch(2, 2, 1, "step 5")):
        leader.reports.report(batch)
    assert _written(leader) == ["new"]
    assert leader._attempt is not None and leader._attempt.ranks[2].state == "starting"


def test_what_a_rank_leaves_over_does_not_hide_what_it_handed_over_just_before(leader: Leader) -> None:
    assert leader._attempt is not None
    leader.reports.report(_news(1, 7, "its last line"))
    leader._attempt.on_unwritten(_news(1, 8, "left over"))
    assert _written(leader) == ["its last line", "left over"]
