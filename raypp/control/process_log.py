"""Words for this process' log, which may take nothing more: Ray's logs may be on a full disk."""

import contextlib
import sys
import traceback


def say(text: str) -> None:
    """Writes a line to standard error, or drops it."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)  # noqa: T201


def say_exception() -> None:
    """Writes the exception that is being handled, with its traceback."""
    say(traceback.format_exc().removesuffix("\n"))


def flush() -> None:
    """Writes what is buffered of both streams, as far as possible."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
