"""Runs programs and captures what they print."""

import subprocess
import sys
from typing import Any


def run_program(*command: str, code: int | None = 0, **how: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, as `subprocess.run` does; asserts its exit code, if given."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **how)
    assert code is None or done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def run_python(*words: str, **how: Any) -> subprocess.CompletedProcess[str]:
    return run_program(sys.executable, *words, **how)
