"""The axes of the mesh; records that cross process borders: frozen, plain. No torch, no ray."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Annotated, Any, Literal, Protocol

from raypp.failure_kinds import FailureKind
from raypp.untrusted.documents import AnyText, Count, Seconds, Time

Progress = Callable[[int, int], None]
"""Called as work goes on, with how much is done, and of how much."""


def no_progress(done: int, total: int) -> None:
    """A `Progress` that tells nobody."""


class RunState(StrEnum):
    """A run's state; the last three are final."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    STOPPING = "STOPPING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"

    @property
    def final(self) -> bool:
        return self in (RunState.SUCCEEDED, RunState.FAILED, RunState.STOPPED)


class SaveProgress(IntEnum):
    """How far the last save is, the worst last."""

    OVER = 0
    BUSY = 1
    STUCK = 2
    """The store does not take it."""


@dataclass(frozen=True)
class Axis:
    """An axis of the mesh: a key of `mesh:` in a job, a field of `Coordinates`, a process group.

    Attributes:
        name: Its name in a job, in `status --json`, in commits, and of its process group.
        rows: Whether its ranks read different rows.
        shards: Whether FSDP shards weights over its ranks.
        fixed: Whether an elastic run keeps its length.
        short: Its name in the names of ranks (`dp1`), if another.
    """

    name: str
    rows: bool = False
    shards: bool = False
    fixed: bool = False
    short: str = ""


AXES = (
    Axis("pp"),
    Axis("dp_replicate", rows=True, short="dp"),
    Axis("fsdp", rows=True, shards=True),
    Axis("cp", shards=True, fixed=True),
    Axis("tp", fixed=True),
)
"""The axes of the mesh, slowest first. A new one is a row here, a field of `Coordinates`, a key of
`raypp.job.job.MeshSection`, and what its ranks do. `ep` is none: it divides those that shard."""


@dataclass(frozen=True)
class Coordinates:
    """A rank's place in the mesh, one index per axis; or the mesh's shape, one length per axis."""

    pp: Count = 0
    dp_replicate: Count = 0
    fsdp: Count = 0
    cp: Count = 0
    tp: Count = 0

    @property
    def world(self) -> int:
        return math.prod(getattr(self, axis.name) for axis in AXES)

    @property
    def shards(self) -> int:
        """The number of ranks that FSDP shards a weight over, in a mesh of this shape."""
        return math.prod(getattr(self, axis.name) for axis in AXES if axis.shards)

    @property
    def replicas(self) -> int:
        """The number of ranks that read different rows, in a mesh of this shape."""
        return math.prod(getattr(self, axis.name) for axis in AXES if axis.rows)

    @property
    def column(self) -> tuple[int, ...]:
        """The place without its stage: equal for the ranks of one pipeline."""
        return tuple(vars(self).values())[1:]

    def label(self, sizes: Coordinates) -> str:
        """Returns a short name that shows pp and every axis longer than 1: `pp0-fsdp1`. `sizes`:
        the length of each axis (a `Coordinates` used as the mesh's shape)."""
        return "-".join([f"pp{self.pp}", *self.row_label(sizes)])

    def row_label(self, sizes: Coordinates) -> list[str]:
        """Returns the parts of `label` behind pp."""
        shown = [axis for axis in AXES[1:] if getattr(sizes, axis.name) > 1]
        return [f"{axis.short or axis.name}{getattr(self, axis.name)}" for axis in shown]

    def replica(self, sizes: Coordinates) -> int:
        """Returns the replica whose rows a rank at this place reads. `sizes`: of the axes."""
        replica = 0
        for axis in AXES:
            if axis.rows:
                replica = replica * getattr(sizes, axis.name) + getattr(self, axis.name)
        return replica

    def as_dict(self) -> dict[str, int]:
        # A status document contains one per rank, and dataclasses.asdict takes ten times as long.
        return dict(vars(self))


ONE_RANK = Coordinates(*[1] * len(AXES))
"""The shape of a mesh of one rank."""


@dataclass(frozen=True)
class NodeFacts:
    """Where a worker runs, as it reports before seats are assigned. `site`: the Ray label `site` of
    its node, "" if it has none. `compiler`: whether there is a C compiler. `network_gbps`: Gbit/s
    of one connection to another node; 0 if unknown."""

    node_id: str
    ip: str
    hostname: str
    pid: int
    interface: str
    device_index: int = 0
    site: str = ""
    compiler: bool = True
    network_gbps: float = 0.0


@dataclass(frozen=True)
class Seat:
    """Everything that a rank needs to join an attempt: its place, and how to reach the others."""

    run: str
    attempt: int
    rank: int
    world_size: int
    coordinates: Coordinates
    mesh_sizes: Coordinates
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    node: str = "localhost"
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    interface: str = ""
    device: str = "cpu"
    device_index: int = 0
    nodes: tuple[str, ...] = ()
    """The addresses of all nodes of the attempt, by node_rank; empty if unknown."""
    secret: str = field(default="", repr=False)
    """64 hex digits that only the attempt's ranks know; never written. Empty without a
    controller, and then `nodes` is empty too."""

    @property
    def label(self) -> str:
        return self.coordinates.label(self.mesh_sizes)

    @property
    def replica(self) -> int:
        """Which replica's rows this rank reads."""
        return self.coordinates.replica(self.mesh_sizes)

    def event(self, kind: EventKind, message: str, step: int | None = None, **details: Any) -> Event:
        return Event(kind, message, attempt=self.attempt, step=step, rank=self.rank, node=self.node, details=details)


@dataclass(frozen=True)
class StepReport:
    """One finished optimizer step, as rank 0 sees it (all values are global)."""

    step: Count
    loss: float
    grad_norm: float
    tokens: Count
    seq_len: Count
    step_s: Seconds
    tokens_per_s: float
    attempt: Count
    lr: float = 0.0
    parts_s: dict[str, float] = field(default_factory=dict)
    """Seconds of this step by part: data, negotiate, pipeline, reduce, optimizer, save.

    On a GPU, the last two are of the step before: they end after their step's report.
    """
    extras: dict[str, float] = field(default_factory=dict)
    """Values that only some models have: aux_loss and z_loss with experts; in fp16 the step's
    loss_scale, and overflows, the steps of the run until it that overflowed and made no update."""
    wire_bytes: Count = 0
    """Bytes sent between stages in this step, by all ranks."""
    compressed: bool = False
    """Whether messages are compressed; only then, or with replicas, is `wire_bytes` in the history.
    """
    replica_bytes: Count | None = None
    """Bytes that all ranks send to other replicas for this step: sums of gradients, or weights at
    an outer step; by size, as `raypp plan` counts them. None: there are none."""
    flops: float = 0.0
    """FLOPs of the model in this step, all ranks together: 6 N per token and attention within
    documents; recomputation and padding do not count."""
    gpus: Count = 0
    """GPUs that computed them; 0 on CPUs."""
    peak_tflops: float = 0.0
    """TFLOP/s of one of them by its data sheet; 0: unknown."""
    peak_bytes: list[Count] = field(default_factory=list, compare=False)
    """Most memory that a rank of each pipeline rank has used before this step, in this process: of
    tensors on a GPU, of the process on a CPU."""
    alloc_retries: Count = field(default=0, compare=False)
    """How often torch's allocator had to give back what it kept, and wait for the device, on the
    GPU where it did most, in this process before this step. Each costs milliseconds or more."""

    @property
    def values(self) -> dict[str, float]:
        """The values that not every run has: bytes that were sent; on GPUs `tflops` of each, and
        `mfu`, its share of the peak, where that is known; then the extras."""
        values: dict[str, float] = {}
        if self.compressed or self.replica_bytes is not None:
            values["wire_bytes"] = self.wire_bytes
        if self.replica_bytes is not None:
            values["replica_bytes"] = self.replica_bytes
        if self.gpus and self.step_s:
            values["tflops"] = self.flops / self.step_s / self.gpus / 1e12
            if self.peak_tflops:
                values["mfu"] = values["tflops"] / self.peak_tflops
        return values | self.extras


@dataclass(frozen=True)
class RankFailure:
    """The evidence about one failed rank."""

    rank: int
    label: str
    node: str
    pid: int
    kind: FailureKind
    cause: str
    step: int = 0
    details: str = ""


EventKind = Literal[
    # of the run
    "submitted", "device_chosen", "stop_requested", "succeeded", "failed", "stopped",
    # of the controller
    "attempt_started", "seated", "rank_failed", "stacks", "restarting", "reshaped", "no_smaller_mesh", "node_left_out",
    "room_asked", "waiting", "controller_restarted", "takeover_refused", "spares_held", "spares_missing",
    "spares_released",
    # of ranks that start
    "attention", "compile", "cuda", "data", "lookahead", "mixed_devices", "network", "offload", "refused_connection",
    "checkpoint_rejected", "learning_rate", "loaded_from_hf", "loaded_from_run", "resumed", "restored", "sync",
    "first_step",
    # of ranks that train
    "evaluated", "sampled", "loss_spike", "straggler", "step_skipped", "loss_scale", "preemption_notice", "traced",
    "trace_failed", "committed", "save_failed", "save_skipped", "save_waited", "prune_failed", "leftovers_removed",
    "store_limited", "memory_tier", "memory_tier_off", "memory_tier_reduced", "tracking", "tracker_stopped",
    "tracker_dropped", "on_end_failed",
]  # fmt: skip
"""Every kind of event that raypp writes."""
END_EVENTS: dict[RunState, EventKind] = {
    RunState.SUCCEEDED: "succeeded",
    RunState.FAILED: "failed",
    RunState.STOPPED: "stopped",
}
"""The kind of event that says how a run ended, by its final state."""


@dataclass(frozen=True)
class Event:
    """Something that happened to a run, described for people; no decision depends on it. `kind`:
    what it is. Another raypp may have written others. `details`: values for programs (rank, node,
    cause, object keys, seconds)."""

    kind: Annotated[EventKind, AnyText]
    message: str
    time: Time = field(default_factory=time.time)
    attempt: Count = 0
    step: Count | None = None
    rank: Count | None = None
    node: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def number(self, key: str) -> float | None:
        """Returns a number of the details; None for any other value."""
        value = self.details.get(key)
        if type(value) is int and abs(value) < 1 << 63:
            value = float(value)
        return value if isinstance(value, float) else None


@dataclass(frozen=True)
class RankResult:
    """The result of a rank that ended in order."""

    rank: int
    step: int
    stopped: bool
    checkpoint_step: int | None


@dataclass(frozen=True)
class Requests:
    """The operator's requests to the ranks. Every rank polls its own copy. They agree on the step
    at which they act when a step starts. `trace`: steps to trace from this one on."""

    save: bool = False
    stop: bool = False
    save_before_stop: bool = True
    trace: int = 0


class Reporter(Protocol):
    """The rank's only way to report; control, torchrun and tests each provide their own. All
    methods are cheap and never raise; they may be called from any thread of the rank."""

    def phase(self, name: str, detail: str = "", reached: Callable[[], bool] | None = None) -> None:
        """Reports what the rank is doing (rendezvous, build, load, step 12 forward 3 …). `detail`:
        what it does in this phase. `reached`: tells, to any thread and without waiting, whether the
        device has come to where its host queued this. None: the host does it itself."""

    def step(self, report: StepReport) -> None:
        """Reports a finished step. Called on rank 0 only."""

    def event(self, event: Event) -> None:
        """Reports an event."""

    def requests(self) -> Requests:
        """Returns the operator's current requests. Called once per step."""
