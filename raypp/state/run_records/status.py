"""A run's status as one object, in the store and as `raypp status --json`; its figures as text."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

from pydantic_core import to_jsonable_python

from raypp.errors import three_digits
from raypp.records import AXES, Coordinates, RunState
from raypp.untrusted.documents import Count, Time

HEARTBEAT_S = 5.0
"""A live writer rewrites `status.json` at least this often, even if nothing has changed."""
MISSED_S = 1.4 * HEARTBEAT_S
"""Silence after which a reader asks the run's cluster."""
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
    """One rank as its supervisor sees it. `state`: starting, running, saving, dead, done …."""

    rank: Count
    coordinates: Coordinates
    node: str = ""
    pid: Count = 0
    state: str = "starting"


@dataclass(frozen=True)
class RunStatus:
    """A run's status.

    Attributes:
        step: Last finished step; 0 before the first.
        loss: Loss of that step; None before the first.
        checkpoint: URL/NAME/step-N of the newest commit; None if there is none.
        tflops: Of the model in that step, per GPU; None on CPUs.
        mfu: Their share of `peak_tflops`, of the GPU's data sheet; None where that is unknown.
        alloc_retries: As in the step's report; None if there were none.
        wire_bytes, replica_bytes: Likewise; None without replicas.
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
    tflops: float | None = None
    mfu: float | None = None
    peak_tflops: float | None = None
    alloc_retries: Count | None = None
    wire_bytes: Count | None = None
    replica_bytes: Count | None = None
    updated_at: Time = field(default_factory=time.time, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Returns the keys of `STATUS_KEYS`, then the figures of GPUs and replicas that are
        known, then `updated_at`, with plain JSON values."""
        known = cast(dict[str, Any], to_jsonable_python(self))
        return {key: value for key, value in known.items() if key not in _OF_SOME or value is not None}


_OF_SOME = ("tflops", "mfu", "peak_tflops", "alloc_retries", "wire_bytes", "replica_bytes")
STATUS_KEYS = tuple(one.name for one in fields(RunStatus) if one.name not in (*_OF_SOME, "updated_at"))
"""The keys of `raypp status --json`, in order."""


def is_final(status: Mapping[str, Any] | None) -> bool:
    """Returns whether the run of this status has ended."""
    return status is not None and status["state"] in {str(state) for state in RunState if state.final}


def without_a_sign_of_life(status: dict[str, Any], alive: bool | None, now: float, gone: str = "") -> dict[str, Any]:
    """Returns the status, changed to FAILED if its writer died without recording the run's end.
    `status`: as `RunReader.status` returns it. `alive`: whether the run's controller is alive; None
    if that is unknown (no cluster to ask). `now`: seconds since 1970. `gone`: why the run's cluster
    is known to be gone; empty if it may be there. Returns the status, or a copy with the state
    FAILED and an error that says since when it is silent."""
    if is_final(status) or alive:
        return status
    silence = now - float(status["updated_at"])
    if silence < (MISSED_S if gone else SILENT_AFTER_S if alive is None else GONE_AFTER_S):
        return status
    who = "the run's controller has been gone" if alive is False else "the run has shown no sign of life"
    who = f"its cluster is gone: {gone}; {who}" if gone else who
    since = date_and_clock(float(status["updated_at"]))
    earlier = f"; its last error: {status['error']}" if status["error"] else ""
    ranks = [{**rank, "state": "gone"} for rank in status["ranks"]]
    return {
        **status,
        "state": str(RunState.FAILED),
        "ranks": ranks,
        "error": f"{who} since {since} (it was {status['state']}){earlier}; resume it with raypp submit --resume",
    }


def quantity(value: float | None) -> str:
    """Formats a rate in about four characters: 873, 12.3k, 1.20M."""
    if value is None:
        return "–"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def speed_text(status: Mapping[str, Any]) -> str:
    """Formats the speed of a run: `45.9k · 378 TFLOP/s per GPU, MFU 38.2 % of 989`."""
    words = quantity(status["tokens_per_s"])
    if (tflops := status.get("tflops")) is not None:
        words += f" · {three_digits(tflops)} TFLOP/s per GPU"
    if (mfu := status.get("mfu")) is not None:
        words += f", MFU {100 * mfu:.1f} %" + (f" of {peak:g}" if (peak := status.get("peak_tflops")) else "")
    return words


def memory_text(status: Mapping[str, Any]) -> str:
    """Returns what slows a run down because a GPU's memory is short, and the fix; else ""."""
    if not (retries := status.get("alloc_retries")):
        return ""
    times = "once" if retries == 1 else f"{retries} times"
    fix = "lower train.micro_batch_size, or set train.activation_checkpointing: full"
    return f"a GPU was full, gave back what it kept, and waited, {times}: {fix}"


def duration(seconds: float) -> str:
    """Formats a duration: 0:05, 12:30, 3:00:07, 2d 04:10."""
    whole = max(0, round(seconds))
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02d}:{minute:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def loss_text(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def clock(when: float) -> str:
    """Formats the local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(when))


def date_and_clock(when: float) -> str:
    """Formats the local date and time of day."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))


def mesh_text(mesh: Mapping[str, int]) -> str:
    """Formats the axes longer than 1: `pp 2 · fsdp 2`; `1 rank` if there are none."""
    return " · ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or "1 rank"


def rank_label(coordinates: Mapping[str, int], mesh: Mapping[str, int]) -> str:
    """Formats coordinates as in the rank's process title: `pp0-fsdp1`."""
    return _at(coordinates, 0).label(_at(mesh, 1))


def row_label(coordinates: Mapping[str, int], mesh: Mapping[str, int]) -> str:
    """Formats coordinates without the stage: `dp1 fsdp0`."""
    return " ".join(_at(coordinates, 0).row_label(_at(mesh, 1)))


def _at(axes: Mapping[str, int], missing: int) -> Coordinates:
    return Coordinates(*(axes.get(axis.name, missing) for axis in AXES))


def seconds_text(value: float) -> str:
    """Formats a duration: 1.23 s, 45.6 ms, 120 µs."""
    for limit, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= limit:
            return f"{three_digits(value / limit)} {unit}"
    return "0 s"
