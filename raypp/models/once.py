"""Results of a forward that its recomputation takes over instead of computing them again.

A recomputed forward (activation checkpointing) computes what the first one computed. That is wasted
where it is not arithmetic: reading a size from the device makes the host wait for it, and asking
the other ranks for theirs is a collective. `once` does it in the forward only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, TypeVar, cast

T = TypeVar("T")


class _Current(threading.local):
    """What the running code belongs to, by thread: a backward recomputes in threads of its own."""

    part: _Part | None = None


_current = _Current()


def once(compute: Callable[[], T]) -> T:
    """Returns `compute()`; in a recomputation, what it returned in the forward.

    Both must call `once` in the same order. Without recomputation it only calls `compute`.
    """
    part = _current.part
    return compute() if part is None else part.result(compute)


def forward_and_recomputation(
    within: tuple[AbstractContextManager[Any], AbstractContextManager[Any]] | None = None,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns the contexts of one checkpointed forward, as `context_fn` of torch's `checkpoint`.

    Args:
        within: Other contexts to enter, of the forward and of its recomputation.

    Returns:
        The context of the forward, and that of its recomputation, which may be entered again for a
        backward in two parts.
    """
    first, again = within or (nullcontext(), nullcontext())
    results: list[Any] = []
    return _Part(results, first, replays=False), _Part(results, again, replays=True)


class _Part(AbstractContextManager[None]):
    """A forward that keeps its results, or a recomputation that takes them over.

    Args:
        results: The results, in the order of the calls; shared by both.
        within: A context to enter, too.
        replays: It is the recomputation.
    """

    def __init__(self, results: list[Any], within: AbstractContextManager[Any], *, replays: bool) -> None:
        self._results, self._within, self._replays = results, within, replays

    def __enter__(self) -> None:
        self._taken = 0
        self._outer, _current.part = _current.part, self
        self._within.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._within.__exit__(kind, error, trace)
        _current.part = self._outer

    def result(self, compute: Callable[[], T]) -> T:
        """Returns the next result: computed and kept in the forward, else taken over."""
        if not self._replays:
            self._results.append(compute())
            return cast(T, self._results[-1])
        self._taken += 1
        return cast(T, self._results[self._taken - 1])
