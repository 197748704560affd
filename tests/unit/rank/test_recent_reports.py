import json
from typing import Any

from collecting_reporter import CollectingReporter

from raypp.rank.step.reports import RecentReports
from raypp.records import StepReport
from raypp.state.checkpoint.commit import read_extra


def _report(step: int) -> StepReport:
    return StepReport(step, 1 / step, 0.1, 10, 8, 0.3, 30.0, attempt=1, lr=1e-3, parts_s={"data": 0.1})


def again(document: list[dict[str, Any]]) -> tuple[StepReport, ...]:
    return read_extra(json.loads(json.dumps({"recent_steps": document})), "COMMIT").recent_steps


def test_reports_come_back_from_a_checkpoint_bit_for_bit_and_go_on() -> None:
    first, second, listener = RecentReports(), RecentReports(), CollectingReporter()
    for step in range(1, 4):
        first.add(_report(step))
    second.restore(again(first.document()))
    second.add(_report(4))
    second.report_again(listener)
    assert [(reported.step, reported.loss, reported.attempt) for reported in listener.reports] == [
        (n, 1 / n, 1) for n in range(1, 5)
    ]


def test_only_the_newest_are_kept_and_unknown_fields_are_passed_over() -> None:
    recent, listener = RecentReports(), CollectingReporter()
    for step in range(1, 1000):
        recent.add(_report(step))
    later = RecentReports()
    later.restore(again([{**entry, "colour": "blue"} for entry in recent.document()]))
    later.report_again(listener)
    assert [reported.step for reported in listener.reports] == list(range(744, 1000))
