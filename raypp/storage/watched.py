"""Gives up reads of a network connection that bring nothing, or next to nothing.

A timeout of a socket limits the silence between two bytes only: a server that sends one byte per
second is never silent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

PIECE_BYTES = 64 << 10
"""Bytes between two reports of an arrival."""
T = TypeVar("T")

_here = threading.local()


class TooSlow(TimeoutError):
    """A read brought too little for too long."""


def watched(read: Callable[[], T], limit_s: float) -> T:
    """Calls `read` in a thread, as long as it reports an arrival at least every `limit_s` seconds.

    Args:
        read: Calls `arrived` for each piece that it receives.
        limit_s: Longest time between two arrivals, the call and its end included.

    Returns:
        What `read` returned.

    Raises:
        TooSlow: The limit passed. The thread ends at its next arrival, or with the process.
        Exception: What `read` raised.
    """
    call: _Call[T] = _Call()

    def run() -> None:
        _here.call = call
        try:
            call.results.append(read())
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            call.error = error
        call.ended.set()

    threading.Thread(target=run, daemon=True, name="raypp-read").start()
    while not call.ended.wait(max(0.0, call.latest + limit_s - time.monotonic())):
        if time.monotonic() - call.latest >= limit_s:
            call.given_up = True
            raise TooSlow(f"less than a piece of {PIECE_BYTES >> 10} KiB arrived in {limit_s:g} s")
    if call.error is not None:
        raise call.error
    return call.results[0]


def arrived() -> None:
    """Reports that a piece arrived; does nothing in a thread that `watched` did not start.

    Raises:
        TooSlow: The caller has given up.
    """
    call = getattr(_here, "call", None)
    if call is not None:
        call.latest = time.monotonic()
        if call.given_up:
            raise TooSlow("given up")


class _Call(Generic[T]):
    def __init__(self) -> None:
        self.latest = time.monotonic()
        self.ended = threading.Event()
        self.given_up = False
        self.results: list[T] = []
        self.error: BaseException | None = None
