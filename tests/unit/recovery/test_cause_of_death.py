"""The traces a death leaves are told apart."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from raypp.recovery.cause_of_death import DeathEvidence, cause_of_death, oom_kills_in

RAY = (
    "The actor died unexpectedly before finishing this task.\n\tThe actor is dead because its worker process has died. "
    "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. "
    "End of file. There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high "
    "memory usage. (2) ray stop --force is called. (3) The worker is crashed unexpectedly due to SIGSEGV or other "
    "unexpected errors."
)


def test_a_process_that_ended_without_a_word_was_killed() -> None:
    death = cause_of_death(7, RAY, DeathEvidence())
    assert death.kind == "killed" and "pid 7" in death.cause and "SIGKILL" in death.cause
    assert "no process of its node" in cause_of_death(7, RAY, None).cause


@pytest.mark.parametrize(("signal", "name"), [(11, "SIGSEGV"), (7, "SIGBUS"), (6, "SIGABRT"), (8, "SIGFPE")])
def test_a_signal_that_the_process_could_tell_of_is_named_with_the_place(signal: int, name: str) -> None:
    code = f"import faulthandler, os; faulthandler.enable()\ndef forward(): os.kill(os.getpid(), {signal})\nforward()"
    words = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr
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
from raypp.recovery.cause_of_death import within_rank_frame

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
    """What faulthandler writes of the thread of a rank that is in `attention`, whatever its frames are called now."""
    source = tmp_path_factory.mktemp("me") / "model.py"
    source.write_text(f"import sys{_LIVE}")
    words = subprocess.run([sys.executable, source], capture_output=True, text=True, check=True, timeout=60).stderr
    (found,) = (part for part in words.split("\n\n") if "in attention" in part)
    return found


@pytest.mark.parametrize("crashed", [_WAITING_IN_RAY, _NATIVE], ids=["a signal from outside", "a native thread"])
def test_where_no_python_of_its_own_crashed_the_ranks_place_is_told(crashed: str, stack_of_rank: str) -> None:
    words = "\n".join(["Fatal Python error: Segmentation fault\n", _OTHER, stack_of_rank, crashed])
    death = cause_of_death(7, RAY, DeathEvidence(words))
    assert (
        re.search(r"while the rank was in attention \(\S+/model\.py:7\)", death.cause)
        and "main_loop" not in death.cause
    )
    assert death.details.index("Current thread") < death.details.index("attention") and "idle" not in death.details


def test_a_crash_in_rays_own_loop_without_a_rank_names_no_place() -> None:
    death = cause_of_death(7, RAY, DeathEvidence(f"Fatal Python error: Bus error\n\n{_OTHER}\n{_WAITING_IN_RAY}"))
    assert "ended by SIGBUS: " in death.cause


def test_a_grown_count_of_the_kernel_means_that_memory_was_short() -> None:
    death = cause_of_death(7, RAY, DeathEvidence(oom_kills=1, memory_bytes=3 * 2**30))
    assert death.kind == "out_of_memory" and "3.00 GiB" in death.cause and "grew by 1" in death.cause


def test_ray_says_when_its_memory_monitor_did_it() -> None:
    text = "Worker exit type: NODE_OUT_OF_MEMORY Worker exit detail: Task was killed due to the node running low"
    assert cause_of_death(7, text, DeathEvidence()).kind == "out_of_memory"


def test_an_exit_by_itself_and_a_request_to_end_are_told() -> None:
    assert "code 7" in cause_of_death(7, "Worker exits with an exit code 7.", DeathEvidence()).cause
    assert "SIGTERM" in cause_of_death(7, "Worker exit detail: The process receives a SIGTERM.", DeathEvidence()).cause


def test_the_kernels_counter_is_read_from_any_of_its_files() -> None:
    assert oom_kills_in("low 0\noom 4\noom_kill 3\noom_group_kill 0\n") == 3
    assert oom_kills_in("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n") == 2
    assert oom_kills_in("nr_free 3\n") is None
