"""The training loop. All ranks run it in step, and act on a request between the same two steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from raypp.job.job import Job
from raypp.planning.geometry import Mesh
from raypp.rank.assemble import AssembledRank
from raypp.rank.joining.process_group import leave_together
from raypp.rank.step.evaluate import Evaluator
from raypp.rank.step.replicas import ReplicaCheck
from raypp.rank.step.reports import RecentReports, ReplicaReports
from raypp.rank.step.step import ReadStep, StepRunner, Stopwatch
from raypp.rank.step.stragglers import Pace, SpikeWatch
from raypp.records import Coordinates, Event, EventKind, RankResult, Reporter, Requests, SaveProgress, StepReport
from raypp.stages.models.stage import parameter_names
from raypp.stages.pipeline.device_clock import device_marks
from raypp.state.checkpoint.save import CheckpointSaver
from raypp.state.checkpoint.state import Slice, state_in_objects
from raypp.state.memory.tier import MemoryTier
from raypp.storage import ObjectStore
from raypp.torch_private import run_step_pre_hooks

if TYPE_CHECKING:
    from raypp.rank.fault_injection import Injection
    from raypp.rank.step.step_trace import StepTracer


def train(run: Training, start: Stopwatch) -> RankResult:
    """Trains from the restored step to the last one, or until the operator requests a stop."""
    place, due, watch = run.begin(), Due(), Stopwatch(run.runner.device)
    while place.done < run.job.train.steps:
        read, place, due = run.read(place, watch)
        if due.save:
            run.save(place.done)
        if due.stop:
            break
        run.between.make_up()
        if due.trace:
            run.trace(place.done + 1, due.trace)
        report = run.runner.run(place.done + 1, read, watch)
        reports = run.note(report)
        place, due = after_step(place, run.job, read.plan.saving)
        if due.skip:
            run.saver.skip(place.done)
        if due.save:
            with watch.part("save"):
                run.save(place.done)
        if run.tracer is not None:
            run.tracer.step_ended(place.done, watch, last=due.last)
        run.report(report, reports, watch, start)
        run.between.run(place.done)
    return run.end(place, due)


@dataclass(frozen=True)
class Restored:
    """What an attempt's state came from, and where it goes. `store`: opened at the job's
    checkpoint.url. `tier`: takes snapshots in memory; None if the job wants none. `together`:
    whether all replicas begin after the same step, at which they agree."""

    store: ObjectStore
    saver: CheckpointSaver
    tier: MemoryTier | None
    recent: RecentReports
    step: int
    together: bool

    @property
    def place(self) -> Place:
        """Where the attempt begins. What came from memory is in no checkpoint yet."""
        saved = self.step if self.tier is None else min(self.step, max(self.tier.committed, 0))
        return Place(self.step, self.step, saved)


class Training:
    """What the loop of one rank works with. Building it is collective over the world."""

    def __init__(
        self, rank: AssembledRank, restored: Restored, reporter: Reporter, injection: Injection | None
    ) -> None:
        self.job, self._seat, self._reporter, self._restored = rank.job, rank.seat, reporter, restored
        self.saver, self._tier, self._recent = restored.saver, restored.tier, restored.recent
        first = replace(rank.groups.coordinates, dp_replicate=0) == Coordinates()
        leads = self._seat.rank == 0 or (first and rank.outer is not None)
        timed = self.job.recovery.straggler_factor and self._seat.world_size > 1
        self.runner = StepRunner(
            rank,
            tell=reporter.event if leads else lambda event: None,
            saving=lambda: self.saver.progress,
            snapshots=self._tier.signals if self._tier is not None else None,
            pace=Pace(rank, restored.step) if timed else None,
            injection=injection,
        )
        self.tracer: StepTracer | None = None
        self._replicas = None
        tied_apart = self.job.model.tie_embeddings and self.job.mesh.pp > 1
        if self.job.recovery.check_replicas and (self.job.mesh.dp_replicate > 1 or tied_apart):
            names = parameter_names(self.job.model)
            self._replicas = ReplicaCheck(rank.built.modules, names, Mesh.of(self.job.mesh).labels())
            if rank.outer is not None:
                self._replicas.run()  # replicas far apart may have read other stores
        place = restored.place
        # Snapshots are taken after all that is due, checkpoints before.
        resumed = restored.step if restored.together and restored.step == place.saved else 0
        self.between = BetweenSteps(rank, self.runner, restored.store, reporter, resumed, self.saver.eval_losses)
        watched = self.job.recovery.on_spike == "continue"  # else the guard does
        self._spikes = SpikeWatch(self.job.recovery.spike_factor if watched else None)
        self.runner.guard.spikes.losses.extend(self._recent.losses)
        self.runner.loss_scale.restore(self._recent.loss_scale)
        self._gathered = None
        if rank.outer is not None and rank.outer.replicas > 1 and leads:
            self._gathered = ReplicaReports(rank.groups.mesh["dp_replicate"].get_group())
        self._position = rank.loader.position()

    def begin(self) -> Place:
        """Returns where the attempt begins. Reports this replica's steps since the outer one."""
        for own in list(self._recent.own):
            reports = [own] if self._gathered is None else self._gathered.add(own, wait=False)
            self._tell_steps(self._new(reports))
        return self._restored.place

    def read(self, place: Place, watch: Stopwatch) -> tuple[ReadStep, Place, Due]:
        """Reads the next step's rows, agrees with other ranks on them and on requests, and takes a
        snapshot if due. Returns the rows; the place, and what is due before the step."""
        watch.next_step()
        self._reporter.phase("step", f"{place.done + 1} read")
        savable = self._restored.together if place.done == place.restored else self.job.savable(place.done)
        everyone = savable or self.job.savable(place.done + 1)
        read = self.runner.read(place.requests(self._reporter.requests()), watch, everyone=everyone)
        tier, plan = self._tier, read.plan
        if tier is not None and plan.snapshots is not None:
            with watch.part("memory"):
                tier.committed = max(tier.committed, -1 if self.saver.committed is None else self.saver.committed)
                keepable = self.runner.outer is None or self.runner.outer.quiet
                tier.step_begins(place.done, plan.snapshots, self._state, self._extra, bool(plan.saving), may=keepable)
        return read, *before_step(place, plan.requests, savable=savable, everyone=everyone)

    def trace(self, step: int, steps: int) -> None:
        """Traces steps from this one on, whose rows have been read. Collective over the world."""
        if self.tracer is None:
            from raypp.rank.step.step_trace import StepTracer

            self.tracer = StepTracer(self.runner, self._restored.store, self._reporter.event)
        self.tracer.begin(step, steps)

    def close(self) -> None:
        """Waits until what was traced is in the store, if that does not take long."""
        if self.tracer is not None:
            self.tracer.close()

    def save(self, step: int) -> None:
        """Begins a save, after a check of the weights that several ranks hold."""
        if self._replicas is not None:
            self._reporter.phase("step", "replicas")
            self._replicas.run()
        self._reporter.phase("save", f"step {step}")
        extra = {**self._small(), "recent_steps": self._recent.document()}
        pin = (lambda: None) if self._tier is None else partial(self._tier.pin, step, self._state, self._extra)
        self.saver.save(step, self.runner.built.modules, self.runner.optimizer, extra, pin)

    def note(self, own: StepReport) -> list[StepReport]:
        """Keeps reports for checkpoints, and tells when a loss is unusual. Returns this step's
        report; if replicas train apart, those of steps that all have done."""
        self._position = self.runner.loader.position()
        reports = [own]
        if self.runner.outer is not None:
            self._recent.own.add(own)
        if self._gathered is not None:
            kept = (-1, -1) if self._tier is None else self._tier.kept(own.step)
            reports = self._gathered.add(own, wait=self.job.all_meet(own.step), kept=kept)  # there the run may stop
            if self._tier is not None:
                for of_all in self._gathered.kept:
                    self._tier.hear(of_all)
        if self.job.savable(own.step):
            self._recent.own.clear()  # all replicas have done these steps
        return self._new(reports)

    def report(self, own: StepReport, reports: Sequence[StepReport], watch: Stopwatch, start: Stopwatch) -> None:
        """Reports steps on rank 0, and after the first one how long the start took."""
        own.parts_s.update(watch.parts)
        self._tell_steps(reports)
        if own.step == self._restored.step + 1:
            seconds = {name: round(value, 4) for name, value in start.parts.items()}
            seconds["first step"] = round(own.step_s, 4)
            self._tell("first_step", f"step {own.step} done", own.step, seconds=seconds)

    def end(self, place: Place, due: Due) -> RankResult:
        """Ends the attempt after its last step, or where the operator stops it. Raises
        NotSavedError: the last state could not be saved, and the operator did not give it up."""
        if self.tracer is not None:
            self.tracer.finish()
        if not due.stop:
            if place.unsaved:  # no step was left after what came from memory
                self.save(place.done)
            self.between.make_up()
        self._reporter.phase("finish")
        try:
            committed = self.saver.finish() if due.save_is_needed else self.saver.wait()
        finally:
            leave_together(self._seat)
        return RankResult(rank=self._seat.rank, step=place.done, stopped=due.stop, checkpoint_step=committed)

    def _new(self, reports: Sequence[StepReport]) -> list[StepReport]:
        """Keeps reports of steps that had none; returns them."""
        reports = [report for report in reports if report.step > self._recent.newest]
        for report in reports:
            usual = self._spikes.seen(report.loss)
            if usual is not None:
                self._tell("loss_spike", SpikeWatch.words(report.loss, usual), report.step)
            self._recent.add(report)
        return reports

    def _state(self) -> tuple[list[Slice], list[Slice]]:
        return state_in_objects(self.runner.built.modules, self.runner.optimizer, self._seat.coordinates)

    def _extra(self) -> str:
        """Returns what a snapshot in memory also holds, as JSON. Only rank 0 has the reports; where
        replicas train apart, the first rank of each."""
        reports, own = "[]", "[]"
        if self._gathered is not None or not self._seat.rank:
            reports, own = self._recent.json_text(), self._recent.own.json_text()
        return f'{json.dumps(self._small())[:-1]},"recent_steps":{reports},"own_steps":{own}}}'

    def _small(self) -> dict[str, Any]:
        """Returns what is saved beside tensors and reports, the same on all ranks."""
        outer = self.runner.outer
        small = {"data_position": self._position, **({} if outer is None else {"outer_tokens": outer.tokens})}
        spikes, scale = self.runner.guard.spikes, self.runner.loss_scale
        if scale.adapts:
            small["loss_scale"] = asdict(scale.state)
        return small | ({} if spikes.factor is None else {"losses": list(spikes.losses)})

    def _tell_steps(self, reports: Sequence[StepReport]) -> None:
        for report in reports if self._seat.rank == 0 else ():
            self._reporter.step(report)

    def _tell(self, kind: EventKind, message: str, step: int, **details: Any) -> None:
        if self._seat.rank == 0:
            event = Event(kind, message, attempt=self._seat.attempt, step=step, details=details)
            self._reporter.event(event)


class BetweenSteps:
    """Evaluates the weights and takes samples of them, after the steps where the job wants it.
    `resumed`: the step of the checkpoint that the attempt begins with; 0: it begins otherwise.
    `losses`: gets the loss of each evaluation by step, on rank 0."""

    def __init__(
        self,
        rank: AssembledRank,
        runner: StepRunner,
        store: ObjectStore,
        reporter: Reporter,
        resumed: int,
        losses: dict[int, float],
    ) -> None:
        self._losses = losses
        self._rank, self._store, self._reporter, self._interrupted = rank, store, reporter, resumed
        self._every: dict[EventKind, int] = {}
        self._run: dict[EventKind, Callable[[int], Event]] = {}
        train, attempt = rank.job.train, rank.seat.attempt
        if train.eval_every_steps:
            evaluator = Evaluator(runner, device_marks(reporter.phase, "evaluate", rank.device))
            self._every["evaluated"] = train.eval_every_steps
            self._run["evaluated"] = lambda step: evaluator.run().event(step, attempt)
        if train.sample is not None:
            from raypp.rank.step.sample import Sampler

            sampler = Sampler(rank, lambda token: reporter.phase("sample", token))
            self._every["sampled"] = train.sample.every_steps
            self._run["sampled"] = lambda step: sampler.run(step, attempt)

    def run(self, step: int) -> None:
        """Does what is due after a step. Collective over the world."""
        self._do(self._due(step), step)

    def make_up(self) -> None:
        """Does what is due after the resumed step and not in the run's records, once. Collective
        over the world. A checkpoint may be committed before the evaluation of its step ends, so an
        attempt that resumes from it does not repeat the step."""
        step, self._interrupted = self._interrupted, 0
        due = self._due(step) if step else []
        if not due:
            return
        missing = torch.ones(len(due), dtype=torch.int64)
        if self._rank.seat.rank == 0:
            from raypp.state.run_records.reader import RunReader  # no other rank reads records

            events = RunReader(self._store, self._rank.job.name).events()
            recorded = {event.kind for event in events if event.step == step}
            missing = torch.tensor([kind not in recorded for kind in due], dtype=torch.int64)
        dist.broadcast(missing, src=0)
        self._do(list(compress(due, missing.tolist())), step)

    def _due(self, step: int) -> list[EventKind]:
        return [kind for kind, every in self._every.items() if is_due(step, every, self._rank.job.train.steps)]

    def _do(self, kinds: Sequence[EventKind], step: int) -> None:
        if not kinds:
            return
        outer, hold = self._rank.outer, partial(run_step_pre_hooks, self._rank.optimizer)
        with outer.agreed_in_place(hold) if outer is not None else nullcontext():
            for kind in kinds:
                event = self._run[kind](step)
                if self._rank.seat.rank == 0:
                    if kind == "evaluated" and (loss := event.number("loss")) is not None:
                        self._losses[step] = loss
                    self._reporter.event(event)


@dataclass(frozen=True)
class Place:
    """Where a run is.

    Attributes:
        done: Number of completed optimizer steps.
        restored: The step that this attempt started from.
        saved: The newest step that is in a checkpoint, or was begun to be saved.
        asked: Whether the operator waits for a save.
        stopping: Whether the operator waits for a save and the end.
        trace: Number of steps that the operator waits to see traced.
    """

    done: int
    restored: int
    saved: int
    asked: bool = False
    stopping: bool = False
    trace: int = 0

    @property
    def unsaved(self) -> bool:
        return self.done > self.saved

    def requests(self, new: Requests) -> Requests:
        """Returns the operator's new requests and those that wait."""
        stop = new.stop or self.stopping
        return replace(new, save=new.save or self.asked, stop=stop, trace=max(new.trace, self.trace))


@dataclass(frozen=True)
class Due:
    """What happens between two steps, in this order.

    Attributes:
        save: The state is saved.
        skip: It would be, but the last save is still in progress (`checkpoint.if_busy: skip`).
        stop: The operator ends the attempt.
        last: The job's steps are done.
        save_is_needed: The attempt fails if its last save does.
    """

    save: bool = False
    skip: bool = False
    stop: bool = False
    last: bool = False
    save_is_needed: bool = True
    trace: int = 0


def before_step(place: Place, requests: Requests, *, savable: bool = True, everyone: bool = True) -> tuple[Place, Due]:
    """Returns what is due when the ranks have agreed on requests, and the place after it.

    A request to save a state that is saved is forgotten, but before the first step of an attempt it
    waits for that step. Where replicas differ, there is no state to save: requests wait for the
    next outer step, except one to stop without a save. `savable`: whether replicas hold the same
    weights. `everyone`: whether all ranks agreed; else those of one replica did, and requests wait.
    """
    if not everyone:
        return replace(place, asked=requests.save, trace=requests.trace), Due()
    if not savable and (requests.save_before_stop or not requests.stop):
        waiting = {"asked": place.asked or requests.save, "stopping": place.stopping or requests.stop}
        return replace(place, trace=0, **waiting), Due(trace=requests.trace)
    requests = replace(requests, stop=requests.stop or place.stopping)
    asked = (place.asked or requests.save) and (place.unsaved or place.done == place.restored)
    save = place.unsaved and (asked or (requests.stop and requests.save_before_stop))
    needed = not requests.stop or requests.save_before_stop
    due = Due(save=save, stop=requests.stop, save_is_needed=needed, trace=requests.trace)
    return replace(place, saved=place.done if save else place.saved, asked=asked and not save, trace=0), due


def after_step(place: Place, job: Job, saving: SaveProgress) -> tuple[Place, Due]:
    """Returns what is due after a step, and the place after it. `saving`: how far the last save was
    when the step began, on the rank where it is worst: all ranks agreed on it, so all leave out the
    same saves. None waits for a store that does not take the last one."""
    done, every = place.done + 1, job.checkpoint.every_steps
    last = done == job.train.steps
    save = last or bool(every and done % every == 0)
    stuck = saving is SaveProgress.STUCK
    skip = save and not last and not stuck and bool(saving) and job.checkpoint.if_busy == "skip"
    save = save and not skip and (last or not stuck)
    return replace(place, done=done, saved=done if save else place.saved), Due(save=save, skip=skip, last=last)


def is_due(step: int, every: int, steps: int) -> bool:
    """Whether something is due after a step: every so many steps and at the end."""
    return step % every == 0 or step == steps
