"""Counts what a piece of code does, which is the same on every machine, busy or not."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Calls:
    """The number of calls of functions so far, those written in C included."""

    count = 0


@contextmanager
def counted_calls() -> Iterator[Calls]:
    """Counts the calls in the block: of this thread, and of threads that it starts."""
    calls = Calls()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        calls.count += event in ("call", "c_call")

    before, before_of_threads = sys.getprofile(), threading.getprofile()
    sys.setprofile(count)
    threading.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(before)
        threading.setprofile(before_of_threads)  # type: ignore[arg-type]
