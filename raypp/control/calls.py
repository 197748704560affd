"""What code that a command calls in other processes reports: JSON objects, of which `error` has an
error as plain values, `answer` the answer, and `progress` what is on the way. Without torch."""

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import asdict
from typing import Any, NoReturn

from raypp.errors import (
    EXIT_OK,
    JobError,
    Problem,
    RayppError,
    ResourcesError,
    RunFailedError,
    UnreachableError,
    origin_in_words,
    place_in_user_code,
)
from raypp.quick_import import quick_import

_KINDS: dict[int, type[RayppError]] = {kind.exit_code: kind for kind in (JobError, UnreachableError, ResourcesError)}
REPORT = "raypp-report: "
"""How reports begin that a driver prints; libraries and Ray may print other lines beside them."""
Tell = Callable[[Mapping[str, Any]], None]
"""Takes a report."""


def print_report(report: Mapping[str, Any]) -> None:
    # In one write: an unbuffered `print` writes the line break on its own, so that lines of other
    # processes, which share a Ray job's log, may stand before it.
    sys.stdout.write(f"{REPORT}{json.dumps(report)}\n")
    sys.stdout.flush()


def serve(answers: Callable[[], Iterable[Any]]) -> NoReturn:
    """A driver's main function: joins the cluster, reports answers or the error, and exits."""
    from raypp.control.credentials import forget, load_private_environment
    from raypp.control.protocol import NAMESPACE

    code, ray = EXIT_OK, quick_import("ray")
    ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    try:
        load_private_environment()
        for answer in answers():
            print_report({"answer": answer})
    except RayppError as error:
        print_report({"error": error_document(error)})
        code = error.exit_code
    finally:
        forget()
    sys.stdout.flush()
    os._exit(code)  # skips Ray's own shutdown, which takes half a second; Ray ends what belongs to the job


def last_answer(reports: Generator[dict[str, Any]], progress: Callable[[Any], None] = lambda _what: None) -> Any:
    """Returns the last answer of reports, and closes them. `progress`: gets what is on the way."""
    answer = None
    with closing(reports):
        for report in reports:
            if "progress" in report:
                progress(report["progress"])
            answer = report.get("answer", answer)
    return answer


class RankReports:
    """Passes on what rank 0 reports, and collects the errors of all ranks. `patience_s`: how long
    to wait for the cause while ranks only report lost peers."""

    def __init__(self, tell: Tell, patience_s: float) -> None:
        self._tell, self._patience_s = tell, patience_s
        self._errors: dict[int, Mapping[str, Any]] = {}
        self._failed_at, self._answer = 0.0, None

    def take(self, rank: int, report: Mapping[str, Any]) -> None:
        """Takes a report of a rank; `error` has a document."""
        if "error" in report:
            self._failed_at = self._failed_at or time.monotonic()
            self._errors[rank] = report["error"]
        elif rank == 0:
            self._answer = report.get("answer")
            self._tell(report)

    def died(self, rank: int, why: str) -> None:
        """Notes that the process of a rank ended without a report of its own."""
        self.take(rank, {"error": error_document(RunFailedError(f"the process of rank {rank} {why}"))})

    @property
    def explained(self) -> bool:
        """Whether the cause of a failure is known, or no longer waited for."""
        late = time.monotonic() - self._failed_at > self._patience_s
        return bool(self._errors) and (late or not all(error["peer"] for error in self._errors.values()))

    def answer(self) -> Any:
        """Returns rank 0's answer. Raises RayppError: the error of the rank that is the cause,
        not of one that only lost another rank."""
        if self._errors:
            raise error_of(min(sorted(self._errors.items()), key=lambda one: one[1]["peer"])[1])
        return self._answer


def error_document(error: BaseException, *, peer: bool = False) -> dict[str, Any]:
    """Returns an error as plain JSON values. `peer`: it only means that another rank is gone."""
    if not isinstance(error, RayppError):
        frames = "" if place_in_user_code(error) else "\n" + "".join(traceback.format_exception(error))
        error = RunFailedError(f"{origin_in_words(error)}{frames}")
    else:
        peer = False
    return {"problems": [asdict(problem) for problem in error.problems], "exit_code": error.exit_code, "peer": peer}


def error_of(document: Mapping[str, Any]) -> RayppError:
    """Returns the error of a document, of the kind that has its exit code."""
    kind = _KINDS.get(document["exit_code"], RunFailedError)
    return kind(Problem(**problem) for problem in document["problems"])
