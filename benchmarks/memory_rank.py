"""Measures the peak resident memory of a rank under torchrun: `run_rank`, as workers call it."""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path
from typing import Any

from raypp.records import Event, Requests, StepReport
from raypp.spec.load import parse_job
from raypp.train.own_seat import seat_from_environment
from raypp.train.rank import run_rank


def resident(what: str) -> int:
    """Returns VmRSS (now) or VmHWM (the peak since `forget_peak`) of this process, in bytes."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def forget_peak() -> None:
    """Sets VmHWM to VmRSS (Linux, proc(5): writing 5 to clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


class PeakMeter:
    """Notes the resident memory before the model is built, and the peak of the steps after it.

    Args:
        steps: Steps to run. Then it requests a stop without a save.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._begun = 0
        self.before = self.peak = 0

    def phase(self, name: str, detail: str = "", reached: object = None) -> None:
        if name == "build":
            self.before = resident("VmRSS")
            forget_peak()
        if detail.endswith("read"):
            self._begun += 1
            self.peak = resident("VmHWM")

    def step(self, report: StepReport) -> None: ...

    def event(self, event: Event) -> None: ...

    def requests(self) -> Requests:
        return Requests(stop=self._begun > self._steps, save_before_stop=False)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True, help="the job, as JSON")
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    document: dict[str, Any] = json.loads(arguments.job)
    document["checkpoint"] = {"url": os.environ["BENCH_STORE"], "every_steps": 0, "memory_tier": False}
    job = parse_job(document)
    seat = seat_from_environment(job)
    meter = PeakMeter(arguments.steps)
    run_rank(job, seat, meter)
    figures = {"before": meter.before, "peak": meter.peak, "pp": seat.coordinates.pp}
    Path(f"{os.environ['BENCH_OUT']}.{seat.rank}").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
