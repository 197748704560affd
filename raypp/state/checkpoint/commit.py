"""COMMIT, the object that makes a checkpoint exist, and the fence against stale attempts.

The protocol (docs/design/0002): every rank first writes its object under the attempt's own folder.
When all are durable, COMMIT is created by a conditional write. At any moment in between, a reader
sees either the old checkpoints or the new one.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from annotated_types import Ge, Le, MaxLen
from pydantic import FailFast
from typing_extensions import TypedDict

from raypp.errors import CheckpointError, Problem
from raypp.records import StepReport
from raypp.state.checkpoint.layout import (
    ADVICE,
    attempt_key,
    attempt_number,
    commit_key,
    rank_key,
    step_of,
    steps_prefix,
)
from raypp.storage import AlreadyExists, NotFound, ObjectStore
from raypp.untrusted.documents import Bounds, Count, Time, parse_as, shown

FORMAT = 1
BOUNDS = Bounds()
"""40,000 objects at most."""
COMMITTING_RANK = 0
_JOB_SECTIONS = ("model", "data", "mesh", "pipeline", "train")

Sum = Annotated[str, MaxLen(64)]
"""A SHA-256 in hex digits; empty for what is in memory."""


class StaleAttemptError(CheckpointError):
    """A newer attempt of the run has begun: this one may no longer commit."""


@dataclass(frozen=True)
class ObjectRecord:
    """One object of a checkpoint, as its writer announced it. `size`: bytes. `sha256`: SHA-256 of
    all bytes, in hex digits. `header_size`: bytes before the tensor data (safetensors' length field
    and header). `header_sha256`: of those bytes, which have checksums of all data blocks."""

    key: str
    size: Count
    sha256: Sum
    rank: Count
    header_size: Count = 0
    header_sha256: Sum = ""


@dataclass(frozen=True)
class Commit:
    """The content of a COMMIT object. `job`: sections model, data, mesh, pipeline and train of the
    job that wrote it. `extra`: what the trainer restores besides tensors, the same on every rank:
    `data_position`, `rng` … `created`: seconds since 1970, by the writer's clock. `nonce`: random;
    distinguishes two commits of the same content."""

    run: str
    step: Count
    attempt: Count
    mesh: dict[str, Count]
    job: dict[str, Any]
    extra: dict[str, Any]
    objects: Annotated[tuple[ObjectRecord, ...], FailFast()]
    created: Time = field(default_factory=time.time)
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    format: Count = FORMAT

    @property
    def size(self) -> int:
        """Total bytes of all objects."""
        return sum(record.size for record in self.objects)

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, key: str) -> Commit:
        """Parses a COMMIT object. Raises CheckpointError: it is invalid, or has another format."""
        kind = "a valid COMMIT"
        version = parse_as(_Format, data, key, BOUNDS, fix=ADVICE, kind=kind, unknown="ignore")["format"]
        if version != FORMAT:
            fault = f"has format {version}, but this raypp reads {FORMAT}"
            raise CheckpointError(Problem(key, fault, "use the raypp that wrote it"))
        commit = parse_as(cls, data, key, BOUNDS, fix=ADVICE, kind=kind)
        _check_records(commit, key)
        return commit


class _Format(TypedDict):
    format: int


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint, as listed; its COMMIT has not been read. `modified`: when that was
    written, by the store's clock."""

    step: int
    key: str
    modified: float


def job_identity(job_doc: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the job sections for a COMMIT; not `resources.env`, which may hold secrets."""
    return {section: job_doc[section] for section in _JOB_SECTIONS if section in job_doc}


def claim_attempt(store: ObjectStore, run: str, attempt: int) -> None:
    """Claims an attempt number of the run. From then on, older attempts cannot commit. Raises
    AlreadyExists: The number is taken; use a higher one."""
    claim = {"attempt": attempt, "time": time.time(), "nonce": secrets.token_hex(8)}
    store.put(attempt_key(run, attempt), json.dumps(claim).encode(), if_absent=True)


def claim_next_attempt(store: ObjectStore, run: str) -> int:
    """Claims the lowest number above all attempts so far, and returns it."""
    attempt = newest_attempt(store, run) + 1
    while True:
        try:
            claim_attempt(store, run, attempt)
            return attempt
        except AlreadyExists:
            attempt += 1


def newest_attempt(store: ObjectStore, run: str) -> int:
    """Returns the highest claimed attempt number; 0 if there is none."""
    numbers = (attempt_number(info.key) for info in store.list(f"{run}/attempts/"))
    return max((number for number in numbers if number is not None), default=0)


def write_commit(store: ObjectStore, commit: Commit) -> None:
    """Creates a COMMIT, which makes the checkpoint exist. All its objects must already be durable.

    Replaces a commit of the same step by an *older* attempt: this attempt started below that step,
    so that commit was found unusable, or was written after its attempt had ended. Raises
    StaleAttemptError: a newer attempt has begun; AlreadyExists: this or a newer attempt has already
    committed the step."""
    _check_newest(store, commit)
    key = commit_key(commit.run, commit.step)
    _check_records(commit, key)
    try:
        store.put(key, commit.to_bytes(), if_absent=True)
    except AlreadyExists:
        there = _try_read(store, key)
        if there is not None and there.nonce == commit.nonce:
            return  # an earlier try succeeded, and its response was lost
        if there is not None and there.attempt >= commit.attempt:
            raise
        _check_newest(store, commit)  # again: what is deleted here may be a newer attempt's by now
        store.delete([key])
        store.put(key, commit.to_bytes(), if_absent=True)


def _check_newest(store: ObjectStore, commit: Commit) -> None:
    newest = newest_attempt(store, commit.run)
    if newest > commit.attempt:
        fault = f"attempt {commit.attempt} is over: attempt {newest} has begun"
        raise StaleAttemptError(Problem(commit_key(commit.run, commit.step), fault))


def read_commit(store: ObjectStore, run: str, step: int) -> Commit:
    """Reads a COMMIT. Raises CheckpointError: missing, unreadable, or of another run or step."""
    key = commit_key(run, step)
    try:
        data = store.get(key, 0, BOUNDS.size + 1)
    except NotFound:
        fix = "choose one of those that `raypp checkpoints list` shows"
        raise CheckpointError(Problem(f"{store.url}/{key}", f"step {step} of {run} is not committed", fix)) from None
    commit = Commit.from_bytes(data, key)
    if (commit.run, commit.step) != (run, step):
        raise CheckpointError(Problem(key, f"is the commit of step {commit.step} of {shown(commit.run)}", ADVICE))
    return commit


def list_checkpoints(store: ObjectStore, run: str) -> list[Checkpoint]:
    """Lists the committed checkpoints of a run, oldest step first, without reading them."""
    checkpoints = []
    for info in store.list(steps_prefix(run)):
        step = step_of(run, info.key)
        if step is not None and info.key == commit_key(run, step):
            checkpoints.append(Checkpoint(step, info.key, info.modified))
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)


def _check_records(commit: Commit, key: str) -> None:
    """Raises CheckpointError unless each object lies in this attempt's own folder, once."""
    ranks: set[int] = set()
    for index, record in enumerate(commit.objects):
        place = rank_key(commit.run, commit.step, commit.attempt, record.rank)
        fault = ""
        if record.key != place:
            fault = f"key is {shown(record.key)}: it is not an object of attempt {commit.attempt}, {place}"
        elif record.rank in ranks:
            fault = f"rank is {record.rank}, which has another object"
        elif record.header_size > record.size:
            fault = f"header_size is {record.header_size}, but the object has {record.size} bytes"
        if fault:
            raise CheckpointError(Problem(key, f"is not a valid COMMIT: objects[{index}].{fault}", ADVICE))
        ranks.add(record.rank)


def _try_read(store: ObjectStore, key: str) -> Commit | None:
    try:
        return Commit.from_bytes(store.get(key, 0, BOUNDS.size + 1), key)
    except (CheckpointError, NotFound):
        return None


@dataclass(frozen=True)
class PartPosition:
    """Where a part of a mixture resumes, and what it was: see `raypp.rank.data.mixture`."""

    epoch: Count
    block: Count
    row: Count
    rows: Count
    tokens: Count
    digest: str
    weight: float
    most_epochs: float | None
    most_tokens: Count | None
    before: Count = 0


@dataclass(frozen=True)
class DataPosition:
    """Where the data resume: see `Loader.position`. Only a mixture has parts."""

    epoch: Count
    block: Count
    row: Count
    data: str
    parts: tuple[PartPosition, ...] = ()
    template: str = ""
    tokenizer: str = ""


@dataclass(frozen=True)
class ScaleState:
    """State of `train.loss_scale`: the scale, the steps without overflow since it changed, and the
    run's steps that overflowed."""

    scale: Annotated[float, Ge(1), Le(2**32)]
    steps: Count = 0
    overflows: Count = 0


@dataclass(frozen=True)
class Extra:
    """The known keys of `Commit.extra`, and of what a snapshot in memory holds.

    Attributes:
        data_position: None for a checkpoint of imported weights.
        recent_steps: The reports of the last steps, oldest first.
        outer_tokens: `OuterSync.tokens`, where replicas train apart.
        own_steps: There, the reports of one replica since the last outer step; in memory only.
        losses: The last losses, with recovery.on_spike.
        loss_scale: With train.precision fp16.
    """

    data_position: DataPosition | None = None
    recent_steps: tuple[StepReport, ...] = ()
    outer_tokens: tuple[tuple[Count, ...], ...] = ()
    own_steps: tuple[StepReport, ...] = ()
    losses: tuple[float, ...] = ()
    loss_scale: ScaleState | None = None


def read_extra(extra: Mapping[str, Any], place: str) -> Extra:
    """Returns the known keys; others are the writer's own. `place`: the key of the COMMIT, or the
    name of the file, for errors. Raises CheckpointError: a value has another shape."""
    data = json.dumps(extra).encode()
    return parse_as(Extra, data, place, Bounds(), fix=ADVICE, kind="a valid state", unknown="ignore")
