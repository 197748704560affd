"""The cause of death is found from the evidence a process leaves."""

from __future__ import annotations

from raypp.control.process_evidence import DeathEvidence, cause_of_death, oom_kills_in

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


def test_a_grown_count_of_the_kernel_means_that_memory_was_short() -> None:
    death = cause_of_death(7, RAY, DeathEvidence(oom_kills=1))
    assert death.kind == "out_of_memory" and "grew by 1" in death.cause


def test_ray_says_when_its_memory_monitor_did_it() -> None:
    text = "Worker exit type: NODE_OUT_OF_MEMORY Worker exit detail: Task was killed due to the node running low"
    assert cause_of_death(7, text, DeathEvidence()).kind == "out_of_memory"


def test_an_exit_by_itself_and_a_request_to_end_are_reported() -> None:
    assert "code 7" in cause_of_death(7, "Worker exits with an exit code 7.", DeathEvidence()).cause
    assert "SIGTERM" in cause_of_death(7, "Worker exit detail: The process receives a SIGTERM.", DeathEvidence()).cause


def test_the_kernels_counter_is_read_from_any_of_its_files() -> None:
    assert oom_kills_in("low 0\noom 4\noom_kill 3\noom_group_kill 0\n") == 3
    assert oom_kills_in("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n") == 2
    assert oom_kills_in("nr_free 3\n") is None


def test_of_two_reports_in_a_log_the_last_is_the_death() -> None:
    """A log goes on where the last attempt's process wrote into it."""
    log = (
        "Fatal Python error: Aborted\n\n"
        'Current thread 0x00007f01 (most recent call first):\n  File "/a/allocate.py", line 3 in grow\n'
        "Fatal Python error: Segmentation fault\n\n"
        'Current thread 0x00007f02 (most recent call first):\n  File "/a/kernel.py", line 9 in launch\n'
    )
    death = cause_of_death(7, RAY, DeathEvidence(log_tail=log))
    assert death.kind == "segfault" and "SIGSEGV, in launch (/a/kernel.py:9)" in death.cause
    assert "allocate.py" not in death.details


def test_an_exit_code_of_zero_explains_no_death() -> None:
    text = "Worker exits unexpectedly. Worker exit detail: exit code 0."
    assert "ended without a trace" in cause_of_death(7, text, DeathEvidence()).cause
