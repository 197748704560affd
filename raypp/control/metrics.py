"""Publishes a run's figures as Ray metrics; Ray exports them on each node's metrics port with the
prefix `ray_`."""

from __future__ import annotations

from ray.util.metrics import Gauge

from raypp.observe import quantities as names
from raypp.observe.status import ENDED, RunStatus
from raypp.records import RunState, StepReport


class RunGauges:
    """The gauges of one run, set by its controller."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._parts: set[str] = set()
        self._gauges = {metric.name: Gauge(metric.name, metric.help, metric.tags) for metric in names.METRICS}

    def step(self, report: StepReport) -> None:
        """Sets the gauges of a step."""
        for one in names.QUANTITIES:
            if one.gauge is not None:
                self._set(one.gauge, getattr(report, one.name))
        for one in names.EXTRAS:
            if one.gauge is not None and one.name in report.extras:
                self._set(one.gauge, report.extras[one.name])
        self._parts |= report.parts_s.keys()
        for part in self._parts:  # a part that this step lacks, such as a save, took no time
            self._set(names.STEP_PART_SECONDS, report.parts_s.get(part, 0.0), part=part)

    def status(self, status: RunStatus, committed_step: int | None) -> None:
        """Sets the gauges of the run's status."""
        self._set(names.STEPS, status.steps)
        self._set(names.ATTEMPT, status.attempt)
        self._set(names.RESTARTS, status.restarts)
        self._set(names.CHECKPOINT_STEP, committed_step or 0)
        self._set(names.RANKS_ALIVE, sum(rank.state not in ENDED for rank in status.ranks))
        for state in RunState:
            self._set(names.STATE, float(state is status.state), state=str(state))

    def _set(self, metric: names.Metric, value: float, **tags: str) -> None:
        self._gauges[metric.name].set(value, tags={"run": self._run, **tags})
