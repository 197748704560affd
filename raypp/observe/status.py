"""How a run stands, as one object: `status.json` in the store and `raypp status --json`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from raypp.records import Coordinates, RunState

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
"""The keys of `raypp status --json`, in their order."""

HEARTBEAT_S = 5.0
"""A living writer rewrites `status.json` at least this often, also when nothing changed."""
GONE_AFTER_S = 3 * HEARTBEAT_S
"""Silence after which a run whose controller is known to be gone counts as failed."""
SILENT_AFTER_S = 18 * HEARTBEAT_S
"""Silence after which a run counts as failed when nobody can tell whether its controller lives."""


@dataclass(frozen=True)
class RankStatus:
    """One rank as its supervisor sees it.

    Attributes:
        state: A word: starting, running, saving, dead, done …
    """

    rank: int
    coordinates: Coordinates
    node: str = ""
    pid: int = 0
    state: str = "starting"

    def as_dict(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "coordinates": self.coordinates.as_dict(),
            "node": self.node,
            "pid": self.pid,
            "state": self.state,
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> RankStatus:
        """The reverse of `as_dict`."""
        return cls(**{**fields, "coordinates": Coordinates(**fields["coordinates"])})


@dataclass(frozen=True)
class RunStatus:
    """How a run stands.

    Attributes:
        step: Last finished step; 0 before the first.
        loss: Of that step; None before the first.
        checkpoint: URL/NAME/step-N of the newest commit; None when there is none.
        mesh: Length of each axis: pp, dp_replicate, fsdp, cp, ep.
        error: What failed and why, in words; None while nothing did.
        updated_at: Seconds since 1970, by the writer's clock; `RunRecorder` sets it when it writes.
    """

    run: str
    state: RunState
    step: int = 0
    steps: int = 0
    loss: float | None = None
    tokens_per_s: float | None = None
    attempt: int = 0
    restarts: int = 0
    checkpoint: str | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    ranks: tuple[RankStatus, ...] = ()
    error: str | None = None
    updated_at: float = field(default_factory=time.time, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """The keys of `STATUS_KEYS`, then `updated_at`; plain JSON values."""
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

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> RunStatus:
        """The reverse of `as_dict`."""
        ranks = tuple(RankStatus.from_dict(rank) for rank in fields["ranks"])
        return cls(**{**fields, "state": RunState(fields["state"]), "ranks": ranks})

    def stamped(self, now: float) -> RunStatus:
        """The same status, written at `now`."""
        return replace(self, updated_at=now)


def is_final(status: Mapping[str, Any] | None) -> bool:
    """Whether the run of this status has ended."""
    return status is not None and status["state"] in {str(state) for state in RunState if state.final}


def without_a_sign_of_life(status: dict[str, Any], alive: bool | None, now: float) -> dict[str, Any]:
    """The status, turned into FAILED when its writer is gone without having said how the run ended.

    Args:
        status: As `RunReader.status` gives it.
        alive: Whether the run's controller lives; None when nobody can tell (no cluster to ask).
        now: Seconds since 1970.

    Returns:
        The status itself, or a copy with the state FAILED and an error that says since when all is silent.
    """
    if is_final(status) or alive:
        return status
    silence = now - float(status["updated_at"])
    if silence < (SILENT_AFTER_S if alive is None else GONE_AFTER_S):
        return status
    who = "the run's controller is gone" if alive is False else "the run gives no sign of life"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(status["updated_at"])))
    earlier = f"; its last error: {status['error']}" if status["error"] else ""
    ranks = [{**rank, "state": "gone"} for rank in status["ranks"]]
    return {
        **status,
        "state": str(RunState.FAILED),
        "ranks": ranks,
        "error": f"{who} since {since} (it was {status['state']}){earlier}; go on with raypp submit --resume",
    }
