"""Gives inputs to targets, within limits of time and memory, and keeps what fails."""

import contextlib
import multiprocessing
import os
import resource
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any, NoReturn

from raypp.errors import RayppError
from tests.fuzz import Target
from tests.fuzz.mutations import mutated

CPU_S = 2.0
WALL_S = 20.0
MEMORY_MB = 200
_GUARD_MB = 2000
"""A target that asks for more at once gets a MemoryError, which is a failure, too."""
_KILL_S = 2 * WALL_S
_MB = 1 << 20


class Exceeded(BaseException):
    """A target took too long; not an Exception, so that it cannot take this for its own error."""


@dataclass(frozen=True)
class Execution:
    """One input given to one target.

    Attributes:
        cpu_s: CPU seconds of the process.
        memory_mb: How much larger than before the process was at its largest.
        refused: The RayppError's text; None if the input was accepted.
        failure: What is wrong with the target, with a traceback; None if nothing is.
    """

    cpu_s: float
    memory_mb: float
    refused: str | None = None
    failure: str | None = None


@dataclass
class Tally:
    """What a target did so far. `failed` is the number of the input that failed: see `input_of`."""

    executions: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest_cpu_s: float = 0.0
    most_mb: float = 0.0
    failure: str | None = None
    failed: int = -1

    def add(self, one: Execution) -> None:
        self.executions += 1
        self.refused += one.refused is not None
        self.slowest_cpu_s = max(self.slowest_cpu_s, one.cpu_s)
        self.most_mb = max(self.most_mb, one.memory_mb)
        self.failure = one.failure


def execute(target: Target, data: bytes) -> Execution:
    """Gives one input to a target, in this process and its main thread."""
    before = _reset_peak()
    began = time.process_time()
    refused = failure = None
    try:
        with _limits():
            target.run(data)
    except RayppError as error:
        refused = str(error)
        if not refused.strip():
            failure = "the RayppError says nothing"
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001  whatever else comes out is what is looked for
        failure = traceback.format_exc(limit=-25)
    cpu_s, memory_mb = time.process_time() - began, (_peak() - before) / _MB
    if failure is None and cpu_s > CPU_S:
        failure = f"took {cpu_s:.1f} s of CPU, more than {CPU_S:g} s"
    if failure is None and memory_mb > MEMORY_MB:
        failure = f"took {memory_mb:.0f} MB, more than {MEMORY_MB} MB"
    return Execution(cpu_s, memory_mb, refused, failure)


def input_of(target: Target, seed: int, number: int) -> bytes:
    """Returns the input of this number: the samples first, then mutations."""
    if number < len(target.samples):
        return target.samples[number]
    return mutated(Random(f"{target.name}/{seed}/{number}"), target.samples, target.words)


def take_turn(target: Target, seed: int, tally: Tally, seconds: float) -> Tally:
    """Fuzzes a target for some seconds in a process of its own, which is killed if it does not come
    back. Returns the tally with the turn."""
    context = multiprocessing.get_context("fork")  # what is imported need not be imported again
    ours, theirs = context.Pipe(duplex=False)
    number = context.Value("q", tally.executions, lock=False)
    process = context.Process(target=_turn, args=(target, seed, tally, seconds, number, theirs))
    process.start()
    theirs.close()
    try:
        if ours.poll(seconds + _KILL_S):
            tally = ours.recv()
        else:
            tally.failure = f"did not come back within {_KILL_S:g} s"
    except EOFError:
        process.join(_KILL_S)
        tally.failure = f"the process ended with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()
    if tally.failure is not None:
        tally.failed = number.value
    return tally


def _turn(target: Target, seed: int, tally: Tally, seconds: float, number: Any, parent: Connection) -> None:
    _guard_memory()
    began = time.monotonic()
    while tally.failure is None and time.monotonic() < began + seconds:
        number.value = tally.executions
        tally.add(execute(target, input_of(target, seed, tally.executions)))
    tally.seconds += time.monotonic() - began
    parent.send(tally)
    parent.close()
    os._exit(0)  # without what the parent would do at its end


def _guard_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    with contextlib.suppress(ValueError):  # a lower limit exists
        limit = pages * resource.getpagesize() + _GUARD_MB * _MB
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    def stop(number: int, frame: Any) -> NoReturn:
        raise Exceeded(
            f"more than {CPU_S:g} s of CPU" if number == signal.SIGPROF else f"more than {WALL_S:g} s in all"
        )

    before = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    # Again and again: a `finally` or a thread's end may take the first.
    signal.setitimer(signal.ITIMER_PROF, CPU_S, 1.0)
    other = signal.setitimer(signal.ITIMER_REAL, WALL_S, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, *other)
        for number, handler in before.items():
            signal.signal(number, handler)


def _reset_peak() -> int:
    """Makes the peak the present size; returns that, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    """Returns the largest size of the process since the reset, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
