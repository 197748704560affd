"""Of several errors of ranks, the cause is raised."""

import pytest

from raypp.control.calls import RankReports, error_document
from raypp.errors import EXIT_USAGE, CheckpointError, DataError, Problem, RayppError, RunFailedError


def raised(*errors: Exception) -> RayppError:
    reports = RankReports(print, 100.0)
    for rank, error in enumerate(errors):
        reports.take(rank, {"error": error_document(error, peer=isinstance(error, RuntimeError))})
    assert reports.explained == any(not isinstance(error, RuntimeError) for error in errors)
    with pytest.raises(RayppError) as caught:
        reports.answer()
    return caught.value


def test_a_lost_peer_is_not_the_cause() -> None:
    lost = RuntimeError("connection closed by peer")
    error = raised(lost, CheckpointError(Problem("a/b", "is torn", "use another")), RunFailedError("ended"))
    assert str(error) == "a/b: is torn\n  fix: use another" and type(error) is RunFailedError
    assert "connection closed" in str(raised(lost, lost)) and raised(lost, DataError("no")).exit_code == EXIT_USAGE
