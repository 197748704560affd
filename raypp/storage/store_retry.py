"""How long requests to a failing store are retried, and with which backoff."""

from __future__ import annotations

import os
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
"""For a command at a terminal."""
SILENCE_S = 30.0
"""Longest silence on a connection, unless it is set."""
COMMAND_SILENCE_S = 10.0
"""The same of a command."""
_FIRST_S = 0.2
_LONGEST_S = 8.0


_in_command = False


@contextmanager
def bounded_command() -> Iterator[None]:
    """Within it, stores that are opened without a given patience are those of a command."""
    global _in_command
    _in_command = True
    try:
        yield
    finally:
        _in_command = False


@dataclass(frozen=True)
class Patience:
    """Exponential backoff with jitter, so that many ranks do not retry at the same moment.
    `total_s`: no request begins later than this after the first failure. `unreachable_s`: the same
    if nothing listens at the endpoint at all. `silence_s`: longest silence on a connection, unless
    RAYPP_STORE_TIMEOUT_S sets it."""

    total_s: float = LONG_S
    unreachable_s: float = SHORT_S
    silence_s: float = SILENCE_S

    def pauses(self) -> Iterator[float]:
        """Yields the seconds to wait before each retry, until the time is up. Time counts from the
        first `next`."""
        # At least half of each pause is certain, so that retries do not hit an overloaded server at
        # once.
        return Backoff(self.total_s, _FIRST_S, _LONGEST_S, jitter=0.5).pauses()


def patience_from_environment(unreachable_s: float = SHORT_S) -> Patience:
    """Returns the default, or RAYPP_STORE_PATIENCE_S in seconds for every kind of failure. Raises
    JobError: the value is not a number of seconds."""
    usual_s, silence_s = (COMMAND_S, COMMAND_SILENCE_S) if _in_command else (LONG_S, SILENCE_S)
    given = seconds_from_environment("RAYPP_STORE_PATIENCE_S")
    if given is not None:
        return Patience(given, given, silence_s)
    return Patience(max(usual_s, unreachable_s), unreachable_s, silence_s)


def seconds_from_environment(name: str) -> float | None:
    """Reads a setting in seconds; None if it is not set. Raises JobError: the value is not a number
    of seconds."""
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
