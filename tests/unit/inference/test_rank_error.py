"""Of several errors of ranks, the cause is shown."""

from __future__ import annotations

from raypp.errors import EXIT_RUN_FAILED, EXIT_USAGE, CheckpointError, JobError, Problem
from raypp.tools.inference.processes import died, error_document, first_error


def test_a_lost_peer_is_not_the_cause() -> None:
    lost = error_document(RuntimeError("connection closed by peer"), peer=True)
    own = error_document(CheckpointError(Problem("a/b", "is torn", "use another")), peer=True)
    error = first_error({0: lost, 1: own, 2: died(2, "ended")})
    assert str(error) == "a/b: is torn\n  fix: use another" and error.exit_code == EXIT_RUN_FAILED
    killed = first_error({0: lost, 2: died(2, "on 10.0.0.1 ended: killed")})
    assert str(killed) == "the process of rank 2 on 10.0.0.1 ended: killed"
    assert "connection closed" in str(first_error({0: lost, 1: lost}))


def test_the_exit_code_is_that_of_the_error() -> None:
    assert first_error({3: error_document(JobError("no"), peer=False)}).exit_code == EXIT_USAGE
    assert "without an answer" in str(first_error({}))
