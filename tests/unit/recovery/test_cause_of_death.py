"""The cause of death is found from the evidence a process leaves."""

import pytest
from actor_names import DIED_UNEXPECTEDLY as RAY

from raypp.control.process_evidence import DeathEvidence, cause_of_death, oom_kills_in

MONITOR = "Worker exit type: NODE_OUT_OF_MEMORY Worker exit detail: Task was killed due to the node running low"


@pytest.mark.parametrize(
    ("said", "evidence", "kind", "words"),
    [
        (RAY, DeathEvidence(), "killed", "pid 7"),
        (RAY, DeathEvidence(), "killed", "SIGKILL"),
        (RAY, None, "killed", "no process of its node"),
        (RAY, DeathEvidence(oom_kills=1), "out_of_memory", "grew by 1"),
        (MONITOR, DeathEvidence(), "out_of_memory", ""),
        ("Worker exits with an exit code 7.", DeathEvidence(), "", "code 7"),
        ("Worker exit detail: The process receives a SIGTERM.", DeathEvidence(), "", "SIGTERM"),
        ("Worker exits unexpectedly. Worker exit detail: exit code 0.", DeathEvidence(), "", "ended without a trace"),
    ],
)
def test_a_death_is_explained_by_what_ray_says_and_the_kernel_counted(
    said: str, evidence: DeathEvidence | None, kind: str, words: str
) -> None:
    death = cause_of_death(7, said, evidence)
    assert death.kind == (kind or death.kind) and words in death.cause


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
