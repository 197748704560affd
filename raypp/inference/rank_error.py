"""The error of a rank as one JSON object, and which of several errors is the cause."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from raypp.errors import EXIT_RUN_FAILED, Problem, RayppError, RunFailedError


class GenerationError(RunFailedError):
    """A process that uses a model has failed; has its exit code."""

    def __init__(self, problems: Any, exit_code: int = RunFailedError.exit_code) -> None:
        super().__init__(problems)
        self.exit_code = exit_code

    def __reduce__(self) -> Any:
        return type(self), (self.problems, self.exit_code)


def error_document(error: BaseException, *, peer: bool) -> dict[str, Any]:
    """Returns an error as plain JSON values.

    Args:
        error: The error.
        peer: Whether it only means that another rank is gone.
    """
    known = isinstance(error, RayppError)
    problems = (
        error.problems if isinstance(error, RayppError) else [Problem("", "".join(traceback.format_exception(error)))]
    )
    return {
        "problems": [[problem.key, problem.what, problem.fix] for problem in problems],
        "exit_code": error.exit_code if isinstance(error, RayppError) else EXIT_RUN_FAILED,
        "peer": not known and peer,
    }


def died(rank: int, why: str) -> dict[str, Any]:
    """Returns the document of a rank that ended without one."""
    what = f"the process of rank {rank} {why}"
    return {"problems": [["", what, ""]], "exit_code": EXIT_RUN_FAILED, "peer": False}


def first_error(found: Mapping[int, Mapping[str, Any]]) -> GenerationError:
    """Returns the error that is the cause: of a rank that did not just lose another one.

    Args:
        found: The documents by rank.
    """
    if not found:
        return GenerationError("the processes ended without an answer")
    _, _, error = min(((error["peer"], rank, error) for rank, error in found.items()), key=lambda entry: entry[:2])
    return GenerationError([Problem(*problem) for problem in error["problems"]], error["exit_code"])
