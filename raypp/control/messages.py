"""What controller, workers and driver say to each other; plain data that Ray pickles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from raypp.observe.lines import LogLine
from raypp.records import Event, NodeFacts, RankFailure, RankResult, Requests, Seat, StepReport

NAMESPACE = "raypp"
"""Ray namespace of every named actor of raypp."""


def controller_name(run: str) -> str:
    """The actor name of a run's controller."""
    return f"raypp/{run}"


@dataclass(frozen=True)
class RunRequest:
    """What the controller is started with; also the file `raypp-run.json` in the job's package.

    Attributes:
        run: The run's name.
        job: The resolved job, as plain JSON.
        submission_id: The Ray job that started it.
        environment: Settings for all processes of the run; nothing secret.
        rank_function: `module:function` to run instead of the real rank; for tests of the control plane.
    """

    run: str
    job: dict[str, Any]
    submission_id: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    rank_function: str | None = None


@dataclass(frozen=True)
class Presence:
    """A worker's answer to "where are you?".

    Attributes:
        facts: Its node and process.
        free_port: A port of its node nothing listens on now.
        log: The file its standard error goes to.
        oom_kills: The kernel's count of out-of-memory kills now.
    """

    facts: NodeFacts
    free_port: int
    log: str = ""
    oom_kills: int = 0


@dataclass(frozen=True)
class Standing:
    """What a worker says to a controller that finds it.

    Attributes:
        bundle: The bundle whose resources it uses; None before its first seat.
        seat: Its present or last seat.
        ended: Whether its life in that seat is over.
        standby: It was started to wait for a seat, and uses no resources of its own.
    """

    presence: Presence
    bundle: int | None
    seat: Seat | None
    ended: bool
    standby: bool = False


@dataclass(frozen=True)
class Batch:
    """What a rank has to tell since the last time.

    Attributes:
        number: Counts this rank's batches in this attempt, from 1.
        phase: What the rank does now.
        idle_s: Seconds since it last moved.
        inside: The collective it is in, when it has stood for a while.
    """

    attempt: int
    rank: int
    number: int
    phase: str
    idle_s: float = 0.0
    steps: tuple[StepReport, ...] = ()
    events: tuple[Event, ...] = ()
    logs: tuple[LogLine, ...] = ()
    inside: str = ""


@dataclass(frozen=True)
class Answer:
    """The controller's answer to a batch.

    Attributes:
        requests: What the operator wants.
        life: The controller's life; one that was killed may have lost what it had not written yet.
        durable: Steps and events of this rank's batches up to this number are in the store.
    """

    requests: Requests
    life: str = ""
    durable: int = 0


@dataclass(frozen=True)
class Ending:
    """How a rank's life in one seat ended.

    Attributes:
        usable: Whether its process may take another seat.
        why: Why not.
        news: What the controller is not known to have written.
    """

    result: RankResult | RankFailure
    usable: bool = True
    why: str = ""
    news: Batch | None = None


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    run: str
    state: str
    exit_code: int
    step: int
    checkpoint: str | None
    reason: str
