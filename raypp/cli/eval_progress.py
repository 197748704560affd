"""Shows on stderr how far an evaluation is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from raypp.cli.console import Console
from raypp.cli.output import echo
from raypp.observe.in_words import duration

_FIRST_LINE_S, _LINE_EVERY_S = 5.0, 30.0

Update = Callable[[Mapping[str, Any]], None]


@contextmanager
def evaluation_progress(*, quiet: bool) -> Iterator[Update]:
    """Shows the progress of an evaluation and the time left.

    On a terminal it is a bar that disappears at the end. Elsewhere it is a line every 30 s, the
    first one after 5 s.

    Args:
        quiet: Show nothing unless stderr is a terminal.

    Yields:
        A function that takes `done`, `total` and `unit` (`tokens` or `rows`).
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield (lambda _report: None) if quiet else _Lines(time.monotonic).update
        return
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(),
        TextColumn("{task.fields[words]}", markup=False), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("evaluating", total=None, words="")
        yield lambda report: progress.update(
            task, completed=report["done"], total=report["total"], words=_count_in_words(report)
        )


def _count_in_words(report: Mapping[str, Any]) -> str:
    return f"{report['done']:,} of {report['total']:,} {report['unit']}"


class _Lines:
    """Prints progress as lines.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._next = self._began + _FIRST_LINE_S
        self._first: tuple[float, int] | None = None

    def update(self, report: Mapping[str, Any]) -> None:
        """Prints a line if one is due."""
        now = self._clock()
        if self._first is None or report["done"] < self._first[1]:
            self._first = now, report["done"]  # without the time that loading took
        if now < self._next:
            return
        self._next = now + _LINE_EVERY_S
        since, before = self._first
        left = ""
        if report["done"] > before:
            seconds = (now - since) * (report["total"] - report["done"]) / (report["done"] - before)
            left = f", {duration(seconds)} left"
        echo(f"evaluating: {_count_in_words(report)}{left}", err=True)
