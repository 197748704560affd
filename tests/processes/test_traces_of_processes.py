"""What is known about another process: its stacks while it lives, its last output afterwards."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from actor_names import DIED_UNEXPECTEDLY as RAY
from programs import run_python

from raypp.control import process_evidence
from raypp.control.process_evidence import DeathEvidence, cause_of_death


def _sleeper(log: Path, title: str) -> subprocess.Popen[bytes]:
    """Starts a process with a rank's title, that can report its stacks, and a rank's log."""
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


def test_another_process_is_asked_for_its_stacks_by_a_signal_and_a_frozen_one_is_reported_as_that(
    tmp_path: Path,
) -> None:
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


@pytest.mark.parametrize(
    ("signal", "name"),
    [
        (11, "SIGSEGV"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((7, "SIGBUS"), (6, "SIGABRT"), (8, "SIGFPE"))),
    ],
)
def test_a_signal_that_the_process_could_handle_is_named_with_the_place(signal: int, name: str) -> None:
    code = f"import faulthandler, os; faulthandler.enable()\ndef forward(): os.kill(os.getpid(), {signal})\nforward()"
    words = run_python("-c", code, code=None).stderr
    death = cause_of_death(7, RAY, DeathEvidence(f"some line before\n{words}"))
    assert death.kind == "segfault" and name in death.cause and "in forward" in death.cause
    assert "Fatal Python error" in death.details


_WAITING_IN_RAY = """Current thread 0x00007f65 (most recent call first):
  File "/venv/lib/python3.11/site-packages/ray/_private/worker.py", line 1011 in main_loop
  File "/venv/lib/python3.11/site-packages/ray/_private/workers/default_worker.py", line 328 in <module>
"""


_NATIVE = "Current thread 0x00007f66 (most recent call first):\n  <no Python frame>\n"


_OTHER = """Thread 0x00007f68 (most recent call first):
  File "/somewhere/else.py", line 3 in idle
"""


_LIVE = """
import faulthandler, threading
from raypp.control.process_evidence import within_rank_frame

def attention():
    inside.set()
    over.wait()

inside, over = threading.Event(), threading.Event()
threading.Thread(target=over.wait, name="beside").start()
rank = threading.Thread(target=within_rank_frame, args=(lambda: attention(),))
rank.start()
inside.wait()
while sys._current_frames()[rank.ident].f_code.co_name == "attention":
    pass
faulthandler.dump_traceback(all_threads=True)
over.set()
"""


@pytest.fixture(scope="module")
def stack_of_rank(tmp_path_factory: pytest.TempPathFactory) -> str:
    source = tmp_path_factory.mktemp("me") / "model.py"
    source.write_text(f"import sys{_LIVE}")
    words = run_python(str(source), timeout=60).stderr
    (found,) = (part for part in words.split("\n\n") if "in attention" in part)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("crashed", [_WAITING_IN_RAY, _NATIVE], ids=["a signal from outside", "a native thread"])
def test_where_no_python_of_its_own_crashed_the_ranks_place_is_reported(crashed: str, stack_of_rank: str) -> None:
    words = "\n".join(["Fatal Python error: Segmentation fault\n", _OTHER, stack_of_rank, crashed])
    death = cause_of_death(7, RAY, DeathEvidence(words))
    assert (
        re.search(r"while the rank was in attention \(\S+/model\.py:7\)", death.cause)
        and "main_loop" not in death.cause
    )
    assert death.details.index("Current thread") < death.details.index("attention") and "idle" not in death.details


@pytest.mark.slow
def test_a_crash_in_rays_own_loop_without_a_rank_names_no_place() -> None:
    death = cause_of_death(7, RAY, DeathEvidence(f"Fatal Python error: Bus error\n\n{_OTHER}\n{_WAITING_IN_RAY}"))
    assert "ended by SIGBUS: " in death.cause
