"""A process is known by its pid and its start."""

import os
from pathlib import Path

import psutil
import pytest

from raypp.own_process import OwnProcess
from raypp.state.memory.files import keeper


def test_a_later_process_with_the_same_pid_is_another_one() -> None:
    own = OwnProcess.of(os.getpid())
    assert own.find() is not None
    assert OwnProcess(own.pid, own.started - 1.0).find() is None
    with pytest.raises(ProcessLookupError):
        OwnProcess.of(2**30)


@pytest.mark.skipif(not psutil.LINUX, reason="only Linux counts from the start of the machine")
@pytest.mark.parametrize("seconds", [-3600, 2])
def test_a_step_of_the_clock_does_not_make_it_another_one(
    seconds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = OwnProcess.of(os.getpid())
    (tmp_path / str(own.pid)).symlink_to(f"/proc/{own.pid}")
    stat = Path("/proc/stat").read_text().splitlines()
    changed = [f"btime {int(line.split()[1]) + seconds}" if line.startswith("btime") else line for line in stat]
    (tmp_path / "stat").write_text("\n".join(changed))
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    assert psutil.Process(own.pid).create_time() != pytest.approx(own.started, abs=1.0)
    assert own.find() is not None


def test_the_raylet_keeps_snapshots_in_memory_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_RAYLET_PID", raising=False)
    assert keeper()[0] == os.getppid()
    monkeypatch.setenv("RAY_RAYLET_PID", str(os.getpid()))
    own = OwnProcess.of(os.getpid())
    assert keeper() == [own.pid, own.started]
    monkeypatch.setenv("RAY_RAYLET_PID", str(2**30))
    assert keeper() == [2**30, 0.0]
