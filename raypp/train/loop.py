"""The training loop. All ranks run it in step, and act on a request between the same two steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raypp.checkpoint.save import CheckpointSaver
from raypp.checkpoint.snapshot import Snapshot
from raypp.checkpoint.state import Slice, state_in_objects
from raypp.memory.tier import MemoryTier
from raypp.pipeline.agreement import StepPlan
from raypp.records import Event, EventKind, RankResult, Reporter, StepReport
from raypp.spec.job import Job
from raypp.train.between_steps import BetweenSteps
from raypp.train.due import Due, Place, after_step, before_step
from raypp.train.recent_reports import RecentReports
from raypp.train.replica_reports import ReplicaReports
from raypp.train.replicas import ReplicaCheck
from raypp.train.step import StepRunner, Stopwatch
from raypp.train.step_trace import StepTracer
from raypp.train.stragglers import SpikeWatch


def train(run: Training, restored: int, start: Stopwatch) -> RankResult:
    """Trains from the restored step to the last one, or until the operator requests a stop. `start`
    holds what took how long before."""
    place, due, watch = run.place(restored), Due(), Stopwatch(run.runner.device)
    position = run.runner.loader.position()
    run.report_again()
    if run.together and 0 < restored == place.saved:  # snapshots are taken after all that is due, checkpoints before
        run.between.resume(restored)
    while place.done < run.job.train.steps:
        watch.next_step()
        run.reporter.phase("step", f"{place.done + 1} read")
        savable = run.together if place.done == restored else run.job.savable(place.done)
        everyone = savable or run.job.savable(place.done + 1)
        read = run.runner.read(place.requests(run.reporter.requests()), watch, everyone=everyone)
        run.keep_snapshot(place.done, position, read.plan, watch)
        place, due = before_step(place, read.plan.requests, savable=savable, everyone=everyone)
        if due.save:
            run.save(place.done, position)
        if due.stop:
            run.tracer.finish()
            break
        run.between.make_up()
        if due.trace:
            run.tracer.begin(place.done + 1, due.trace)
        own = run.runner.run(place.done + 1, read, watch)
        reports = run.note(own)
        place, due = after_step(place, run.job, read.plan.saving)
        position = run.runner.loader.position()
        if due.skip:
            run.saver.skip(place.done)
        if due.save:
            with watch.part("save"):
                run.save(place.done, position)
        run.tracer.step_ended(place.done, watch, last=due.last)
        run.report(own, reports, watch, start if place.done == restored + 1 else None)
        run.between.run(place.done)
    if place.unsaved and not due.stop:  # no step was left after what came from memory
        run.save(place.done, position)
    if not due.stop:
        run.between.make_up()
    run.reporter.phase("finish")
    committed = run.saver.finish() if due.save_is_needed else run.saver.wait()
    return RankResult(rank=run.runner.seat.rank, step=place.done, stopped=due.stop, checkpoint_step=committed)


@dataclass(frozen=True)
class Training:
    """What the loop of one rank works with.

    `together`: Whether all replicas begin after the same step, between which they had agreed.
    """

    job: Job
    reporter: Reporter
    runner: StepRunner
    tracer: StepTracer
    replicas: ReplicaCheck | None
    between: BetweenSteps
    saver: CheckpointSaver
    tier: MemoryTier | None
    recent: RecentReports
    spikes: SpikeWatch
    gathered: ReplicaReports | None = None
    together: bool = True

    def place(self, restored: int) -> Place:
        """Returns where an attempt begins. What came from memory is in no checkpoint yet."""
        saved = restored if self.tier is None else min(restored, max(self.tier.committed, 0))
        return Place(restored, restored, saved)

    def keep_snapshot(self, done: int, position: dict[str, Any], plan: StepPlan, watch: Stopwatch) -> None:
        """Takes a snapshot in memory if one is due."""
        if self.tier is None or plan.snapshots is None:
            return
        tier, known = self.tier, self.saver.committed
        with watch.part("memory"):
            tier.committed = max(tier.committed, -1 if known is None else known)
            may = self.runner.outer is None or self.runner.outer.quiet
            tier.step_begins(done, plan.snapshots, self._state, lambda: self._extra(position), plan.saving, may=may)

    def save(self, step: int, position: dict[str, Any]) -> None:
        """Begins a save, after a check of the weights that several ranks hold."""
        if self.replicas is not None:
            self.reporter.phase("step", "replicas")
            self.replicas.run()
        self.reporter.phase("save", f"step {step}")
        extra = {**self._small(position), "recent_steps": self.recent.document()}
        tier, runner = self.tier, self.runner

        def pin() -> Snapshot | None:
            return None if tier is None else tier.pin(step, self._state, lambda: self._extra(position))

        self.saver.save(step, runner.built.modules, runner.optimizer, extra, pin)

    def note(self, own: StepReport) -> list[StepReport]:
        """Keeps reports for checkpoints, and tells when a loss is unusual.

        Returns:
            This step's report; if replicas train apart, those of steps that all have done.
        """
        reports = [own]
        if self.runner.outer is not None:
            self.recent.own.add(own)
        if self.gathered is not None:
            kept = (-1, -1) if self.tier is None else self.tier.kept(own.step)
            reports = self.gathered.add(own, wait=self.job.all_meet(own.step), kept=kept)  # there the run may stop
            if self.tier is not None:
                for of_all in self.gathered.kept:
                    self.tier.hear(of_all)
        if self.job.savable(own.step):
            self.recent.own.clear()  # all replicas have done these steps
        return self._new(reports)

    def report_again(self) -> None:
        """Reports what this replica has done since the last outer step, in case others have not."""
        for own in list(self.recent.own):
            reports = [own] if self.gathered is None else self.gathered.add(own, wait=False)
            for report in self._new(reports):
                if self.runner.seat.rank == 0:
                    self.reporter.step(report)

    def _new(self, reports: Sequence[StepReport]) -> list[StepReport]:
        """Keeps reports of steps that had none; returns them."""
        reports = [report for report in reports if report.step > self.recent.newest]
        for report in reports:
            usual = self.spikes.seen(report.loss)
            if usual is not None:
                ratio = report.loss / usual
                words = f"the loss is {report.loss:.4f}, {ratio:.1f} times the recent median ({usual:.4f})"
                self._tell("loss_spike", words, report.step)
            self.recent.add(report)
        return list(reports)

    def report(self, own: StepReport, reports: Sequence[StepReport], watch: Stopwatch, start: Stopwatch | None) -> None:
        """Reports steps on rank 0, and after the first one how long the start took."""
        if self.runner.seat.rank:
            return
        own.parts_s.update(watch.parts)
        for report in reports:
            self.reporter.step(report)
        if start is not None:
            seconds = {name: round(value, 4) for name, value in start.parts.items()}
            seconds["first step"] = round(own.step_s, 4)
            self._tell("first_step", f"step {own.step} done", own.step, seconds=seconds)

    def _state(self) -> tuple[list[Slice], list[Slice]]:
        runner = self.runner
        return state_in_objects(runner.built.modules, runner.optimizer, runner.seat.coordinates)

    def _extra(self, position: dict[str, Any]) -> str:
        """Returns what a snapshot in memory also holds; only rank 0 has the reports, and the first
        rank of each replica that trains apart."""
        reports, own = "[]", "[]"
        if self.gathered is not None or not self.runner.seat.rank:
            reports, own = self.recent.json_text(), self.recent.own.json_text()
        return f'{json.dumps(self._small(position))[:-1]},"recent_steps":{reports},"own_steps":{own}}}'

    def _small(self, position: dict[str, Any]) -> dict[str, Any]:
        """Returns what is saved beside tensors and reports, the same on all ranks."""
        outer = self.runner.outer
        return {"data_position": position, **({} if outer is None else {"outer_tokens": outer.tokens})}

    def _tell(self, kind: EventKind, message: str, step: int, **details: Any) -> None:
        seat = self.runner.seat
        if seat.rank == 0:
            self.reporter.event(Event(kind, message, attempt=seat.attempt, step=step, details=details))
