"""What controller, workers and driver say to each other; plain data that Ray pickles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from raypp.observe.json_lines import LogLine
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
        relays: Other numbers than the defaults of `relay_tree.Shape`; for tests, too.
    """

    run: str
    job: dict[str, Any]
    submission_id: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    rank_function: str | None = None
    relays: dict[str, int] = field(default_factory=dict)


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
        ago_s: Seconds since the controller said so; only a relay's answer is not its own.
    """

    requests: Requests
    life: str = ""
    durable: int = 0
    ago_s: float = 0.0


class Beat(NamedTuple):
    """A sign of life of one rank, as in a `Batch`.

    Attributes:
        ago_s: Seconds since the rank gave it.
    """

    rank: int
    phase: str
    idle_s: float
    ago_s: float
    inside: str = ""


@dataclass(frozen=True)
class Parcel:
    """What a relay hands on.

    Attributes:
        attempt: Of the beats.
        beats: The newest one of each rank that has given one since the last parcel.
        batches: What brings news; of these, phase and idle time are in `beats`.
        unwritten: By rank: the last batch with steps or events that is not known to be in the store.
    """

    attempt: int
    beats: tuple[Beat, ...] = ()
    batches: tuple[Batch, ...] = ()
    unwritten: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Word:
    """The controller's answer to a parcel, and a relay's to another one's.

    Attributes:
        life: As in an `Answer`.
        attempt: The attempt whose ranks this is for.
        requests: As in an `Answer`, but never for a save: rank 0 is asked for that, and speaks for itself.
        durable: As in an `Answer`, of the ranks that had something unwritten.
        ago_s: As in an `Answer`.
    """

    life: str = ""
    attempt: int = 0
    requests: Requests = field(default_factory=Requests)
    durable: dict[int, int] = field(default_factory=dict)
    ago_s: float = 0.0


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
