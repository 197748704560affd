"""A bar of bytes that are read or written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from raypp.cli.console import Console


@contextmanager
def progress_bar(what: str, size: int | None) -> Iterator[Callable[[int], None]]:
    """Shows progress in bytes on stderr, if it is a terminal."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=size)
        yield lambda count: progress.advance(task, count)
