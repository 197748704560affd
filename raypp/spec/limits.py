"""Limits of a job: of its text, and of its numbers. No real job comes near them.

A number within its limit can still be wrong; but nothing that raypp does with it overflows, takes
all memory or takes longer than seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from raypp.errors import Problem

FILE_BYTES = 256 << 10
"""Bytes of a job file."""
DEPTH = 32
"""Levels of sections and lists, also along aliases."""
TEXT = 32_768
"""Characters of one value."""
KEY = 200
"""Characters of a key."""
DIGITS = 40
"""Characters of a number."""
OVERRIDES = 1000
"""`--set` options of a command."""
PROBLEMS = 50
"""Problems of one job file that are listed."""

LAYERS = 4096
RANKS = 131_072
"""Ranks of a mesh, and of each of its axes."""
STAGES = 1024
"""Stages of a pipeline."""
PROMPTS = 16
"""Prompts of `train.sample`."""
TRACKERS = 16
"""Trackers of `observe.trackers`."""
PROMPT = 4096
"""Characters of one of them."""
NEW_TOKENS = 1024
"""Tokens of a sample."""
ACTIONS = 131_072
"""Actions of a schedule's program: ranks · stages per rank · microbatches · 2."""
ROWS = 10**6
"""Rows of a microbatch."""
WIDTH = 10**9
"""Sizes of a model's parts, and lengths of sequences."""
COUNT = 10**12
"""Steps, documents, and other counts."""
SEED = 2**63 - 1
SECONDS = 10**9
RATE = 10**9
"""Rates in Gbit/s or Mbit/s."""
REAL = 1e30
"""Numbers that only scale others, such as a learning rate."""


def within_limits(value: Any) -> tuple[Any, list[tuple[tuple[str | int, ...], str, str]]]:
    """Checks plain values before they are parsed any further.

    Returns:
        A copy in which None stands for every value that a limit excludes; and for each of them its
        key path, what is wrong, and the fix.
    """
    walk = _Walk()
    return walk.copy(value, ()), walk.found


class _Walk:
    def __init__(self) -> None:
        self.found: list[tuple[tuple[str | int, ...], str, str]] = []

    def copy(self, value: Any, path: tuple[str | int, ...]) -> Any:
        if isinstance(value, list | tuple | Mapping) and len(path) >= DEPTH:
            return self.refuse(path, f"is nested more than {DEPTH} levels deep", "write fewer levels")
        if isinstance(value, Mapping):
            return {key: self.copy(inner, (*path, key)) for key, inner in value.items() if self._good_key(key, path)}
        if isinstance(value, list | tuple):
            return [self.copy(inner, (*path, index)) for index, inner in enumerate(value)]
        if isinstance(value, str) and (wrong := text_problem(value)):
            return self.refuse(path, *wrong)
        if isinstance(value, int) and abs(value) >= 10**DIGITS:
            return self.refuse(path, f"is a number of more than {DIGITS} digits", "write fewer digits")
        if isinstance(value, float) and not math.isfinite(value) and len(path) > 1 and path[0] == "model":
            return self.refuse(path, f"must be a finite number, is {value}", "write it with digits")
        return value

    def refuse(self, path: tuple[str | int, ...], what: str, fix: str) -> None:
        self.found.append((path, what, fix))

    def _good_key(self, key: Any, path: tuple[str | int, ...]) -> bool:
        wrong = key_problem(str(key))
        if wrong:
            self.refuse(path, *wrong)
        return wrong is None


def text_problem(text: str, most: int = TEXT) -> tuple[str, str] | None:
    """Returns what is wrong with a value, and the fix; None if it is within limits."""
    if len(text) > most:
        return f"has {len(text):,} characters; at most {most:,} are read", "write a shorter text"
    if "\0" in text:
        return "contains a NUL character", "remove it"
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        return "contains half of a surrogate pair, which is not a character", "remove it"
    return None


def key_problem(key: str) -> tuple[str, str] | None:
    """Returns what is wrong with a key, and the fix; None if it is within limits."""
    wrong = text_problem(key, KEY)
    return wrong and (f"a key {wrong[0]}", wrong[1])


def first_problems(problems: list[Problem], total: int | None = None) -> list[Problem]:
    """Returns the first `PROBLEMS`, and one more that says how many are left out.

    Args:
        problems: The problems, in order.
        total: Their number, if the list has only the first.
    """
    left = max(total or 0, len(problems)) - PROBLEMS
    if left <= 0:
        return problems
    shown = problems[:PROBLEMS]
    return [*shown, Problem("", f"and {left:,} more problems", "correct these first", shown[-1].where)]
