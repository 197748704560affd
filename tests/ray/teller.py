"""Ranks that only report: each sends an event and a line of output 20 times a second until the file
`finish` exists.

The ranks share a directory (`STAND_IN_DIR` in `resources.env`). At the end, each writes the number
of its reports there.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from raypp.planning.decision import Decision
from raypp.records import Event, RankResult, Reporter, Seat, StepReport

_STEP_S = 0.05


def run_rank(_decision: Decision, seat: Seat, reporter: Reporter) -> RankResult:
    place = Path(os.environ["STAND_IN_DIR"])
    place.mkdir(parents=True, exist_ok=True)
    step = 0
    while not (place / "finish").exists() and not reporter.requests().stop:
        step += 1
        reporter.phase("step", str(step))
        reporter.event(Event("told", f"{seat.rank} tells {step}", attempt=seat.attempt, rank=seat.rank))
        print(f"line {step}", flush=True)
        if seat.rank == 0:
            reporter.step(StepReport(step, 1.0 / step, 1.0, 10, 10, _STEP_S, 10 / _STEP_S, seat.attempt))
        time.sleep(_STEP_S)
    (place / f"told-{seat.rank}").write_text(str(step))
    return RankResult(seat.rank, step, False, None)
