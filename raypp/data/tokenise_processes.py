"""Tokenises batches of documents in several processes."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import TYPE_CHECKING, Any

from raypp.data.faults import Faults
from raypp.data.tokenised import Record, Request, Text, batches, encoded
from raypp.errors import DataError, Problem, RayppError

if TYPE_CHECKING:  # needs jinja2
    from raypp.data.rows import RowEncoder

_AHEAD = 2  # batches in work per process
Contents = tuple[list[tuple[bytes, bytes]], Faults]
"""Ids and loss of each document of a batch, as `encoded` has them, and its unusable records."""


def contents_of(
    request: Request, encoder: RowEncoder | None, documents: Iterable[Text | Record], processes: int
) -> Iterator[Contents]:
    """Yields the contents of all documents in order, a batch at a time.

    Raises:
        DataError: A text cannot be tokenised, or a process has ended.
    """
    if processes <= 1:
        for batch in batches(documents):
            yield _contents(request, encoder, batch)
        return
    waiting: deque[Future[Contents | list[Problem]]] = deque()
    remaining = batches(documents)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _start_process, (request, encoder)) as pool:
        try:
            while True:
                for batch in islice(remaining, _AHEAD * processes - len(waiting)):
                    waiting.append(pool.submit(_encode, batch))
                if not waiting:
                    return
                found = waiting.popleft().result()
                if isinstance(found, list):
                    raise DataError(found)
                yield found
        except BrokenProcessPool as error:
            what = "a process that tokenised has ended, perhaps for lack of memory"
            fix = "run the command again: it continues; or use fewer"
            raise DataError(Problem("--processes", what, fix)) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _contents(request: Request, encoder: RowEncoder | None, batch: list[Any]) -> Contents:
    faults = Faults(request.place)
    found = [(ids.tobytes(), loss.tobytes()) for ids, loss in encoded(request, encoder, batch, faults)]
    return found, faults


_given: tuple[Request, RowEncoder | None] | None = None


def _start_process(request: Request, encoder: RowEncoder | None) -> None:
    global _given
    _given = request, encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _encode(batch: list[Any]) -> Contents | list[Problem]:
    assert _given is not None
    try:
        return _contents(*_given, batch)
    except RayppError as error:
        return list(error.problems)
