"""`raypp status --watch` on a pseudo-terminal: sizes, and the terminal afterwards."""

import contextlib
import dataclasses
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raypp.records import Coordinates, Event, RunState, StepReport
from raypp.state.run_records.recorder import RunRecorder
from raypp.state.run_records.status import RankStatus, RunStatus
from raypp.storage import open_store

pytestmark = pytest.mark.slow

PATIENCE_S = 120.0
RANKS = tuple(RankStatus(rank, Coordinates(pp=rank), "node-1", 100 + rank, "running") for rank in range(2))
STATUS = RunStatus("watched", RunState.RUNNING, 20, 100, 2.5, 1e4, 1, mesh={"pp": 2}, ranks=RANKS)
ENTER, LEAVE, CURSOR = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"


class Screen:
    """A command on a pseudo-terminal, whose settings can be read at any time."""

    def __init__(self, command: list[str], home: Path) -> None:
        self._ours, self._its = pty.openpty()
        self.resize(24, 100)
        self.before = termios.tcgetattr(self._its)
        environment = {
            **{name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")},
            "RAYPP_HOME": str(home),
            "TERM": "xterm-256color",
            "RAYPP_ADDRESS": "http://127.0.0.1:9",
        }
        self.process = subprocess.Popen(
            command, stdin=self._its, stdout=self._its, stderr=self._its, env=environment, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        self.seen = b""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def until(self, words: str) -> str:
        """Returns what was shown since the last call, without codes, up to these words."""
        end, start = time.monotonic() + PATIENCE_S, len(self.seen)
        while words not in (shown := plain(self.seen[start:])):
            assert time.monotonic() < end and self._read(), f"{words!r} was not shown:\n{shown[-3000:]}"
        return shown

    def _read(self) -> bool:
        if select.select([self._ours], [], [], 0.5)[0]:
            self.seen += os.read(self._ours, 65536)
        return self.process.poll() is None or bool(select.select([self._ours], [], [], 0)[0])

    def end(self) -> int:
        end = time.monotonic() + PATIENCE_S
        while self._read():
            assert time.monotonic() < end, "it did not end"
        return self.process.wait()

    def assert_restored(self) -> None:
        assert termios.tcgetattr(self._its) == self.before
        assert self.seen.count(ENTER) == self.seen.count(LEAVE) == 1
        assert self.seen.rindex(CURSOR) > self.seen.rindex(b"\x1b[?25l")

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._its)


def plain(shown: bytes) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode("utf-8", "replace"))


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[RunRecorder]:
    with RunRecorder(open_store(str(tmp_path / "store")), "watched", "a1", interval_s=0.05) as recorder:
        recorder.event(Event("committed", "step 20 is \x1b[2Jdurable", step=20))
        for step in range(1, 21):
            recorder.step(StepReport(step, 5.0 - step / 8, 0.5, 1000, 64, 0.5, 1e4, 1))
        recorder.status(STATUS)
        assert recorder.flush()
        yield recorder


@pytest.fixture
def screen(recorder: RunRecorder, tmp_path: Path) -> Iterator[Screen]:
    command = [sys.executable, "-m", "raypp", "status", str(tmp_path / "store" / "watched"), "--watch"]
    screen = Screen(command, tmp_path / "home")
    yield screen
    screen.close()


def test_it_shows_the_run_until_ctrl_c(screen: Screen) -> None:
    shown = screen.until("Ctrl-C leaves")
    for words in (
        "watched  RUNNING",
        "step 20/100",
        "ETA 0:40",
        "loss 2.5000",
        "10k tokens/s",
        "0 running",
        "1 running",
    ):
        assert words in shown, shown
    assert "step 20 is \\x1b[2Jdurable" in shown and "⠑" in shown
    screen.press(b"\x03")
    assert screen.end() == 130
    screen.assert_restored()


def test_it_ends_with_the_run(screen: Screen, recorder: RunRecorder) -> None:
    screen.until("Ctrl-C leaves")
    recorder.status(dataclasses.replace(STATUS, state=RunState.SUCCEEDED, step=100))
    assert screen.end() == 0
    screen.assert_restored()
    assert "watched  SUCCEEDED" in plain(screen.seen[screen.seen.rindex(LEAVE) :])


@pytest.mark.parametrize(("how", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_terminal_is_restored_when_it_is_interrupted(screen: Screen, how: signal.Signals, code: int) -> None:
    screen.until("Ctrl-C leaves")
    screen.process.send_signal(how)
    assert screen.end() == code
    screen.assert_restored()


def test_without_a_terminal_it_prints_lines(recorder: RunRecorder, tmp_path: Path) -> None:
    recorder.status(dataclasses.replace(STATUS, state=RunState.STOPPED))
    recorder.flush()
    command = [sys.executable, "-m", "raypp", "status", str(tmp_path / "store" / "watched"), "--watch"]
    environment = {**os.environ, "RAYPP_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE_S, check=False)
    assert done.stdout == "STOPPED  step 20/100  loss 2.5000  10k tokens/s  attempt 1\n", done.stderr
