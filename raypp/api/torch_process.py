"""Runs code that needs torch in a separate process, because the command line never imports it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from tempfile import TemporaryFile
from typing import Any

from raypp.environment import need
from raypp.errors import (
    EXIT_RESOURCES,
    EXIT_UNREACHABLE,
    EXIT_USAGE,
    JobError,
    Problem,
    RayppError,
    ResourcesError,
    RunFailedError,
    UnreachableError,
)
from raypp.quick_import import quick_import
from raypp.untrusted.text import visible_lines

_QUIET = {"TQDM_DISABLE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Turns off libraries' progress bars, because standard error is shown only at the end, and torch's
warnings about its own internals."""
_KINDS: dict[int, type[RayppError]] = {
    EXIT_USAGE: JobError,
    EXIT_UNREACHABLE: UnreachableError,
    EXIT_RESOURCES: ResourcesError,
}


def ask(
    module: str,
    request: dict[str, Any],
    name: str,
    progress: Callable[[Mapping[str, Any]], None] = lambda _report: None,
) -> dict[str, Any]:
    """Calls a module's `answer` in a new process and returns what it returns.

    `answer` takes one JSON object and returns another. It may raise `RayppError`, and print lines
    `{"progress": {…}}`. `module`: for example `raypp.tools.parity`. `name`: name of its task in
    error messages: "the comparison". Raises JobError: torch is not installed here. Raises
    RayppError: it raised an error, or ended without an answer.
    """
    need("torch", "node", name)
    # -P: do not import from the working directory. Not -m: the ranks' processes would run the
    # module twice.
    command = [sys.executable, "-P", "-c", f"from {__name__} import main; main({module!r})"]
    last = ""
    with (
        TemporaryFile("w+", errors="replace") as output,
        subprocess.Popen(
            command,
            env=os.environ | _QUIET | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            errors="replace",
        ) as process,
    ):
        try:
            assert process.stdin is not None and process.stdout is not None
            with suppress(BrokenPipeError):  # it has ended; its output says why
                process.stdin.write(json.dumps(request))
                process.stdin.close()
            for line in process.stdout:
                if line.startswith('{"progress": '):
                    progress(json.loads(line)["progress"])
                elif line.strip():
                    last = line
            code = process.wait()
        except BaseException:
            process.kill()
            raise
        output.seek(0)
        sys.stderr.write(visible_lines(output.read()))
    if not last:
        raise RunFailedError(f"{name} ended with exit code {code} and without a result")
    answer: dict[str, Any] = json.loads(last)
    if "problems" in answer:
        raise _KINDS.get(answer["exit_code"], RunFailedError)(Problem(**one) for one in answer["problems"])
    return answer


def main(module: str) -> None:
    """Answers the request on standard input, in the new process."""
    answer = quick_import(module).answer
    try:
        result = answer(json.load(sys.stdin))
    except RayppError as error:
        result = {"problems": [asdict(problem) for problem in error.problems], "exit_code": error.exit_code}
    print(json.dumps(result))  # noqa: T201
