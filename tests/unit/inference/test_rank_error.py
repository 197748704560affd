"""Of several errors of ranks, the cause is raised."""

from __future__ import annotations

from typing import Any

import pytest

from raypp.control.calls import RankReports, error_document
from raypp.errors import EXIT_RUN_FAILED, EXIT_USAGE, CheckpointError, JobError, Problem, RayppError

LOST = error_document(RuntimeError("connection closed by peer"), peer=True)
OWN = error_document(CheckpointError(Problem("a/b", "is torn", "use another")), peer=True)


def raised(errors: dict[int, Any], why: str = "", *, known: bool = True) -> RayppError:
    """Returns the error of ranks of which the last died, if `why` says so."""
    reports = RankReports(lambda _report: None, 100.0)
    for rank, error in errors.items():
        reports.take(rank, {"error": error})
    if why:
        reports.died(2, why)
    assert reports.explained == known
    with pytest.raises(RayppError) as caught:
        reports.answer()
    return caught.value


def test_a_lost_peer_is_not_the_cause() -> None:
    error = raised({0: LOST, 1: OWN}, "ended")
    assert str(error) == "a/b: is torn\n  fix: use another" and error.exit_code == EXIT_RUN_FAILED
    killed = raised({0: LOST}, "on 10.0.0.1 ended: killed")
    assert str(killed) == "the process of rank 2 on 10.0.0.1 ended: killed"
    assert "connection closed" in str(raised({0: LOST, 1: LOST}, known=False))
    assert raised({3: error_document(JobError("no"))}).exit_code == EXIT_USAGE
