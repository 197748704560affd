"""Evaluation and samples between two steps, and those that a failure has interrupted."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist

from raypp.observe.reader import RunReader
from raypp.pipeline.device_clock import device_marks
from raypp.records import Reporter
from raypp.storage import ObjectStore
from raypp.torch_private import run_step_pre_hooks
from raypp.train.assemble import AssembledRank
from raypp.train.evaluate import Evaluator, evaluation_due
from raypp.train.sample import Sampler, sample_due
from raypp.train.step import StepRunner


class BetweenSteps:
    """Evaluates the weights and takes samples of them, after the steps where the job wants it.

    Args:
        rank: This rank.
        runner: The step runner of this rank.
        store: Opened at the job's checkpoint.url; the run's records are there.
        reporter: Takes the results.

    Raises:
        JobError: See `Sampler`.
        DataError: See `Sampler`.
    """

    def __init__(self, rank: AssembledRank, runner: StepRunner, store: ObjectStore, reporter: Reporter) -> None:
        self._job, self._seat, self._store, self._reporter = rank.job, rank.seat, store, reporter
        self._outer, self._hold = rank.outer, partial(run_step_pre_hooks, rank.optimizer)
        self._evaluator = self._sampler = None
        self._interrupted = 0
        if self._job.train.eval_every_steps:
            self._evaluator = Evaluator(runner, device_marks(reporter.phase, "evaluate", rank.device))
        if self._job.train.sample is not None:
            self._sampler = Sampler(rank, lambda token: reporter.phase("sample", token))

    def run(self, step: int) -> None:
        """Does what is due after a step. Collective over the world."""
        self._run(step, evaluates=True, samples=True)

    def resume(self, step: int) -> None:
        """Tells that the attempt begins with the checkpoint of a step."""
        self._interrupted = step

    def make_up(self) -> None:
        """Does what is due after the resumed step and not in the run's records, once.

        Collective over the world. A checkpoint may be committed before the evaluation of its step
        ends, so an attempt that resumes from it does not repeat the step.

        Raises:
            StoreError: The store does not answer.
        """
        step, self._interrupted = self._interrupted, 0
        if not step or not (evaluation_due(step, self._job) or sample_due(step, self._job)):
            return
        missing = torch.ones(2, dtype=torch.int64)
        if self._seat.rank == 0:
            there = {event.kind for event in RunReader(self._store, self._job.name).events() if event.step == step}
            missing = torch.tensor([kind not in there for kind in ("evaluated", "sampled")], dtype=torch.int64)
        dist.broadcast(missing, src=0)
        evaluates, samples = missing.tolist()
        self._run(step, evaluates=bool(evaluates), samples=bool(samples))

    def _run(self, step: int, *, evaluates: bool, samples: bool) -> None:
        evaluator = self._evaluator if evaluates and evaluation_due(step, self._job) else None
        sampler = self._sampler if samples and sample_due(step, self._job) else None
        if evaluator is None and sampler is None:
            return
        with self._outer.agreed_in_place(self._hold) if self._outer is not None else nullcontext():
            if evaluator is not None:
                evaluation = evaluator.run()
                if self._seat.rank == 0:
                    self._reporter.event(evaluation.event(step, self._seat.attempt))
            if sampler is not None:
                sampled = sampler.run(step, self._seat.attempt)
                if self._seat.rank == 0:
                    self._reporter.event(sampled)
