"""Evaluation and samples between two steps, and those that a failure has interrupted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import compress

import torch
import torch.distributed as dist

from raypp.rank.assemble import AssembledRank
from raypp.rank.step.due import is_due
from raypp.rank.step.evaluate import Evaluator
from raypp.rank.step.step import StepRunner
from raypp.records import Event, EventKind, Reporter
from raypp.stages.pipeline.device_clock import device_marks
from raypp.storage import ObjectStore
from raypp.torch_private import run_step_pre_hooks


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
