"""`raypp status RUN --watch` on a terminal: a live screen with keys to save, stop and leave."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from rich.live import Live

from raypp.api.find_run import present_status
from raypp.cli.console import Console, Text
from raypp.cli.screen_view import LossCurve, Records, screen_view
from raypp.clusters.known_runs import RunPlace
from raypp.errors import RayppError, in_words
from raypp.observe.reader import RunReader
from raypp.observe.status import is_final
from raypp.storage import StoreError

_REFRESH_S = 0.2
_POLL_S = 0.5
_STORE_PATIENCE_S = 60.0
_ANSWER_S = 15.0
_HELP = "s save   x stop   q leave (the run continues)"
_HELP_WITHOUT_KEYS = "Ctrl-C leaves; the run continues"

Command = Callable[[str], str]
"""Carries out `save` or `stop` and describes the result; may take minutes and may raise."""


def watch(place: RunPlace, reader: RunReader, command: Command, console: Console) -> Records:
    """Shows the run until it ends or the user leaves.

    Returns:
        The last records; the run has ended if their status is final.

    Raises:
        StoreError: The store did not respond for a minute.
    """
    polled = _Poll(place, reader)
    if is_final(polled.records.status):
        return polled.records
    keys_shown, loss = _Footer(place.name, command), LossCurve()
    with (
        single_keys() as keys,
        Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live,
        polled,
    ):
        while True:
            records = polled.records
            footer = keys_shown.line(keys.there, polled.trouble)
            live.update(screen_view(records, footer, console, loss), refresh=True)
            if is_final(records.status) and not keys_shown.busy:
                return records
            if polled.failure is not None:
                raise polled.failure
            if keys_shown.left(keys.wait(_REFRESH_S)):
                return records


class _Poll:
    """Reads the run's records in a thread: a slow store must not delay keys."""

    def __init__(self, place: RunPlace, reader: RunReader) -> None:
        self._place, self._reader = place, reader
        self._ended = threading.Event()
        self.records = self._read()
        self.trouble = ""
        self.failure: Exception | None = None

    def __enter__(self) -> None:
        threading.Thread(target=self._repeat, name="watch", daemon=True).start()

    def __exit__(self, *error: object) -> None:
        self._ended.set()

    def _read(self) -> Records:
        # The status first, so that the other two contain everything it refers to.
        status = present_status(self._place, self._reader)
        return Records(status, self._reader.history(), self._reader.events())

    def _repeat(self) -> None:
        heard = time.monotonic()
        while not self._ended.wait(_POLL_S):
            try:
                self.records = self._read()
                heard, self.trouble = time.monotonic(), ""
            except StoreError as error:
                self.trouble = f"cannot read the run's records at the moment: {error.problems[0].what}"
                if time.monotonic() - heard > _STORE_PATIENCE_S:
                    self.failure = error
                    return
            except Exception as error:  # noqa: BLE001  the main thread raises it, with the terminal as before
                self.failure = error
                return


class _Footer:
    """The last line, and what the keys do."""

    def __init__(self, run: str, command: Command) -> None:
        self._run, self._command = run, command
        self._asked = False
        self._threads: dict[str, threading.Thread] = {}
        self._said = ("", "")
        self._said_at = 0.0

    @property
    def busy(self) -> bool:
        """Whether a command is under way."""
        return any(thread.is_alive() for thread in self._threads.values())

    def left(self, pressed: str) -> bool:
        """Handles keys; returns whether the user leaves."""
        for key in pressed:
            if self._asked:
                self._asked = False
                if key in "yY":
                    self._begin("stop")
            elif key in "qQ":
                return True
            elif key in "xX":
                self._asked = True
            elif key in "sS":
                self._begin("save")
        return False

    def line(self, with_keys: bool, trouble: str) -> Text:
        """Returns the line to show now."""
        if self._asked:
            text, style = f"stop {self._run} after a final checkpoint? y: stop   any other key: continue", "bold yellow"
        elif self.busy or time.monotonic() - self._said_at < _ANSWER_S:
            text, style = self._said
        elif trouble:
            text, style = trouble, "yellow"
        else:
            text, style = _HELP if with_keys else _HELP_WITHOUT_KEYS, "dim"
        return Text(text, style=style, no_wrap=True, overflow="ellipsis")

    def _begin(self, name: str) -> None:
        self._say(f"{name}: requested; waiting for the run …", "cyan")
        if name in self._threads and self._threads[name].is_alive():
            return
        self._threads[name] = threading.Thread(target=self._run_command, args=(name,), name=name, daemon=True)
        self._threads[name].start()

    def _run_command(self, name: str) -> None:
        try:
            self._say(self._command(name), "green")
        except RayppError as error:
            self._say(f"{name}: {error.problems[0].what}", "red")
        except Exception as error:  # noqa: BLE001  the screen shows it and goes on
            self._say(f"{name}: {in_words(error)}", "red")

    def _say(self, text: str, style: Any) -> None:
        self._said, self._said_at = (text, style), time.monotonic()


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
