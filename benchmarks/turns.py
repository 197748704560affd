"""Programs that train in turns: each runs a few steps on command and waits otherwise.

The speed of a machine can change by a fifth within a minute. Values that are compared must be
measured within seconds of each other, many times. Restarting the processes for that would take
longer than the steps.
"""

import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENVIRONMENT = "BENCH_TURN_FD"
PATIENCE_S = 600.0


class Gate:
    """The rank's end: reports each step and waits for its turn. Without a driver, does not wait."""

    def __init__(self) -> None:
        fd = os.environ.get(ENVIRONMENT)
        self._stream = socket.socket(fileno=int(fd)).makefile("rwb") if fd else None
        self._begun: tuple[float, float] | None = None

    def step_begins(self, more: Callable[[], dict[str, Any]] = dict) -> None:
        """Reports the previous step, with `more` JSON data, and waits; exits the process when the
        driver stops. Every rank calls it at the start of a step."""
        if self._stream is None:
            return
        told: dict[str, Any] = {}
        if self._begun is not None:
            wall, cpu = self._begun
            told = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, **more()}
        self._stream.write(json.dumps(told).encode() + b"\n")
        self._stream.flush()
        if not self._stream.readline():
            os._exit(0)  # nothing is left to do, and the other ranks exit at the same time
        self._begun = time.perf_counter(), time.process_time()


@dataclass(frozen=True)
class Turn:
    """One step of one program. `seconds`: of the slowest rank. `told`: by each rank: `wall`, `cpu`,
    and the program's additional data. `sent`: bytes that each host sent."""

    seconds: float
    told: list[dict[str, Any]]
    sent: list[int]


def figures(steps: Sequence[Turn]) -> dict[str, Any]:
    """Returns the mean seconds `step_s` of a step, and the `mb` that a host sends in it at most."""
    sent = statistics.mean(max(one.sent) for one in steps) / 1e6
    return {"step_s": statistics.mean(one.seconds for one in steps), "mb": sent}


class Held:
    """The driver's end: the ranks of one program. `commands`: with the environment of each rank.
    `sent`: returns the bytes that each host has sent so far. Raises SystemExit: a rank exited, or
    was silent for ten minutes; with the last output of all ranks."""

    def __init__(self, commands: Sequence[tuple[list[str], dict[str, str]]], sent: Callable[[], list[int]]) -> None:
        self._sent, self._folder = sent, tempfile.TemporaryDirectory()
        self._ranks, self._sockets, self._streams = [], [], []
        for rank, (command, environment) in enumerate(commands):
            own, theirs = socket.socketpair()
            own.settimeout(PATIENCE_S)
            own_part = {ENVIRONMENT: str(theirs.fileno()), "BENCH_STORE": f"{self._folder.name}/store"}
            with self._said(rank).open("wb") as said:
                self._ranks.append(
                    subprocess.Popen(
                        command, env=environment | own_part, stdout=said, stderr=said, pass_fds=[theirs.fileno()]
                    )
                )
            theirs.close()
            self._sockets.append(own)
            self._streams.append(own.makefile("rwb"))
        self._hear()

    def _said(self, rank: int) -> Path:
        return Path(f"{self._folder.name}/said.{rank}")

    def _hear(self) -> list[dict[str, Any]]:
        told = []
        for rank, stream in enumerate(self._streams):
            try:
                line = stream.readline()
            except TimeoutError:
                line = b""
            if not line:
                words = [self._said(other).read_text(errors="replace")[-3000:] for other in range(len(self._ranks))]
                self.close()
                raise SystemExit(f"rank {rank} exited or does not answer\n" + "\n---\n".join(words))
            told.append(json.loads(line))
        return told

    def steps(self, count: int) -> list[Turn]:
        """Runs this many steps, one after another."""
        found = []
        for _ in range(count):
            before = self._sent()
            for stream in self._streams:
                stream.write(b"go\n")
                stream.flush()
            told = self._hear()
            sent = [after - earlier for after, earlier in zip(self._sent(), before, strict=True)]
            found.append(Turn(max(one["wall"] for one in told), told, sent))
        return found

    def close(self) -> None:
        """Stops the ranks and cleans up."""
        for connection, stream in zip(self._sockets, self._streams, strict=True):
            stream.close()
            connection.close()
        for process in self._ranks:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()
