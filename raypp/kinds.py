"""The kinds that a file declares, and where each registry finds them. The model families are in `raypp.spec.models`.

A new schedule, store, data source or optimizer is one file in the package named below. Its `KIND` answers every
question that other parts of raypp have about it; nothing else lists it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal, Self
from urllib.parse import urlsplit

from raypp.errors import JobError, Problem
from raypp.registry import Kind, Registry

_SCHEME = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]*)://")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class ScheduleKind(Kind):
    """A schedule: `build(pp, stages_per_rank, microbatches, lookahead=0)` gives each rank's actions, in order.

    Attributes:
        placement: How stages are dealt to ranks: "loop" round and round, "v" there and back.
        stages_per_rank: Smallest and largest number of stages of a rank.
        microbatches_per_rank: At least this many microbatches per pipeline rank (0: any number will do).
        reason: Why fewer microbatches are refused.
        splits_backward: It has I and W actions.
        searched_from: The fewest stages per rank for which `raypp plan --search` tries it; 0: it is never tried.
        buffered: Messages that each channel must hold if sends block until they are received.
        source: Where it is described.
    """

    placement: Literal["loop", "v"] = "loop"
    stages_per_rank: tuple[int, int] = (1, 1)
    microbatches_per_rank: int = 0
    reason: str = ""
    splits_backward: bool = False
    searched_from: int = 1
    buffered: int = 0
    source: str = ""

    @classmethod
    def undeclared(cls, name: str) -> Self:
        """A function may do any sizes; its programs are checked."""
        return cls(name, "your own", stages_per_rank=(1, 64))

    def least_microbatches(self, pp: int) -> int:
        """The fewest microbatches it runs with on `pp` ranks; one rank has nothing to fill."""
        return max(1, self.microbatches_per_rank * pp) if pp > 1 else 1

    def allows_stages(self, stages_per_rank: int) -> bool:
        return stages_per_rank == self.nearest_stages(stages_per_rank)

    def nearest_stages(self, stages_per_rank: int) -> int:
        """The number of stages per rank it can do that is nearest to the given one."""
        least, most = self.stages_per_rank
        return min(max(stages_per_rank, least), most)


@dataclass(frozen=True)
class SourceKind(Kind):
    """A data source: `read(request: Request) -> Corpus`.

    Attributes:
        endings: Which files of a directory it reads, lower case and with their dot; empty: it reads no files.
        ids: Where its ids come from. "text": it has text, which the job's tokenizer encodes. "tokenizer": the job's
            tokenizer made them earlier. "model": it draws from all ids of the model and needs no tokenizer.
        keys: Keys of `data` that only sources which name them read.
    """

    endings: tuple[str, ...] = ()
    ids: Literal["text", "tokenizer", "model"] = "text"
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class StoreKind(Kind):
    """A store, named by the scheme of its URLs: `open_url(url, *, missing_bucket, patience) -> ObjectStore`.

    Attributes:
        form: Its URLs as messages show them.
        local: `scheme://` and a directory's path is a store: its objects are files, and no server is asked.
        holds_data: `data.path` may be such a URL: `scheme://place/key-or-prefix`, where `scheme://place` is a store.
        record_every_s: Seconds between two writes of a run's records; requests to a server may cost money.
        endpoints: Environment variables that say where its server is, the first that is set counts.
        secrets: Variables with credentials; they travel with a job in its private file.
        settings: Variables that anyone may see; they travel with a job.
        files: Variables that name files of the submitter's machine; they travel to ranks on that machine.
        chosen_by: Variables of which any says that the user has a store of this kind.
        embedded: `raypp local` runs such a server, and lends it to whoever has none.
    """

    form: str = ""
    local: bool = False
    holds_data: bool = False
    record_every_s: float = 1.0
    endpoints: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    chosen_by: tuple[str, ...] = ()
    embedded: bool = False

    @property
    def record_interval_s(self) -> float:
        """`record_every_s`, but no longer than a second when the server is on this machine."""
        url = next((os.environ[name] for name in self.endpoints if os.environ.get(name)), "")
        return min(1.0, self.record_every_s) if urlsplit(url).hostname in _LOOPBACK else self.record_every_s


@dataclass(frozen=True)
class OptimizerKind(Kind):
    """An optimizer: `build(named, options, precision) -> torch.optim.Optimizer`, see `raypp.train.optimizer`.

    Attributes:
        states: Numbers kept per parameter, in fp32.
    """

    states: int = 2


@dataclass(frozen=True)
class PolicyKind(Kind):
    """A recovery policy: `build(recovery: RecoverySection) -> Policy`, see `raypp.recovery.policy`."""


SCHEDULES = Registry("schedule", ScheduleKind, "raypp.schedules", "build", "raypp.schedules")
SOURCES = Registry("data source", SourceKind, "raypp.data", "read", "raypp.data_sources")
STORES = Registry("store", StoreKind, "raypp.storage", "open_url", "raypp.stores")
OPTIMIZERS = Registry("optimizer", OptimizerKind, "raypp.train", "build", "raypp.optimizers")
POLICIES = Registry("recovery policy", PolicyKind, "raypp.recovery.policies", "build", "raypp.recovery_policies")

SOURCES.register("hf", summary="a Hugging Face dataset", available=False, position=4, keys=("text_key",))


def store_kind(url: str, *, key: str = "") -> StoreKind:
    """The kind of store that a URL means; a plain path means a directory.

    Raises:
        JobError: There is no store with that scheme.
    """
    match = _SCHEME.match(url)
    if match is None:
        return STORES.get("file")
    return STORES.get(match[1].lower(), key=key, fix=f"use {store_forms()}")


def keeps_data_elsewhere(path: str) -> bool:
    """Whether a `data.path` is the URL of objects in a store; else it means files.

    Raises:
        JobError: There is no store with that scheme, or it holds no data.
    """
    if _SCHEME.match(path) is None:
        return False
    kind = store_kind(path)
    if not kind.holds_data:
        raise JobError(Problem("", f"{path}: training data are not read from {kind.name}://", f"use {data_forms()}"))
    return True


def store_forms() -> str:
    """What a store's URL looks like, for messages: `s3://bucket/prefix or a directory`."""
    return " or ".join(kind.form for kind in sorted(STORES, key=lambda kind: kind.local) if kind.form)


def data_forms() -> str:
    """What `data.path` may be, for messages."""
    urls = [f"{kind.name}://…" for kind in STORES if kind.holds_data]
    return "a file, a directory, a glob" + "".join(f" or {url}" for url in urls)
