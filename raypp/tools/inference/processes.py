"""Runs the processes that generate: one for each pipeline rank, on this machine. Without torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import IO, Any, Self

from raypp.environment import need
from raypp.errors import EXIT_RUN_FAILED, Problem, RayppError, RunFailedError, origin_in_words, place_in_user_code
from raypp.ports import free_port
from raypp.tools.inference.prompts import Encoded
from raypp.tools.inference.source import Source

_PROGRAM = "import sys; from raypp.tools.inference.rank import main; sys.exit(main())"
_END_S = 5.0
_SHOWN = 2000


@dataclass(frozen=True)
class NewToken:
    """A token of a text. `token`: its id. `finish`: why the text ends with it, `length` or `eos`;
    None: it continues."""

    prompt: int
    token: int
    finish: str | None


class Generators:
    """The processes that hold a model, one for each pipeline rank. A context manager ends them.
    `rows`: prompts that are decoded together. Raises JobError: torch is not installed here."""

    def __init__(self, source: Source, pp: int, ends: Sequence[int], rows: int) -> None:
        need("torch", "node", "generating")
        setup = {"source": asdict(source), "pp": pp, "port": free_port(), "ends": list(ends), "rows": rows}
        # -P: do not import from the working directory.
        command = [sys.executable, "-P", "-c", _PROGRAM]
        self._logs: list[IO[bytes]] = [tempfile.TemporaryFile() for _ in range(2 * pp)]  # noqa: SIM115
        self._ranks = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if rank == 0 else self._logs[2 * rank],
                stderr=self._logs[2 * rank + 1],
            )
            for rank in range(pp)
        ]
        for rank in range(pp):
            self._tell(rank, {**setup, "rank": rank})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self._ranks:
            if process.stdin is not None:
                process.stdin.close()
        self._end(_END_S if kind is None else 0.0)

    def generate(
        self, prompts: Sequence[Encoded], *, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0
    ) -> Iterator[NewToken]:
        """Yields the new tokens of all prompts as they come. Raises GenerationError: a process has
        failed."""
        choice = {"temperature": temperature, "top_p": top_p, "seed": seed}
        request = {"prompts": [[prompt.tokens, prompt.limit] for prompt in prompts], "choice": choice}
        for rank in range(len(self._ranks)):
            self._tell(rank, request)
        out = self._ranks[0].stdout
        assert out is not None
        for line in out:
            answer = json.loads(line)
            if "done" in answer:
                return
            if "error" in answer:
                break
            yield NewToken(*answer["token"])
        raise self._failure()

    def _tell(self, rank: int, document: dict[str, Any]) -> None:
        stream = self._ranks[rank].stdin
        assert stream is not None
        try:
            stream.write(json.dumps(document).encode() + b"\n")
            stream.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def _end(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        for process in self._ranks:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _failure(self) -> RayppError:
        """Ends all processes, and returns the error of the one that failed first."""
        self._end(_END_S)
        errors = {}
        for rank in range(len(self._ranks)):
            text = self._log(2 * rank + 1)
            lines = text.strip().splitlines()
            try:
                errors[rank] = json.loads(lines[-1])["error"]
            except (ValueError, KeyError, TypeError, IndexError):
                if code := self._ranks[rank].returncode:
                    errors[rank] = died(rank, f"ended with exit code {code}: {text[-_SHOWN:].strip()}")
        return first_error(errors)

    def _log(self, index: int) -> str:
        self._logs[index].seek(0)
        return self._logs[index].read().decode(errors="replace")


class GenerationError(RunFailedError):
    """A process that uses a model has failed; has its exit code."""

    def __init__(self, problems: Any, exit_code: int = RunFailedError.exit_code) -> None:
        super().__init__(problems)
        self.exit_code = exit_code

    def __reduce__(self) -> Any:
        return type(self), (self.problems, self.exit_code)


def error_document(error: BaseException, *, peer: bool) -> dict[str, Any]:
    """Returns an error as plain JSON values. `peer`: whether it only means that another rank is
    gone."""
    if isinstance(error, RayppError):
        peer = False
    else:
        frames = "" if place_in_user_code(error) else "\n" + "".join(traceback.format_exception(error))
        error = RunFailedError(f"{origin_in_words(error)}{frames}")
    problems = [[problem.key, problem.fault, problem.fix] for problem in error.problems]
    return {"problems": problems, "exit_code": error.exit_code, "peer": peer}


def died(rank: int, why: str) -> dict[str, Any]:
    """Returns the document of a rank that ended without one."""
    fault = f"the process of rank {rank} {why}"
    return {"problems": [["", fault, ""]], "exit_code": EXIT_RUN_FAILED, "peer": False}


def first_error(errors: Mapping[int, Mapping[str, Any]]) -> GenerationError:
    """Returns the error that is the cause: of a rank that did not just lose another one. `errors`:
    the documents by rank."""
    if not errors:
        return GenerationError("the processes ended without an answer")
    _, _, error = min(((error["peer"], rank, error) for rank, error in errors.items()), key=lambda entry: entry[:2])
    return GenerationError([Problem(*problem) for problem in error["problems"]], error["exit_code"])
