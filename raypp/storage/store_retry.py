"""How long requests to a failing store are retried, and with which backoff."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from raypp.errors import JobError, Problem
from raypp.retry import Backoff

LONG_S = 60.0
"""For training processes: the server may be restarted meanwhile."""
SHORT_S = 8.0
"""While nothing listens at the endpoint: users want to know soon."""
WAIT_S = 600.0
"""For a run's last save, and between two attempts: somebody may make room, or mend the store."""
COMMAND_S = 30.0
"""For all requests of a command at a terminal together."""
COMMAND_SILENCE_S = 10.0
"""Longest silence on a connection of a command."""
_FIRST_S = 0.2
_LONGEST_S = 8.0
_REGAINED = 0.05


class Budget:
    """Seconds that the failing requests of a command may take together. Thread-safe.

    Requests that fail at the same time count once. A command that follows a run for weeks meets
    more failures than one that ends: of the time without failures, a twentieth is regained.

    Args:
        total_s: See above.
    """

    def __init__(self, total_s: float) -> None:
        self.total_s = total_s
        self._lock = threading.Lock()
        self._spent = 0.0
        self._failing = 0
        self._latest = time.monotonic()

    @property
    def left_s(self) -> float:
        with self._lock:
            self._settle()
            return self.total_s - self._spent

    def begin(self, seconds: float) -> None:
        """A request has failed for the first time, after so many seconds."""
        with self._lock:
            self._settle()
            if not self._failing:
                self._spent += seconds
            self._failing += 1

    def end(self) -> None:
        """The request that `begin` was called for has succeeded or has been given up."""
        with self._lock:
            self._settle()
            self._failing -= 1

    def _settle(self) -> None:
        now = time.monotonic()
        passed, self._latest = now - self._latest, now
        self._spent = max(0.0, self._spent + (passed if self._failing else -_REGAINED * passed))


_command: Budget | None = None
"""The budget of the command that this process runs; None: it is none."""


@contextmanager
def bounded_command() -> Iterator[None]:
    """Within it, stores that are opened without a given patience share one `Budget`."""
    global _command
    given = seconds_from_environment("RAYPP_STORE_PATIENCE_S")
    _command = Budget(COMMAND_S if given is None else given)
    try:
        yield
    finally:
        _command = None


@dataclass(frozen=True)
class Patience:
    """Exponential backoff with jitter, so that many ranks do not retry at the same moment.

    Attributes:
        total_s: No request begins later than this after the first failure.
        unreachable_s: The same if nothing listens at the endpoint at all.
        budget: Ends retries when it is spent; None in training.
    """

    total_s: float = LONG_S
    unreachable_s: float = SHORT_S
    budget: Budget | None = None

    def pauses(self) -> Iterator[float]:
        """Yields the seconds to wait before each retry, until the time is up.

        Time counts from the first `next`.
        """
        # At least half of each pause is certain, so that retries do not hit an overloaded server at
        # once.
        return Backoff(self.total_s, _FIRST_S, _LONGEST_S, jitter=0.5).pauses()


def patience_from_environment(unreachable_s: float = SHORT_S) -> Patience:
    """Returns the default, or RAYPP_STORE_PATIENCE_S in seconds for every kind of failure.

    Raises:
        JobError: The value is not a number of seconds.
    """
    given = seconds_from_environment("RAYPP_STORE_PATIENCE_S")
    if given is not None:
        return Patience(given, given, _command)
    return Patience(max(LONG_S, unreachable_s), unreachable_s, _command)


def seconds_from_environment(name: str) -> float | None:
    """Reads a setting in seconds; None if it is not set.

    Raises:
        JobError: The value is not a number of seconds.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    try:
        seconds = float(text)
        if not 0 <= seconds < 1e6:
            raise ValueError
    except ValueError:
        raise JobError(Problem(name, f"{text!r} is not a number of seconds", f"set, for example, {name}=60")) from None
    return seconds
