"""Messages between controller, workers and driver: plain data that Ray pickles."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raypp.control.clusters.known_runs import cluster_name
from raypp.control.queue.line import Priority
from raypp.job.secret import is_mark
from raypp.records import Event, NodeFacts, RankFailure, RankResult, Requests, Seat, StepReport
from raypp.state.run_records.json_lines import LogLine

NAMESPACE = "raypp"
"""Ray namespace of every named actor of raypp."""
REQUEST_FILE = "raypp-run.json"
"""Name of the `RunRequest` in a run's package."""


@dataclass(frozen=True)
class RunRequest:
    """Start parameters of a controller. The job's package holds them as `raypp-run.json`.

    Attributes:
        facts: What decisions take into account of the cluster (`planning.decision.Facts`), as plain
            JSON.
        rank_function: `module:function` to run instead of the real rank; for tests of the control
            plane.
        store: URL of the run's store, in the store's own form; "" in tests with one run of a name.
        number: Of the spec of this submission; 0: the newest when the controller starts.
        queued: It was in the cluster's line, so it comes to no node that is held.
        user, priority: Of the submission.
        after: Runs that must have succeeded before, as URL/NAME.
    """

    run: str
    job: dict[str, Any]
    submission_id: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    rank_function: str | None = None
    store: str = ""
    number: int = 0
    queued: bool = False
    user: str = ""
    priority: Priority = "normal"
    after: list[str] = field(default_factory=list)

    @property
    def cluster_name(self) -> str:
        """What the cluster calls the run."""
        return cluster_name(self.store, self.run) if self.store else self.run


def forks_workers(request: RunRequest) -> bool:
    """Returns whether a run's workers are forked from a process that has torch imported."""
    return request.rank_function is None and sys.platform == "linux"


def rank_environment(resources: Mapping[str, Any]) -> dict[str, str]:
    """Returns the variables that a job sets in its ranks' processes; no hidden ones. `resources`:
    the resolved job's `resources`, as plain JSON."""
    # Ray would give every actor one thread, however many CPUs it reserves.
    threads = {"OMP_NUM_THREADS": str(max(1, int(resources["cpus_per_rank"])))}
    return threads | {name: value for name, value in resources["env"].items() if not is_mark(value)}


@dataclass(frozen=True)
class WorkerInfo:
    """Where a worker process runs. `free_port`: a port of its node that is free now. `log`: of its
    standard error. `oom_kills`: the kernel's count of out-of-memory kills now."""

    facts: NodeFacts
    free_port: int
    log: str = ""
    oom_kills: int = 0


@dataclass(frozen=True)
class WorkerStatus:
    """What a worker tells a restarted controller about itself. `bundle`: the bundle whose resources
    it uses; None before its first seat. `seat`: its current or last seat."""

    info: WorkerInfo
    bundle: int | None
    seat: Seat | None


@dataclass(frozen=True)
class ReportBatch:
    """Everything a rank has to report since its last batch. `number`: counts this rank's batches in
    this attempt, from 1. `idle_s`: seconds since its phase last changed. `inside`: the collective
    it waits in, once it has been idle for a while. `reached`: marks that the device has come to, if
    `phase` is the device's; 0: it is the host's."""

    attempt: int
    rank: int
    number: int
    phase: str
    idle_s: float = 0.0
    steps: tuple[StepReport, ...] = ()
    events: tuple[Event, ...] = ()
    logs: tuple[LogLine, ...] = ()
    inside: str = ""
    reached: int = 0


@dataclass(frozen=True)
class BatchAnswer:
    """The answer to a batch. `requests`: what the operator wants. `incarnation`: identifies the
    controller process; one that was killed may have lost what it had not written. `durable`: steps
    and events of this rank's batches up to this number are in the store."""

    requests: Requests
    incarnation: str = ""
    durable: int = 0


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended in one seat. `reusable`: whether its process can take another seat. `why`:
    why not. `unwritten`: reports that are not known to be in the store."""

    result: RankResult | RankFailure
    reusable: bool = True
    why: str = ""
    unwritten: ReportBatch | None = None
