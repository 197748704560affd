"""What a file of a schedule, store, data source, optimizer, policy or tracker declares; the
registries. A new kind is one file in the package given below. Its `KIND` answers all questions
about it; no other file lists it. The model families are in `raypp.job.known_families`."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Self

from raypp.errors import JobError, Problem
from raypp.proxies import is_loopback
from raypp.registry import Kind, Registry

_SCHEME = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]*)://")


@dataclass(frozen=True)
class ScheduleKind(Kind):
    """A schedule: `build(pp, stages_per_rank, microbatches, lookahead=0)`.

    It returns each rank's actions, in order.

    Attributes:
        placement: How stages are assigned to ranks: "loop" round-robin, "v" forth and back.
        stages_per_rank: Smallest and largest number of stages per rank.
        microbatches_per_rank: Least number of microbatches per pipeline rank; 0: any number works.
        reason: Why fewer microbatches are refused.
        splits_backward: It has I and W actions.
        searched_from: Smallest number of stages per rank for which `raypp plan --search` tries it;
            0: never.
        source: Where it is described.
    """

    placement: Literal["loop", "v"] = "loop"
    stages_per_rank: tuple[int, int] = (1, 1)
    microbatches_per_rank: int = 0
    reason: str = ""
    splits_backward: bool = False
    searched_from: int = 1
    source: str = ""

    @classmethod
    def undeclared(cls, name: str) -> Self:
        """Returns a kind that allows up to 64 stages per rank. Its programs are checked anyway."""
        return cls(name, "your own", stages_per_rank=(1, 64))

    def least_microbatches(self, pp: int) -> int:
        """Returns the smallest number of microbatches on `pp` ranks; 1 on a single rank."""
        return max(1, self.microbatches_per_rank * pp) if pp > 1 else 1

    def allows_stages(self, stages_per_rank: int) -> bool:
        return stages_per_rank == self.nearest_stages(stages_per_rank)

    def nearest_stages(self, stages_per_rank: int) -> int:
        """Returns the supported number of stages per rank that is closest to the given one."""
        least, most = self.stages_per_rank
        return min(max(stages_per_rank, least), most)


@dataclass(frozen=True)
class SourceKind(Kind):
    """A data source: `read(request: Request) -> Corpus`.

    Attributes:
        endings: Suffixes of the files that it reads from a directory, lower case with the dot;
            empty: it reads no files.
        ids: Where token ids come from. "text": the job's tokenizer encodes its text. "tokenizer":
            its data was encoded by the job's tokenizer earlier. "model": it draws from all ids of
            the model and needs no tokenizer.
        keys: Keys of `data` that only sources listing them here read.
        mixes: Its documents are those of `data.parts`, whose kinds read them.
        hub: `data.path` may be a name on Hugging Face's hub.
        compressed: Its files may also end in .gz, .bz2, .xz or .zst after one of the endings.
        first_rows: Rows may be unusable, so the first are read before a run.
    """

    endings: tuple[str, ...] = ()
    ids: Literal["text", "tokenizer", "model"] = "text"
    keys: tuple[str, ...] = ()
    mixes: bool = False
    hub: bool = False
    compressed: bool = False
    first_rows: bool = False


@dataclass(frozen=True)
class StoreKind(Kind):
    """A store: `open_url(url, *, missing_bucket, patience) -> ObjectStore`.

    Its name is the scheme of its URLs.

    Attributes:
        form: Its URLs as messages show them.
        local: Objects are files below the path in `scheme://path`; there is no server.
        holds_data: `data.path` may be such a URL: `scheme://place/key-or-prefix`, where
            `scheme://place` is a store.
        record_every_s: Seconds between two writes of a run's records. Requests to a server may cost
            money.
        endpoints: Environment variables with the server's address. The first one that is set
            counts.
        secrets: Variables with credentials. They travel with a job in its private file.
        own_secrets: `package.module:function` of a function `() -> dict[str, str]`, which returns
            `secrets` that this machine has elsewhere than in variables; empty: none.
        settings: Variables without secrets. They travel with a job.
        own_settings: As `own_secrets`, for `settings`.
        files: Variables that name files on the submitter's machine. They travel only to ranks on
            that machine.
        chosen_by: Variables that show that the user has a store of this kind, if any of them is
            set.
        embedded: `raypp local` runs such a server and lends it to users who have none.
    """

    form: str = ""
    local: bool = False
    holds_data: bool = False
    record_every_s: float = 1.0
    endpoints: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    own_secrets: str = ""
    settings: tuple[str, ...] = ()
    own_settings: str = ""
    files: tuple[str, ...] = ()
    chosen_by: tuple[str, ...] = ()
    embedded: bool = False

    @property
    def record_interval_s(self) -> float:
        """Returns `record_every_s`, but at most one second if the server is on this machine."""
        url = next((os.environ[name] for name in self.endpoints if os.environ.get(name)), "")
        return min(1.0, self.record_every_s) if is_loopback(url) else self.record_every_s


@dataclass(frozen=True)
class OptimizerKind(Kind):
    """An optimizer: `build(named, options, precision) -> torch.optim.Optimizer`.

    See `raypp.rank.optimizers.optimizer`.

    Attributes:
        states: Values kept per parameter, in fp32.
        states_in_8bit: It can keep them in 8 bits instead (`train.optimizer.state`).
        bf16_weights: It updates weights that exist in bf16 only (`train.precision: bf16_pure`). Its
            attribute `weights` is then a `raypp.rank.optimizers.bf16_weights.Bf16Weights`.
    """

    states: int = 2
    states_in_8bit: bool = False
    bf16_weights: bool = False


@dataclass(frozen=True)
class PolicyKind(Kind):
    """A recovery policy: `build(recovery) -> Policy`, see `raypp.control.recovery.policy`."""


@dataclass(frozen=True)
class TrackerKind(Kind):
    """A tracker: `open_tracker(run: TrackedRun) -> Tracker`, see `raypp.state.run_records.tracked`.

    Attributes:
        library: The module that it imports; empty: none.
        install: What installs it.
        settings: Its options in the job, each with its help.
        variables: Environment variables of the submitter that travel with a job that names it.
        checks: Beside `open_tracker` there is `check(options, environment) -> list[Problem]`, which
            says before a run what is missing. It must not import the library.
    """

    library: str = ""
    install: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    variables: tuple[str, ...] = ()
    checks: bool = False


SCHEDULES = Registry("schedule", ScheduleKind, "raypp.planning.schedules", "build", "raypp.schedules")
SOURCES = Registry("data source", SourceKind, "raypp.rank.data", "read", "raypp.data_sources")
STORES = Registry("store", StoreKind, "raypp.storage", "open_url", "raypp.stores")
OPTIMIZERS = Registry("optimizer", OptimizerKind, "raypp.rank.optimizers", "build", "raypp.optimizers")
POLICIES = Registry(
    "recovery policy", PolicyKind, "raypp.control.recovery.policies", "build", "raypp.recovery_policies"
)
TRACKERS = Registry("tracker", TrackerKind, "raypp.state.run_records.trackers", "open_tracker", "raypp.trackers")


def known_source(name: str) -> SourceKind | None:
    """Returns a data source; None if the name is unknown, which is reported elsewhere."""
    try:
        return SOURCES.get(name)
    except JobError:
        return None


def store_kind(url: str, *, key: str = "") -> StoreKind:
    """Returns the kind of store of a URL or path. Raises JobError: no store has that scheme."""
    match = _SCHEME.match(url)
    if match is None:
        return STORES.get("file")
    return STORES.get(match[1].lower(), key=key, fix=f"use {store_forms()}")


def keeps_data_elsewhere(path: str) -> bool:
    """Whether a `data.path` is the URL of objects in a store rather than a path of files. Raises
    JobError: no store has that scheme, or that store holds no data."""
    if _SCHEME.match(path) is None:
        return False
    kind = store_kind(path)
    if not kind.holds_data:
        raise JobError(Problem("", f"{path}: cannot read training data from {kind.name}://", f"use {data_forms()}"))
    return True


def store_forms() -> str:
    """Returns the forms of a store's URL, for messages: `s3://bucket/prefix or a directory`."""
    return " or ".join(kind.form for kind in sorted(STORES, key=lambda kind: kind.local) if kind.form)


def shared_forms() -> str:
    """Returns the forms of the URLs that mean the same store on every node, for messages."""
    return " or ".join(kind.form for kind in STORES if not kind.local)


def data_urls() -> str:
    """Returns the forms of the URLs that `data.path` may be, for messages."""
    return " or ".join(f"{kind.name}://…" for kind in STORES if kind.holds_data)


def data_forms() -> str:
    """Returns the forms of `data.path`, for messages."""
    return f"a file, a directory, a glob or {data_urls()}"
