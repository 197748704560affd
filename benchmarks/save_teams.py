"""Runs the processes of the save benchmark's writers and collects the cost of each save."""

import json
import subprocess
import sys
import sysconfig
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks.save_writers import FOREIGN
from raypp.ports import free_port

_LIMIT_S = 240.0
Answers = list[dict[str, Any]]

PLACE = Path("~/.cache/raypp/benchmark-writers").expanduser()
# s3fs needs a lower bound: with a given boto3, pip would silently choose a version from 2020.
_PACKAGES = (["s3fs>=2024.6"], ["--no-deps", "s3torchconnector", "s3torchconnectorclient", "tenacity"])


class Ranks:
    """The ranks of one writer, which wait for commands to save. `python`: has the writer's
    packages. `megabytes`: of state, in each rank. `environment`: with the S3 server. Raises
    RuntimeError: a rank exited; the message has its last output."""

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
    """The ranks of several writers, and the server's cost for each. A writer that fails is skipped
    from then on; `lines` has the reason. `server`: its process; see `Ranks` for the rest."""

    def __init__(self, names: list[str], world: int, megabytes: int, environment: dict[str, str], server: int) -> None:
        interpreters: dict[bool, Path | None] = {False: Path(sys.executable)}
        self.lines: list[str] = []
        if any(name in FOREIGN for name in names):
            interpreters[True], said = python_with_writers()
            self.lines.append(f"(other writers: {said})")
        self._server, self._saves = psutil.Process(server), 0
        self._teams: dict[str, Ranks] = {}
        for name in names:
            if (interpreter := interpreters[name in FOREIGN]) is None:
                continue
            try:
                self._teams[name] = Ranks(str(interpreter), name, world, megabytes, environment)
            except RuntimeError as error:
                self.lines.append(f"{name}: left out, {error}")

    def round(self, what: str) -> dict[str, Answers]:
        """Runs one save of each writer, with a different first one each round. The answer of rank 0
        also has the CPU seconds of the server."""
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


def python_with_writers() -> tuple[Path | None, str]:
    """Returns a Python with its own s3fs and s3torchconnector, and the torch of this environment.
    None, if it cannot be made; and its versions, or why."""
    python = PLACE / "bin" / "python"
    check = "import s3fs, s3torchconnector.dcp, torch; print(s3fs.__version__, s3torchconnector.__version__)"
    # It lacks what this environment had when it was made, so another one needs a new one.
    complete, ours = PLACE / "complete", sysconfig.get_paths()["purelib"]
    if not complete.exists() or complete.read_text() != ours:
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(PLACE)], check=True, capture_output=True)
            site = next((PLACE / "lib").glob("python*")) / "site-packages"
            (site / "torch-from-outside.pth").write_text(f"{ours}\n")
            for packages in _PACKAGES:
                subprocess.run(
                    [str(python), "-m", "pip", "install", "--quiet", *packages],
                    check=True, capture_output=True, timeout=240,
                )  # fmt: skip
            complete.write_text(ours)
        except (subprocess.SubprocessError, OSError) as error:
            return None, f"skipped: the packages could not be installed ({error})"
    done = subprocess.run([str(python), "-c", check], capture_output=True, text=True, check=False)
    if done.returncode:
        return None, f"skipped: {done.stderr.strip().splitlines()[-1]}"
    return python, "s3fs {}, s3torchconnector {}".format(*done.stdout.split())
