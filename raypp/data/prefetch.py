"""An iterator that runs ahead in a thread of its own."""

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
    """What the thread and its reader have in common; the thread knows nothing else, so that the reader can go away."""

    ahead: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    ready: deque[T] = field(default_factory=deque)
    stopped: bool = False
    error: BaseException | None = None

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.ready.clear()
            self.changed.notify_all()


class Prefetch(Generic[T]):
    """Takes from an endless iterator in the background.

    The thread ends with `close`, with an error, or when this object is no longer used.

    Args:
        items: Endless; used by the thread alone. Must not refer to the owner of this object.
        ahead: At most this many items are ready and not yet taken.
    """

    def __init__(self, items: Iterator[T], ahead: int) -> None:
        self._shared: _Shared[T] = _Shared(ahead)
        self._thread = threading.Thread(target=_run, args=(items, self._shared), name="raypp-data", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._shared.stop)

    def take(self) -> T:
        """The next item; waits for it.

        Raises:
            BaseException: What the iterator raised, when it is its turn; again at every later call.
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
        """Ends the thread; returns when the item it is at is done."""
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
    except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the item
        with shared.changed:
            shared.error = error
            shared.changed.notify_all()
