"""Runs code that needs torch in a separate process, because the command line never imports it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from raypp.cli.output import echo_lines
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

_KINDS: dict[int, type[RayppError]] = {
    EXIT_USAGE: JobError,
    EXIT_UNREACHABLE: UnreachableError,
    EXIT_RESOURCES: ResourcesError,
}


def ask(module: str, request: dict[str, Any], name: str) -> dict[str, Any]:
    """Calls a module's `main` in a new process and returns its answer.

    `main` reads one JSON object and prints another as its last line. An answer with `error`, or
    with `problems` and `exit_code`, is an error.

    Args:
        module: For example `raypp.measure.parity`.
        request: The object it reads.
        name: Name of its task in error messages: "the comparison".

    Raises:
        JobError: torch is not installed here.
        RayppError: It reported an error, or ended without an answer.
    """
    need("torch", "node", name)
    # -P: do not import from the working directory. Not -m: the ranks' processes would run the
    # module twice.
    program = f"import sys; from {module} import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(
        command, input=json.dumps(request), capture_output=True, text=True, errors="replace", check=False
    )
    echo_lines(done.stderr, err=True, nl=False)
    lines = done.stdout.strip().splitlines()
    if not lines:
        raise RunFailedError(f"{name} ended with exit code {done.returncode} and without a result")
    answer: dict[str, Any] = json.loads(lines[-1])
    if "problems" in answer:
        raise _KINDS.get(answer["exit_code"], RunFailedError)(Problem(**one) for one in answer["problems"])
    if "error" in answer:
        raise RunFailedError(answer["error"])
    return answer
