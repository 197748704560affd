"""Questions to a process that may import torch; the command line itself does not."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from raypp.errors import RunFailedError


def ask(module: str, request: dict[str, Any], name: str) -> dict[str, Any]:
    """The answer of a module's `main`, which reads one JSON object and prints another as its last line.

    Args:
        module: For example `raypp.measure.parity`.
        request: What it reads.
        name: Of what it does, for people: "the comparison".

    Raises:
        RunFailedError: It told an error, or ended without an answer.
    """
    # -P: the working directory is no place to import from. Not -m: the ranks' processes would run the module twice.
    program = f"import sys; from {module} import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, input=json.dumps(request), stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if not lines:
        raise RunFailedError(f"{name} ended with exit code {done.returncode} and without an answer")
    answer: dict[str, Any] = json.loads(lines[-1])
    if "error" in answer:
        raise RunFailedError(answer["error"])
    return answer
