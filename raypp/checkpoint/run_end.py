"""How a submission of a run ended: one object, created once.

A run has ended if the newest of its specs has such an object. Nothing of it runs any more then, and
its devices are free.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from raypp.checkpoint.layout import end_key
from raypp.checkpoint.run_spec import newest_number
from raypp.errors import CheckpointError
from raypp.records import RunState
from raypp.storage import AlreadyExists, NotFound, ObjectStore
from raypp.untrusted.documents import Bounds, Count, Time, parse_as

_BOUNDS = Bounds()


@dataclass(frozen=True)
class RunEnd:
    """How a submission ended.

    Attributes:
        run: The run's name.
        state: SUCCEEDED, FAILED or STOPPED.
        exit_code: What its commands exit with.
        step: The last finished step.
        checkpoint: URL/NAME/step-N of the newest commit; None if there is none.
        reason: Why it failed, or what else its owner should know; "" if nothing.
        attempt: The last attempt; 0 if there was none.
        time: Seconds since 1970.
    """

    run: str
    state: RunState
    exit_code: Count
    step: Count = 0
    checkpoint: str | None = None
    reason: str = ""
    attempt: Count = 0
    time: Time = field(default_factory=time.time)

    def in_status(self, status: dict[str, Any]) -> dict[str, Any]:
        """Returns the last status that was written, as it is since the end."""
        known = {"step": self.step, "checkpoint": self.checkpoint} if self.attempt else {}
        error = self.reason if self.state is RunState.FAILED else None
        ranks = [{**rank, "state": "done" if rank["state"] == "running" else rank["state"]} for rank in status["ranks"]]
        return {**status, **known, "state": str(self.state), "error": error, "ranks": ranks}


def write_end(store: ObjectStore, end: RunEnd, number: int) -> RunEnd:
    """Creates the object of the submission with this spec.

    Returns:
        The end that counts: the given one, or the one that somebody created earlier.

    Raises:
        CheckpointError: There is one, and it cannot be read.
    """
    key = end_key(end.run, number)
    try:
        store.put(key, json.dumps(asdict(end), indent=1).encode(), if_absent=True)
        return end
    except AlreadyExists:
        return _read(store, key) or end


def read_end(store: ObjectStore, run: str, number: int | None = None) -> RunEnd | None:
    """Returns how a submission ended; None if it has not.

    Args:
        number: Of its spec; None: the newest.

    Raises:
        CheckpointError: The object is damaged; names it.
    """
    return _read(store, end_key(run, newest_number(store, run) if number is None else number))


def _read(store: ObjectStore, key: str) -> RunEnd | None:
    try:
        data = store.get(key, 0, _BOUNDS.size + 1)
    except NotFound:
        return None
    fix = "check whether another program wrote it; delete it to let raypp look at the run's records only"
    place = f"{store.url}/{key}"
    return parse_as(RunEnd, data, place, _BOUNDS, CheckpointError, fix, kind="a run's end", unknown="ignore")
