"""Reads single keys from the terminal, and always restores the terminal's settings."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

try:
    import termios
    import tty
except ImportError:  # not on Windows
    termios = None  # type: ignore[assignment]

_SEQUENCE = re.compile(rb"\x1b(\[[0-9;]*[A-Za-z~]|O.)?")
"""The sequence that an arrow or function key sends."""


class Keys:
    """The keys that are pressed.

    Args:
        input_fd: The terminal; None: there is none, and no key is ever pressed.
    """

    def __init__(self, input_fd: int | None) -> None:
        self.there = input_fd is not None
        self._fd = input_fd

    def wait(self, seconds: float) -> str:
        """Returns the keys pressed since the last call; waits for the first of them.

        Empty after `seconds`. A key that sends a sequence, such as an arrow, counts as none.
        """
        if self._fd is None:
            time.sleep(seconds)
            return ""
        if not select.select([self._fd], [], [], seconds)[0]:
            return ""
        pressed = os.read(self._fd, 1024)
        if not pressed:  # the terminal is gone
            self._fd = None
        return _SEQUENCE.sub(b"", pressed).decode("ascii", "ignore")


@contextlib.contextmanager
def single_keys() -> Iterator[Keys]:
    """Reads keys from standard input one by one, without echo, if it is a terminal.

    Restores the terminal afterwards, also after Ctrl-C, SIGTERM, a hang-up or an exception.
    Call it in the main thread.
    """
    with _signals():
        if termios is None or not sys.stdin.isatty():
            yield Keys(None)
            return
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
        try:
            tty.setcbreak(descriptor, termios.TCSANOW)
            yield Keys(descriptor)
        finally:
            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Makes signals that would end the process raise SystemExit; Ctrl-Z does nothing meanwhile."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    names = {"SIGTERM": leave, "SIGHUP": leave, "SIGTSTP": signal.SIG_IGN}
    wanted: dict[signal.Signals, Any] = {
        getattr(signal, name): handler for name, handler in names.items() if hasattr(signal, name)
    }
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
