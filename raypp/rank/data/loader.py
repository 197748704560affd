"""The rows of each step, in one global order that does not depend on the mesh."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np

from raypp.errors import DataError, JobError, Problem, RayppError
from raypp.job.job import DataSection, Job
from raypp.job.paths import is_hub_name
from raypp.kinds import SOURCES, keeps_data_elsewhere
from raypp.rank.data.corpus import Corpus, Piece
from raypp.rank.data.mixture import MixtureOrder
from raypp.rank.data.packing import NO_LABEL, Row, RowOrder, RowPlan, make_row
from raypp.rank.data.source_files import find_files
from raypp.rank.data.sources import Documents, open_documents
from raypp.rank.data.tokenizer import FileTokenizer

T = TypeVar("T")

CHECKED_BYTES = 8 << 20
"""Most bytes of text that are read before a run to see whether its budgets last."""
_QUICK_BYTES = 1 << 20
_BLOCKS_COUNTED = 8
_AHEAD = 2  # steps prepared in the background


@dataclass(frozen=True, eq=False)
class Microbatch:
    """The rows of one microbatch of one replica."""

    rows: tuple[Row, ...]


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
        return self.microbatches * self.micro_batch_size

    def read(self, corpus: Corpus, step: Sequence[list[Piece]]) -> list[Row]:
        """Reads this replica's share of all rows of a step."""
        share = step[self.replica * self.rows : (self.replica + 1) * self.rows]
        corpus.fetch(piece for pieces in share for piece in pieces)
        return [make_row(corpus, pieces) for pieces in share]

    def microbatched(self, rows: Sequence[Row]) -> list[Microbatch]:
        """Groups this replica's rows of a step into microbatches."""
        each = self.micro_batch_size
        return [Microbatch(tuple(rows[i : i + each])) for i in range(0, self.rows, each)]


def steps_from(order: RowOrder, share: Share, cursor: Any) -> Iterator[tuple[list[Microbatch], Any]]:
    """Yields a replica's microbatches of every step from a cursor on, with the cursor after it."""
    rows = order.rows(cursor)
    while True:
        step = list(islice(rows, share.replicas * share.rows))
        documents = share.read(order.corpus, [pieces for pieces, _ in step])
        yield share.microbatched(documents), step[-1][1]


class Loader:
    """Reads one replica's share of every step; a thread prepares the next steps. A step takes
    replicas · microbatches · micro_batch_size rows of the global order; replica r takes the r-th
    contiguous share of them. Rows continue across ends of blocks and epochs; none is dropped.
    Not thread-safe."""

    def __init__(self, documents: Documents, order: RowOrder, share: Share, held_out: RowPlan | None = None) -> None:
        self.documents, self._order, self._share, self._held_out = documents, order, share, held_out
        self._cursor: Any = order.start
        self._steps: Prefetch[tuple[list[Microbatch], Any]] | None = None

    @property
    def identity(self) -> str:
        """A digest of the rows and their order."""
        return self.documents.identity

    def next_step(self) -> list[Microbatch]:
        """Returns this replica's microbatches of the next step. There are `pipeline.microbatches`
        of them, with `train.micro_batch_size` rows each. Raises RayppError: reading failed."""
        if self._steps is None:
            self._steps = Prefetch(steps_from(self._order, self._share, self._cursor), _AHEAD)
        microbatches, self._cursor = self._steps.take()
        return microbatches

    def position(self) -> dict[str, Any]:
        """Returns the position of the next step: plain JSON, the same on every rank and mesh."""
        return {**self._order.document(self._cursor), "data": self.identity, **self._files()}

    def _files(self) -> dict[str, str]:
        """Returns digests of the rows' tokenizer and chat template, if they are files."""
        tokenizer, template = self.documents.tokenizer, self.documents.train.template
        digests = {"tokenizer": tokenizer.identity} if isinstance(tokenizer, FileTokenizer) else {}
        return digests | ({"template": template} if template else {})

    def used(self) -> dict[str, float]:
        """Returns what was used of each part of a mixture so far, by names for the history. These
        are `data.NAME.tokens`, `.rows` and `.epochs`; empty for a single source."""
        return self._order.used(self._cursor)

    def seek(self, position: Mapping[str, Any]) -> None:
        """Continues at a position. Raises JobError: it is invalid or belongs to other data."""
        try:
            data = str(position["data"])
            if data != self.identity:
                raise JobError(self._other_data(data, position))
            cursor = self._order.cursor(position)
        except (KeyError, TypeError, ValueError) as error:
            raise JobError(Problem("data.path", f"the checkpoint's data position is invalid: {position!r}")) from error
        self.close()
        self._cursor = cursor

    def _other_data(self, data: str, position: Mapping[str, Any]) -> Problem:
        other, mine = "start a run under another name", self._files()
        for name, key in (("tokenizer", "tokenizer"), ("template", "chat_template")):
            own, before = mine.get(name), position.get(name) or None
            if own != before:
                what = key.replace("_", " ")
                fault = f"the checkpoint was made with another {what} (digest {before}, now {own})"
                return Problem(f"data.{key}", fault, f"use the same {name} and special tokens, or {other}")
        details = "; ".join(self._order.differences(position)) or f"digest {data}, now {self.identity}"
        fault = f"the checkpoint was made with other data ({details})"
        return Problem("data.path", fault, f"use the same files, tokenizer, data settings and train.seed, or {other}")

    def held_out(self) -> Iterator[list[Microbatch]]:
        """Returns this replica's share of the held-out part, once, in steps like those of training.
        The number of steps is the same for every replica: rows of one token without a label fill
        the last step. Raises DataError: the job has no `data.eval`."""
        if self._held_out is None:
            raise DataError(Problem("data.eval", "is not set", "for example `eval: {fraction: 0.02}`"))
        return self._steps_once(self._held_out)

    def once(self) -> Iterator[list[Microbatch]]:
        """Returns this replica's share of the training part, once, in steps as `held_out` does."""
        return self._steps_once(self._order.once())

    def tokens_once(self, *, held_out: bool) -> int:
        """Returns the tokens of all rows of `held_out`, or of `once`, over all replicas."""
        plan = self._held_out if held_out else self._order.once()
        return 0 if plan is None else int(plan.corpus.lengths().sum())

    def _steps_once(self, plan: RowPlan) -> Iterator[list[Microbatch]]:
        share = self._share
        filler = Row(np.array([self.documents.tokenizer.eos_id]), np.array([NO_LABEL]), (1,))
        rows = (pieces for block in range(plan.blocks) for pieces in plan.block(0, block))
        while step := list(islice(rows, share.replicas * share.rows)):
            own = share.read(plan.corpus, step)
            yield share.microbatched(own + [filler] * (share.rows - len(own)))

    def close(self) -> None:
        """Ends the thread. The loader can be used again afterwards and keeps its position."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None


def open_loader(job: Job, replica: int, replicas: int) -> Loader:
    """Opens the loader of one replica. The caller must close it. `replica`: this replica,
    `0 <= replica < replicas`. Raises DataError: the data cannot be used; UnreachableError: the
    store that holds the data does not answer or denies access."""
    documents = open_documents(job)
    order = order_of(documents, job, replicas)
    if isinstance(order, MixtureOrder) and (problem := spent_before_the_end(order, job)):
        raise DataError(problem)
    share = Share(replica, replicas, job.pipeline.microbatches, job.train.micro_batch_size)
    held_out = _planner(job.data)(documents.held_out, job.train.seed) if documents.held_out is not None else None
    return Loader(documents, order, share, held_out)


def order_of(documents: Documents, job: Job, replicas: int = 1) -> RowOrder:
    """Returns the training rows of a job's documents, of steps that so many replicas share."""
    plan, seed = _planner(job.data), job.train.seed
    if documents.parts:
        rows = replicas * job.pipeline.microbatches * job.train.micro_batch_size
        phases = [(phase.from_step, job.data.weights_at(phase.from_step)) for phase in job.data.phases]
        return MixtureOrder(documents.parts, documents.train, plan, seed, phases, rows)
    return RowOrder(plan(documents.train, seed))


def _planner(data: DataSection) -> Callable[[Corpus, int], RowPlan]:
    """Returns a function that plans the rows of documents in the order of a seed."""
    return lambda corpus, seed: RowPlan(corpus, data.seq_len, data.packing, data.shuffle, seed, piece=data.piece)


def with_steps(job: Job) -> tuple[Job, str]:
    """Returns the job with train.steps in place of train.epochs, and how many in words; the job
    itself without it. Reads the documents. Raises RayppError: they cannot be read."""
    if job.train.epochs is None:
        return job, ""
    rows = order_of(open_documents(job), job).once().rows(Fraction(repr(job.train.epochs)))
    steps = -(-rows // job.rows_per_step)
    words = f"train.epochs: {job.train.epochs:g} are {steps:,} steps: {rows:,} rows, {job.rows_per_step:,} in a step"
    return job.model_copy(update={"train": job.train.model_copy(update={"steps": steps, "epochs": None})}), words


def check_budgets(job: Job) -> list[Problem]:
    """Returns the problem of a mixture whose budgets end before the run, if its data are small.
    Data in a store, and more than `CHECKED_BYTES`, are not read; `open_loader` checks them."""
    order = order_of(open_documents(job), job) if _are_small(job.data, CHECKED_BYTES) else None
    problem = spent_before_the_end(order, job) if isinstance(order, MixtureOrder) else None
    return [problem] if problem is not None else []


def _are_small(section: DataSection, most_bytes: int) -> bool:
    """Returns whether data are in local files of at most so many bytes of text."""
    size = 0
    for key, data in section.sources():
        source = SOURCES.get(data.kind)
        if source.endings and data.path is not None:
            if keeps_data_elsewhere(data.path) or (source.hub and is_hub_name(data.path)):
                return False
            files = find_files(data.path, source.endings, f"{key}.path", compressed=source.compressed)
            size += sum(file.text_bytes for file in files)
    return size <= most_bytes


def passes_in_words(documents: Documents, job: Job) -> str:
    """Returns how often a run takes its rows; empty for at most once, and for a mixture."""
    plan = order_of(documents, job).once()
    read = min(plan.blocks, _BLOCKS_COUNTED)
    rows = sum(len(plan.block(0, block)) for block in range(read)) * plan.blocks // read
    passes = job.train.steps * job.rows_per_step / rows
    if documents.parts or passes <= 1:
        return ""
    epochs = f"{passes:.3g}" if passes < 100 else f"{passes:,.0f}"
    return f"{job.train.steps:,} steps are {epochs} epochs of {rows:,} row{'s' if rows > 1 else ''}"


def passes_of_small_data(job: Job) -> str:
    """Returns `passes_in_words` before a run, of data that are read quickly."""
    with suppress(RayppError):  # the ranks meet the same error and report it
        if _are_small(job.data, _QUICK_BYTES):
            return passes_in_words(open_documents(job), job)
    return ""


def spent_before_the_end(order: MixtureOrder, job: Job) -> Problem | None:
    """Returns the problem of budgets that do not last for the job's steps; None if they do."""
    needed = job.rows_per_step * job.train.steps
    rows = order.rows_until(needed)
    if rows >= needed:
        return None
    full = rows // job.rows_per_step
    fault = (
        f"the budgets of all parts are spent in step {full + 1:,} of {job.train.steps:,}: "
        f"they give {rows:,} rows, and the run takes {needed:,}"
    )
    fewer = f", or set train.steps to {full:,}" if full else ""
    return Problem("data.parts", fault, f"raise a budget, or leave one part without any{fewer}")


class Prefetch(Generic[T]):
    """Prefetches from an endless iterator, in a thread. The thread ends after `close`, or when this
    object is garbage-collected. `items`: an endless iterator, used only by the thread. It must not
    refer to the owner of this object. `ahead`: maximum number of items prepared in advance."""

    def __init__(self, items: Iterator[T], ahead: int) -> None:
        self._items, self._pool = items, ThreadPoolExecutor(1, "raypp-data")
        self._ready = deque(self._pool.submit(next, items) for _ in range(ahead))

    def take(self) -> T:
        """Waits for the next item and returns it. Raises BaseException: the iterator's error, after
        the items before it, and at every later call."""
        item = self._ready[0].result()
        self._ready.popleft()
        self._ready.append(self._pool.submit(next, self._items))
        return item

    def close(self) -> None:
        """Ends the thread, after the item in progress."""
        self._pool.shutdown(cancel_futures=True)
