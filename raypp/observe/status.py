"""A run's status as one object: `status.json` in the store and `raypp status --json`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from raypp.records import Coordinates, RunState
from raypp.untrusted.documents import Count, Time

STATUS_KEYS = (
    "run",
    "state",
    "step",
    "steps",
    "loss",
    "tokens_per_s",
    "attempt",
    "restarts",
    "checkpoint",
    "mesh",
    "ranks",
    "error",
)
"""The keys of `raypp status --json`, in order."""

HEARTBEAT_S = 5.0
"""A live writer rewrites `status.json` at least this often, even if nothing has changed."""
GONE_AFTER_S = 3 * HEARTBEAT_S
"""Silence after which a run counts as failed if its controller is known to be dead."""
SILENT_AFTER_S = 18 * HEARTBEAT_S
"""Silence after which a run counts as failed if its controller's state is unknown."""
NO_CONTROLLER = "the run's controller could not be started: "
"""How the last lines of a run's Ray job begin that could not begin to lead the run."""


LOST = frozenset({"dead", "gone"})
"""States of ranks whose process has ended before its work was done."""
ENDED = LOST | {"done"}
"""States of ranks that no process has any more."""


@dataclass(frozen=True)
class RankStatus:
    """One rank as its supervisor sees it.

    Attributes:
        state: One word: starting, running, saving, dead, done …
    """

    rank: Count
    coordinates: Coordinates
    node: str = ""
    pid: Count = 0
    state: str = "starting"

    def as_dict(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "coordinates": self.coordinates.as_dict(),
            "node": self.node,
            "pid": self.pid,
            "state": self.state,
        }


@dataclass(frozen=True)
class RunStatus:
    """A run's status.

    Attributes:
        step: Last finished step; 0 before the first.
        loss: Loss of that step; None before the first.
        checkpoint: URL/NAME/step-N of the newest commit; None if there is none.
        mesh: Length of each axis: pp, dp_replicate, fsdp, cp, ep.
        error: Description of the failure; None if nothing failed.
        updated_at: Seconds since 1970, by the writer's clock; `RunRecorder` sets it when it writes.
    """

    run: str
    state: RunState
    step: Count = 0
    steps: Count = 0
    loss: float | None = None
    tokens_per_s: float | None = None
    attempt: Count = 0
    restarts: Count = 0
    checkpoint: str | None = None
    mesh: Mapping[str, Count] = field(default_factory=dict)
    ranks: tuple[RankStatus, ...] = ()
    error: str | None = None
    updated_at: Time = field(default_factory=time.time, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Returns the keys of `STATUS_KEYS`, then `updated_at`, with plain JSON values."""
        return {
            "run": self.run,
            "state": str(self.state),
            "step": self.step,
            "steps": self.steps,
            "loss": self.loss,
            "tokens_per_s": self.tokens_per_s,
            "attempt": self.attempt,
            "restarts": self.restarts,
            "checkpoint": self.checkpoint,
            "mesh": dict(self.mesh),
            "ranks": [rank.as_dict() for rank in self.ranks],
            "error": self.error,
            "updated_at": self.updated_at,
        }

    def stamped(self, now: float) -> RunStatus:
        """Returns the same status, written at `now`."""
        return replace(self, updated_at=now)


def is_final(status: Mapping[str, Any] | None) -> bool:
    """Returns whether the run of this status has ended."""
    return status is not None and status["state"] in {str(state) for state in RunState if state.final}


def without_a_sign_of_life(status: dict[str, Any], alive: bool | None, now: float) -> dict[str, Any]:
    """Returns the status, changed to FAILED if its writer died without recording the run's end.

    Args:
        status: As `RunReader.status` returns it.
        alive: Whether the run's controller is alive; None if that is unknown (no cluster to ask).
        now: Seconds since 1970.

    Returns:
        The status itself, or a copy with the state FAILED and an error that says since when the run
        has been silent.
    """
    if is_final(status) or alive:
        return status
    silence = now - float(status["updated_at"])
    if silence < (SILENT_AFTER_S if alive is None else GONE_AFTER_S):
        return status
    who = "the run's controller has been gone" if alive is False else "the run has shown no sign of life"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(status["updated_at"])))
    earlier = f"; its last error: {status['error']}" if status["error"] else ""
    ranks = [{**rank, "state": "gone"} for rank in status["ranks"]]
    return {
        **status,
        "state": str(RunState.FAILED),
        "ranks": ranks,
        "error": f"{who} since {since} (it was {status['state']}){earlier}; resume it with raypp submit --resume",
    }
