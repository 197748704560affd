"""Slows processes down, so that a test can act at a certain step of theirs."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator


@contextlib.contextmanager
def held_back(pids: Iterable[int], pause_s: float = 0.25) -> Iterator[None]:
    """Lets processes run only 20 ms, a step or so, between pauses, however busy the machine is."""
    pids = list(pids)
    over = threading.Event()

    def send(number: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def hold_back() -> None:
        while not over.wait(0.02):
            send(signal.SIGSTOP)
            over.wait(pause_s)
            send(signal.SIGCONT)

    thread = threading.Thread(target=hold_back)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
