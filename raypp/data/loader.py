"""The rows of each step, in one global order that does not depend on the mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from raypp.data.corpus import Corpus
from raypp.data.packing import NO_LABEL, Piece, Row, RowPlan, make_row
from raypp.data.prefetch import Prefetch
from raypp.data.sources import Documents, open_documents
from raypp.errors import DataError, JobError, Problem
from raypp.spec.job import Job

_AHEAD = 2  # steps prepared in the background


@dataclass(frozen=True, eq=False)
class Microbatch:
    """The rows of one microbatch of one replica."""

    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Cursor:
    """The position of the next row in the global order: epoch, block and row in the block."""

    epoch: int = 0
    block: int = 0
    row: int = 0


@dataclass(frozen=True)
class Share:
    """The rows of a step that a replica reads: one of `replicas` equal, contiguous shares."""

    replica: int
    replicas: int
    microbatches: int
    micro_batch_size: int

    def __post_init__(self) -> None:
        if not 0 <= self.replica < self.replicas:
            raise ValueError(f"replica {self.replica} of {self.replicas}")

    @property
    def rows(self) -> int:
        """Rows per replica and step."""
        return self.microbatches * self.micro_batch_size

    def of(self, step: Sequence[list[Piece]]) -> Sequence[list[Piece]]:
        """Returns this replica's share of all rows of a step."""
        return step[self.replica * self.rows : (self.replica + 1) * self.rows]

    def microbatched(self, rows: Sequence[Row]) -> list[Microbatch]:
        """Groups this replica's rows of a step into microbatches."""
        each = self.micro_batch_size
        return [Microbatch(tuple(rows[i : i + each])) for i in range(0, self.rows, each)]


def rows_from(plan: RowPlan, cursor: Cursor) -> Iterator[tuple[list[Piece], Cursor]]:
    """Yields all rows from a cursor on, without end, each with the cursor after it."""
    epoch, block, first = cursor.epoch, cursor.block, cursor.row
    while True:
        following = Cursor(epoch, block + 1) if block + 1 < plan.blocks else Cursor(epoch + 1)
        rows = plan.block(epoch, block)
        for index in range(first, len(rows)):
            yield rows[index], Cursor(epoch, block, index + 1) if index + 1 < len(rows) else following
        epoch, block, first = following.epoch, following.block, 0


def steps_from(plan: RowPlan, share: Share, cursor: Cursor) -> Iterator[tuple[list[Microbatch], Cursor]]:
    """Yields a replica's microbatches of every step from a cursor on, with the cursor after it."""
    rows = rows_from(plan, cursor)
    while True:
        step = list(islice(rows, share.replicas * share.rows))
        own = [make_row(plan.corpus, pieces) for pieces in share.of([pieces for pieces, _ in step])]
        yield share.microbatched(own), step[-1][1]


class Loader:
    """Reads one replica's share of every step; a thread prepares the next steps.

    A step takes replicas · microbatches · micro_batch_size rows of the global order; replica r
    takes the r-th contiguous share of them. Rows continue across the ends of blocks and epochs;
    none is dropped. Not thread-safe.

    Args:
        documents: The job's documents.
        plan: The rows of `documents.train`.
        share: This replica's share.
    """

    def __init__(self, documents: Documents, plan: RowPlan, share: Share) -> None:
        self._documents, self._plan, self._share = documents, plan, share
        self._cursor = Cursor()
        self._steps: Prefetch[tuple[list[Microbatch], Cursor]] | None = None

    @property
    def documents(self) -> Documents:
        """The job's documents."""
        return self._documents

    @property
    def identity(self) -> str:
        """A digest of the rows and their order (`data_identity`)."""
        return self._documents.identity

    def next_step(self) -> list[Microbatch]:
        """Returns this replica's microbatches of the next step.

        There are `pipeline.microbatches` of them, with `train.micro_batch_size` rows each.

        Raises:
            RayppError: Reading failed.
        """
        if self._steps is None:
            self._steps = Prefetch(steps_from(self._plan, self._share, self._cursor), _AHEAD)
        microbatches, self._cursor = self._steps.take()
        return microbatches

    def position(self) -> dict[str, Any]:
        """Returns the position of the next step: plain JSON, the same on every rank and mesh."""
        cursor, template = self._cursor, self._documents.train.template
        at = {"epoch": cursor.epoch, "block": cursor.block, "row": cursor.row, "data": self.identity}
        return {**at, "template": template} if template else at

    def seek(self, position: Mapping[str, Any]) -> None:
        """Continues at a position.

        Raises:
            JobError: The position is invalid or belongs to other data.
        """
        try:
            data = str(position["data"])
            cursor = Cursor(int(position["epoch"]), int(position["block"]), int(position["row"]))
        except (KeyError, TypeError, ValueError) as error:
            raise JobError(Problem("data.path", f"the checkpoint's data position is invalid: {position!r}")) from error
        if data != self.identity:
            raise JobError(self._other_data(data, position.get("template", "")))
        self.close()
        self._cursor = cursor

    def _other_data(self, data: str, template: object) -> Problem:
        own, other = self._documents.train.template, "start a run under another name"
        if own != template:
            what = f"the checkpoint was made with another chat template (digest {template or None}, now {own or None})"
            return Problem("data.chat_template", what, f"use the same template and special tokens, or {other}")
        what = f"the checkpoint was made with other data (digest {data}, now {self.identity})"
        return Problem("data.path", what, f"use the same files, tokenizer, data settings and train.seed, or {other}")

    def held_out(self) -> Iterator[list[Microbatch]]:
        """Returns this replica's share of the held-out part, once, in steps like those of training.

        The number of steps is the same for every replica: rows of one token without a label fill
        the last step.

        Raises:
            DataError: The job has no `data.eval`.
        """
        corpus = self._documents.held_out
        if corpus is None:
            raise DataError(Problem("data.eval", "is not set", "for example `eval: {fraction: 0.02}`"))
        return self._steps_once(corpus)

    def once(self) -> Iterator[list[Microbatch]]:
        """Returns this replica's share of the training part, once, in steps as `held_out` does."""
        return self._steps_once(self._documents.train)

    def _steps_once(self, corpus: Corpus) -> Iterator[list[Microbatch]]:
        share, plan = self._share, self._plan
        plan = RowPlan(corpus, plan.seq_len, plan.packing, plan.shuffle, plan.seed)
        filler = Row(np.array([self._documents.tokenizer.eos_id]), np.array([NO_LABEL]), (1,))
        rows = (pieces for block in range(plan.blocks) for pieces in plan.block(0, block))
        while step := list(islice(rows, share.replicas * share.rows)):
            own = [make_row(corpus, pieces) for pieces in share.of(step)]
            yield share.microbatched(own + [filler] * (share.rows - len(own)))

    def close(self) -> None:
        """Ends the thread. The loader can be used again afterwards and keeps its position."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None


def open_loader(job: Job, replica: int, replicas: int) -> Loader:
    """Opens the loader of one replica. The caller must close it.

    Args:
        job: The job, with resolved paths.
        replica: This replica, `0 <= replica < replicas`.
        replicas: Number of replicas that share the rows of a step.

    Raises:
        DataError: The data cannot be used.
        UnreachableError: The store that holds the data does not answer or denies access.
    """
    documents, data = open_documents(job), job.data
    plan = RowPlan(documents.train, data.seq_len, data.packing, data.shuffle, job.train.seed)
    share = Share(replica, replicas, job.pipeline.microbatches, job.train.micro_batch_size)
    return Loader(documents, plan, share)
