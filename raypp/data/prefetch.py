"""An iterator that prefetches in its own thread."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class _Shared(Generic[T]):
    """State shared by the thread and its reader; the thread holds no reference to the reader."""

    ahead: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    ready: deque[T] = field(default_factory=deque)
    stopped: bool = False
    error: BaseException | None = None

    def stop(self) -> None:
        """Makes the thread end and drops its items."""
        with self.changed:
            self.stopped = True
            self.ready.clear()
            self.changed.notify_all()


class Prefetch(Generic[T]):
    """Prefetches from an endless iterator.

    The thread ends after `close`, after an error, or when this object is garbage-collected.

    Args:
        items: An endless iterator, used only by the thread. It must not refer to the owner of this
            object.
        ahead: Maximum number of items prepared in advance.
    """

    def __init__(self, items: Iterator[T], ahead: int) -> None:
        self._shared: _Shared[T] = _Shared(ahead)
        self._thread = threading.Thread(target=_run, args=(items, self._shared), name="raypp-data", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._shared.stop)

    def take(self) -> T:
        """Waits for the next item and returns it.

        Raises:
            BaseException: The iterator's error, after the items before it, and at every later call.
            RuntimeError: After `close`.
        """
        shared = self._shared
        with shared.changed:
            shared.changed.wait_for(lambda: shared.ready or shared.error is not None or shared.stopped)
            if shared.ready:
                item = shared.ready.popleft()
                shared.changed.notify_all()
                return item
            if shared.error is not None:
                raise shared.error
            raise RuntimeError("taken from after close")

    def close(self) -> None:
        """Ends the thread, after the item in progress."""
        self._shared.stop()
        self._thread.join()


def _run(items: Iterator[T], shared: _Shared[T]) -> None:
    try:
        while True:
            with shared.changed:
                shared.changed.wait_for(lambda: len(shared.ready) < shared.ahead or shared.stopped)
                if shared.stopped:
                    return
            item = next(items)
            with shared.changed:
                if not shared.stopped:
                    shared.ready.append(item)
                shared.changed.notify_all()
    except BaseException as error:  # noqa: BLE001 - raised by take()
        with shared.changed:
            shared.error = error
            shared.changed.notify_all()
