"""The rows of each step, in one global order that no mesh changes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from raypp.data.corpus import Corpus
from raypp.data.packing import Piece, Row, RowPlan, make_row
from raypp.data.sources import open_documents
from raypp.errors import JobError, Problem
from raypp.spec.job import Job

_AHEAD = 2  # steps prepared in the background


@dataclass(frozen=True)
class Microbatch:
    """The rows of one microbatch of one replica."""

    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Cursor:
    """The next row of the global order: its epoch, block and place in the block."""

    epoch: int = 0
    block: int = 0
    row: int = 0


def rows_from(plan: RowPlan, cursor: Cursor) -> Iterator[tuple[list[Piece], Cursor]]:
    """All rows from a cursor on, for ever, each with the cursor behind it."""
    epoch, block, row = cursor.epoch, cursor.block, cursor.row
    while True:
        rows = plan.block(epoch, block)
        for index in range(row, len(rows)):
            last = index + 1 == len(rows)
            if not last:
                behind = Cursor(epoch, block, index + 1)
            elif block + 1 < plan.blocks:
                behind = Cursor(epoch, block + 1)
            else:
                behind = Cursor(epoch + 1)
            yield rows[index], behind
        row = 0
        epoch, block = (epoch, block + 1) if block + 1 < plan.blocks else (epoch + 1, 0)


class Loader:
    """Reads one replica's share of every step; the next steps are prepared by a thread.

    A step takes replicas · microbatches · micro_batch_size rows of the global order; replica r takes the r-th
    contiguous share of them.

    Args:
        corpus: The documents.
        plan: How they become rows.
        identity: Of the data; a position of other data is refused.
        replica: This one, of `replicas`.
        microbatches, rows_each: Of each replica and step.
    """

    def __init__(
        self, corpus: Corpus, plan: RowPlan, identity: str, replica: int, replicas: int, microbatches: int, rows_each: int
    ) -> None:
        self._corpus, self._plan, self.identity = corpus, plan, identity
        self._replica, self._replicas = replica, replicas
        self._microbatches, self._rows_each = microbatches, rows_each
        self._cursor = Cursor()
        self._prepared: queue.Queue[Any] = queue.Queue(maxsize=_AHEAD)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def next_step(self) -> list[Microbatch]:
        """The next step's microbatches of this replica.

        Raises:
            DataError: What went wrong while it was read.
        """
        if self._thread is None:
            self._start()
        step = self._prepared.get()
        if isinstance(step, BaseException):
            raise step
        microbatches, self._cursor = step
        return list(microbatches)

    def position(self) -> dict[str, Any]:
        """Where the next step begins: plain JSON, the same on every rank and for every mesh."""
        c = self._cursor
        return {"epoch": c.epoch, "block": c.block, "row": c.row, "data": self.identity}

    def seek(self, position: dict[str, Any]) -> None:
        """Goes on at a position.

        Raises:
            JobError: It is a position in other data.
        """
        if position["data"] != self.identity:
            raise JobError(
                Problem(
                    "data.path",
                    f"the checkpoint was made with other data (digest {position['data']}, now {self.identity})",
                    "give the same files, tokenizer, seq_len and packing, or start a run under another name",
                )
            )
        self.close()
        self._cursor = Cursor(position["epoch"], position["block"], position["row"])

    def close(self) -> None:
        """Ends the thread. The loader can go on afterwards."""
        if self._thread is None:
            return
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._prepared.get(timeout=0.05)
            except queue.Empty:
                pass
        self._thread = None

    def _start(self) -> None:
        self._stop = threading.Event()
        self._prepared = queue.Queue(maxsize=_AHEAD)
        arguments = (self._cursor, self._stop, self._prepared)
        self._thread = threading.Thread(target=self._prepare, args=arguments, name="raypp-data", daemon=True)
        self._thread.start()

    def _prepare(self, cursor: Cursor, stop: threading.Event, out: queue.Queue[Any]) -> None:
        try:
            rows = rows_from(self._plan, cursor)
            while not stop.is_set():
                out.put(self._read_step(rows))
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the step
            out.put(error)

    def _read_step(self, rows: Iterator[tuple[list[Piece], Cursor]]) -> tuple[list[Microbatch], Cursor]:
        share = self._microbatches * self._rows_each
        taken = [next(rows) for _ in range(share * self._replicas)]
        own = [make_row(self._corpus, pieces) for pieces, _ in taken[self._replica * share : (self._replica + 1) * share]]
        each = self._rows_each
        microbatches = [Microbatch(tuple(own[i * each : (i + 1) * each])) for i in range(self._microbatches)]
        return microbatches, taken[-1][1]


def open_loader(job: Job, replica: int, replicas: int) -> Loader:
    """The loader of one replica of a job.

    Raises:
        DataError: The data cannot be used.
    """
    documents = open_documents(job)
    plan = RowPlan(documents.train.lengths, job.data.seq_len, job.data.packing, job.data.shuffle, job.train.seed)
    return Loader(
        documents.train, plan, documents.identity, replica, replicas, job.pipeline.microbatches, job.train.micro_batch_size
    )
