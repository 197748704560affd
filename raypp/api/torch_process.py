"""Runs code that needs torch in a separate process, because the command line never imports it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from tempfile import TemporaryFile
from typing import Any

from raypp.control.calls import error_document, error_of, last_answer
from raypp.environment import need
from raypp.errors import RayppError, RunFailedError
from raypp.quick_import import quick_import
from raypp.untrusted.text import visible_lines

_QUIET = {"TQDM_DISABLE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Turns off libraries' progress bars, because standard error is shown only at the end, and torch's
warnings about its own internals."""


def reports_of(
    module: str, request: Mapping[str, Any], name: str, turns: Iterable[Mapping[str, Any]] = ()
) -> Generator[dict[str, Any]]:
    """Calls a module's `answer` in a new process, and yields what it reports, as it comes. The last
    is `{"answer": …}`, with what it returns. A caller that closes the iterator ends the process.

    `answer` takes one JSON object and what takes reports, and returns another object. It may raise
    `RayppError`.

    Args:
        module: For example `raypp.tools.parity`.
        name: Name of its task in error messages: "the comparison".
        turns: More to ask, as lines of its input: the first at once, one after each `{"done": …}`.

    Raises:
        JobError: Torch is not installed here.
        RayppError: It raised an error, or ended without an answer.
    """
    need("torch", "node", name)
    more = iter(turns)
    with TemporaryFile("w+") as asked, TemporaryFile("w+", errors="replace") as output:
        json.dump(request, asked)
        asked.seek(0)
        # -P: no imports from the working directory. Not -m: ranks would run the module twice.
        program = f"from {__name__} import main; main({module!r}, {asked.fileno()})"
        with subprocess.Popen(
            [sys.executable, "-P", "-c", program],
            env=os.environ | _QUIET | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=[asked.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            bufsize=1,
        ) as process:
            assert process.stdin is not None and process.stdout is not None

            def ask_next() -> None:
                assert process.stdin is not None
                with suppress(BrokenPipeError):  # it has ended; its output says why
                    if (turn := next(more, None)) is None:
                        process.stdin.close()
                    else:
                        process.stdin.write(json.dumps(turn) + "\n")

            report: dict[str, Any] = {}
            try:
                ask_next()
                for line in process.stdout:
                    report = json.loads(line)
                    if "error" not in report:
                        yield report
                    if "done" in report:
                        ask_next()
                code = process.wait()
            finally:
                process.kill()
                with suppress(BrokenPipeError):
                    process.stdin.close()
        output.seek(0)
        sys.stderr.write(visible_lines(output.read()))
    if "error" in report:
        raise error_of(report["error"])
    if "answer" not in report:
        raise RunFailedError(f"{name} ended with exit code {code} and without a result")


def ask(
    module: str,
    request: Mapping[str, Any],
    name: str,
    progress: Callable[[Mapping[str, Any]], None] = lambda _report: None,
) -> dict[str, Any]:
    """Returns the answer of `reports_of`. `progress`: called with each report `{"progress": …}`."""
    return dict(last_answer(reports_of(module, request, name), progress))


def main(module: str, asked: int) -> None:
    """Answers the request in an open file, in the new process."""
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no report

    def tell(report: Mapping[str, Any]) -> None:
        reports.write(json.dumps(report) + "\n")

    answer = quick_import(module).answer
    try:
        tell({"answer": answer(json.load(os.fdopen(asked)), tell)})
    except RayppError as error:
        tell({"error": error_document(error)})
