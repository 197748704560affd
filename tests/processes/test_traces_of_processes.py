"""What can be learned of another process: its stacks while it lives, and the words it leaves when a signal ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from raypp.control import process_evidence
from raypp.recovery.evidence import Remains, cause_of_death

RAY = (
    "The actor died unexpectedly before finishing this task.\n\tThe actor is dead because its worker process has died. "
    "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. "
    "End of file. There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high "
    "memory usage. (2) ray stop --force is called. (3) The worker is crashed unexpectedly due to SIGSEGV or other "
    "unexpected errors."
)


def _sleeper(log: Path, title: str) -> subprocess.Popen[bytes]:
    """A process with a rank's title that tells its stacks, and a rank's log."""
    code = """
from raypp.control import process_evidence
import time

def stuck():
    print(1, flush=True)
    time.sleep(60)

process_evidence.prepare()
stuck()
"""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [title, "-c", code], executable=sys.executable, stdout=subprocess.PIPE, stderr=file,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_another_process_is_asked_for_its_stacks_by_a_signal_and_a_frozen_one_is_told_as_that(tmp_path: Path) -> None:
    log = tmp_path / "worker.err"
    process = _sleeper(log, "ray::raypp/mine/pp0")
    try:
        assert process_evidence.stacks_of(process.pid, str(log), "other") == "the process is gone"
        assert "in stuck" in process_evidence.stacks_of(process.pid, str(log), "mine")
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.1)
        frozen = process_evidence.stacks_of(process.pid, str(log), "mine")
        assert "process state: stopped" in frozen and len(frozen) <= process_evidence.MOST_CHARACTERS
    finally:
        process.kill()
        process.wait()
    assert process_evidence.stacks_of(process.pid, str(log), "mine") == "the process is gone"


@pytest.mark.parametrize(("signal", "name"), [(11, "SIGSEGV"), (7, "SIGBUS"), (6, "SIGABRT"), (8, "SIGFPE")])
def test_a_signal_that_the_process_could_tell_of_is_named_with_the_place(signal: int, name: str) -> None:
    code = f"import faulthandler, os; faulthandler.enable()\ndef forward(): os.kill(os.getpid(), {signal})\nforward()"
    words = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr
    death = cause_of_death(7, RAY, Remains(f"some line before\n{words}"))
    assert death.kind == "segfault" and name in death.cause and "in forward" in death.cause
    assert "Fatal Python error" in death.details
