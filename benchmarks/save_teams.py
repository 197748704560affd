"""Runs the processes of the save benchmark's writers and collects the cost of each save."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks.foreign_writers import python_with_writers
from benchmarks.save_writers import FOREIGN
from raypp.ports import free_port

_LIMIT_S = 240.0
Answers = list[dict[str, Any]]


class Ranks:
    """The ranks of one writer, which wait for commands to save.

    Args:
        python: The interpreter that has the writer's packages.
        writer: One of `save_writers.WRITERS`.
        world: Number of ranks.
        megabytes: State of each rank.
        environment: Environment variables, including the S3 server.

    Raises:
        RuntimeError: A rank exited; the message has its last output.
    """

    def __init__(self, python: str, writer: str, world: int, megabytes: int, environment: dict[str, str]) -> None:
        port = free_port()
        self._said: list[IO[str]] = [tempfile.TemporaryFile("w+") for _ in range(world)]  # noqa: SIM115
        self._processes = [
            subprocess.Popen(
                [python, "-m", "benchmarks.save_rank", writer, str(rank), str(world), str(port), str(megabytes)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, stderr=said,
            )
            for rank, said in enumerate(self._said)
        ]  # fmt: skip
        try:
            self._answers()
        except RuntimeError:
            self.end()
            raise

    def do(self, what: str, number: int) -> Answers:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{what} {number}\n")
            process.stdin.flush()
        return self._answers()

    def _answers(self) -> Answers:
        limit = threading.Timer(_LIMIT_S, self._kill)
        limit.start()
        try:
            lines = [process.stdout.readline() for process in self._processes]  # type: ignore[union-attr]
        finally:
            limit.cancel()
        for rank, line in enumerate(lines):
            if not line:
                code = self._processes[rank].wait(15)
                raise RuntimeError(f"rank {rank} exited with code {code}: {self._last(rank)}")
        return [json.loads(line) for line in lines]

    def _last(self, rank: int) -> str:
        self._said[rank].seek(0)
        return (self._said[rank].read().strip().splitlines() or ["it said nothing"])[-1]

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def end(self) -> None:
        for process in self._processes:
            if process.stdin is not None and process.poll() is None:
                process.stdin.close()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for said in self._said:
            said.close()


class Teams:
    """The ranks of several writers, and the server's cost for each.

    A writer that fails is skipped from then on; `lines` has the reason.

    Args:
        names: The writers.
        world: Ranks of each writer.
        megabytes: State of each rank.
        environment: Environment variables, including the S3 server.
        server: The process of the S3 server.
    """

    def __init__(self, names: list[str], world: int, megabytes: int, environment: dict[str, str], server: int) -> None:
        python: Path | None = None
        self.lines: list[str] = []
        if any(name in FOREIGN for name in names):
            python, said = python_with_writers()
            self.lines.append(f"(other writers: {said})")
        self._server = psutil.Process(server)
        self._teams: dict[str, Ranks] = {}
        self._saves = 0
        for name in names:
            interpreter = str(python) if name in FOREIGN else sys.executable
            if name in FOREIGN and python is None:
                continue
            try:
                self._teams[name] = Ranks(interpreter, name, world, megabytes, environment)
            except RuntimeError as error:
                self.lines.append(f"{name}: left out, {error}")

    def round(self, what: str) -> dict[str, Answers]:
        """Runs one save of each writer, with a different first one each round.

        The answer of rank 0 also has the CPU seconds of the server.
        """
        names, found = list(self._teams), {}
        self._saves += 1
        first = self._saves % max(1, len(names))
        for name in names[first:] + names[:first]:
            before = self._server_s()
            try:
                found[name] = self._teams[name].do(what, self._saves)
            except RuntimeError as error:
                self.lines.append(f"{name}: left out, {error}")
                self._teams.pop(name).end()
                continue
            found[name][0]["server"] = self._server_s() - before
        return found

    def _server_s(self) -> float:
        times = self._server.cpu_times()
        return float(times.user + times.system)

    def end(self) -> None:
        for team in self._teams.values():
            team.end()
