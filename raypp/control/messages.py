"""What controller, workers and driver say to each other; plain data that Ray pickles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from raypp.observe.lines import LogLine
from raypp.records import Event, NodeFacts, StepReport

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
    """

    facts: NodeFacts
    free_port: int


@dataclass(frozen=True)
class Batch:
    """What a rank has to tell since the last time.

    Attributes:
        life: The controller's life the worker belongs to; a later life passes the batch over.
        phase: What the rank does now.
        idle_s: Seconds since it last moved.
    """

    life: str
    attempt: int
    rank: int
    phase: str
    idle_s: float = 0.0
    steps: tuple[StepReport, ...] = ()
    events: tuple[Event, ...] = ()
    logs: tuple[LogLine, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    run: str
    state: str
    exit_code: int
    step: int
    checkpoint: str | None
    reason: str
