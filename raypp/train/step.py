"""One optimizer step, from rows to updated weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from raypp.data.loader import Loader
from raypp.data.packing import Row
from raypp.parallel.rank_groups import RankGroups
from raypp.pipeline.agreement import StepPlan, agree_on_step, padded_length
from raypp.pipeline.collate import StageBatch, collate, labelled_tokens, longest_row, rows_digest
from raypp.records import Event, Requests, Seat, StepReport
from raypp.spec.job import Job
from raypp.train.build import BuiltStages
from raypp.train.fault_injection import Injection
from raypp.train.nonfinite import FiniteGuard
from raypp.train.optimizer import learning_rate, set_learning_rate
from raypp.train.reduce import GlobalSums, GradientReducer, coefficient, scale
from raypp.train.replicas import ReplicaCheck
from raypp.train.router_losses import RouterLosses
from raypp.train.stragglers import Pace
from raypp.train.tune_lookahead import LookaheadTuner, chosen_event


@dataclass
class Stopwatch:
    """Seconds of a step, by part."""

    parts: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class ReadStep:
    """A step that is read and agreed on, but not yet run."""

    microbatches: list[tuple[Row, ...]]
    plan: StepPlan


class StepRunner:
    """Runs steps of a job on this rank.

    Args:
        job: The job.
        seat: This rank's seat.
        groups: Its process groups.
        built: Its stages and their runtime.
        loader: Its replica's rows.
        optimizer: Over the parameters of its stages.
        reducer: Over the same parameters.
        device: Where it computes.
    """

    def __init__(
        self,
        job: Job,
        seat: Seat,
        groups: RankGroups,
        built: BuiltStages,
        loader: Loader,
        optimizer: torch.optim.Optimizer,
        reducer: GradientReducer,
        device: torch.device,
    ) -> None:
        self.job, self.seat, self.built, self.loader = job, seat, built, loader
        self.optimizer, self.reducer, self.device = optimizer, reducer, device
        self.router_losses = RouterLosses(built.modules, job.model)
        self.tell: Callable[[Event], None] = lambda event: None  # replaced on the rank that speaks for all
        self.lookahead: LookaheadTuner | None = None
        if job.pipeline.lookahead == "auto" and job.mesh.pp > 1:
            self.lookahead = LookaheadTuner(job, seat, groups, built.runtime, device)
        self.guard = FiniteGuard(job, seat, built.modules, built.runtime, reducer.names)
        self.pace: Pace | None = None
        self.injection: Injection | None = None
        self.replicas: ReplicaCheck | None = None
        # Agreed on once per step: whether this rank's saver is busy, and the memory tier's numbers. Replaced by theirs.
        self.saving: Callable[[], bool] = lambda: False
        self.signals: Callable[[], tuple[int, ...]] = lambda: ()
        self.share = groups.context_share(job.mesh.cp_style)
        self.replica = groups.coordinates.dp_replicate * job.mesh.fsdp + groups.coordinates.fsdp

    def read(self, requests: Requests, watch: Stopwatch) -> ReadStep:
        """Reads the next rows and agrees on them. Collective over the world."""
        with watch.part("data"):
            microbatches = [tuple(microbatch.rows) for microbatch in self.loader.next_step()]
        own = self.pace.before_step() if self.pace is not None else ()
        read = self.agree(microbatches, requests, watch, own)
        if self.pace is not None:
            self.pace.agreed(read.plan.signals[len(read.plan.signals) - len(own) :], self.tell)
        return read

    def agree(
        self,
        microbatches: list[tuple[Row, ...]],
        requests: Requests,
        watch: Stopwatch,
        more: tuple[int, ...] = (),
    ) -> ReadStep:
        """Agrees with the other ranks on rows that each has read. Collective over the world."""
        rows = [row for microbatch in microbatches for row in microbatch]
        self._mark("agree")
        with watch.part("negotiate"):
            plan = agree_on_step(
                self._lengths(microbatches),
                sum(labelled_tokens(microbatch) for microbatch in microbatches),
                rows_digest(rows),
                requests,
                replica=self.replica,
                replicas=self.job.mesh.replicas,
                saving=self.saving(),
                signals=(*self.signals(), *more),
            )
        return ReadStep(microbatches, plan)

    def _lengths(self, microbatches: list[tuple[Row, ...]]) -> list[int]:
        """What this rank proposes as the length of each microbatch, by pipeline.variable_seq_len."""
        mode, pipeline = self.job.pipeline.variable_seq_len, self.job.pipeline
        longest = [longest_row(rows) for rows in microbatches]
        if mode == "off":
            longest = [self.job.data.seq_len] * len(longest)
        elif mode == "step":
            longest = [max(longest)] * len(longest)
        return [
            padded_length(n, cp=self.job.mesh.cp, multiple=pipeline.pad_to_multiple_of, bucket=pipeline.seq_len_bucket)
            for n in longest
        ]

    def batches(self, read: ReadStep) -> list[StageBatch]:
        """This rank's share of every microbatch, on its device."""
        return [
            collate(rows, length, self.device, self.share)
            for rows, length in zip(read.microbatches, read.plan.seq_lens, strict=True)
        ]

    def own_lengths(self, read: ReadStep) -> list[int]:
        """Tokens of each row that this rank has, of every microbatch."""
        return [length // self.share.size for length in read.plan.seq_lens]

    def run(self, step: int, read: ReadStep, watch: Stopwatch) -> StepReport:
        """Runs a step that was read, and updates the weights. Collective over the world.

        Args:
            step: Its number, 1-based.
            read: From `read`.
        """
        # A function of seed, step and replica: stages that draw random numbers resume without saved state, and the
        # ranks of one replica draw alike.
        torch.manual_seed((self.job.train.seed * 1_000_003 + step) * 65_537 + self.replica)
        self._mark("prepare")
        with watch.part("data"):
            batches = self.batches(read)
        if self.lookahead is not None:
            with watch.part("lookahead"):
                choice = self.lookahead.before_step(self.own_lengths(read))
            if choice is not None:
                self.tell(chosen_event(choice, step, self.seat.attempt))
        with watch.part("pipeline"):
            losses = self._compute(step, read, batches)
        with watch.part("reduce"):
            loss_sum = float(torch.stack(losses).double().sum()) if losses else 0.0
            if self.built.tied is not None:
                self._mark("tie")
                self.built.tied.sum_gradients()
            gradients = self.reducer.gradients()
            if self.injection is not None:
                self.injection.gradients(gradients)
            self._mark("sum")
            sent = torch.tensor([self.built.runtime.sent_bytes], dtype=torch.float64)
            sums = self.reducer.sums(gradients, loss_sum, torch.cat((self.router_losses.take(), sent)))
        rate = learning_rate(step, self.job.train)
        self._mark("update")
        with watch.part("optimizer"):
            if self.guard.fine(sums):
                self._update(gradients, sums, read.plan.global_tokens, rate)
            else:
                self.optimizer.zero_grad(set_to_none=True)
                self.guard.met(step, sums, lambda: self._again(step, read, batches), self.tell)
                self.optimizer.zero_grad(set_to_none=True)
        if self.injection is not None:
            self.injection.updated(self.built.modules)
        return self._report(step, read.plan, sums, rate, watch)

    def _compute(self, step: int, read: ReadStep, batches: list[StageBatch]) -> list[torch.Tensor]:
        """The step's forwards and backwards."""
        clock = self.pace.clock if self.pace is not None else None
        if clock is not None and self.built.runtime.clock is None:
            self.built.runtime.clock = clock
        losses = self.built.runtime.run(
            self.job.train.micro_batch_size,
            self.own_lengths(read),
            [batch.tokens_BT for batch in batches],
            [batch.stage_arguments() for batch in batches],
            [batch.labels_BT for batch in batches],
            step,
        )
        if self.built.runtime.clock is clock:
            self.built.runtime.clock = None
        return losses

    def _again(self, step: int, read: ReadStep, batches: list[StageBatch]) -> None:
        """Computes a step once more, from the same numbers."""
        torch.manual_seed((self.job.train.seed * 1_000_003 + step) * 65_537 + self.replica)
        self._compute(step, read, batches)
        if self.built.tied is not None:
            self.built.tied.sum_gradients()  # which also empties what it gathered
        self.router_losses.take()

    def _mark(self, what: str) -> None:
        """Says what this rank does next, in the words of `raypp.recovery.hang_analysis`."""
        if self.built.runtime.mark is not None:
            self.built.runtime.mark(what)

    def _update(self, gradients: list[torch.Tensor], sums: GlobalSums, tokens: int, rate: float) -> None:
        if tokens:
            scale(gradients, coefficient(sums.grad_norm, tokens, self.job.train.clip_norm))
            set_learning_rate(self.optimizer, rate)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _report(self, step: int, plan: StepPlan, sums: GlobalSums, rate: float, watch: Stopwatch) -> StepReport:
        seconds = sum(watch.parts.values())
        return StepReport(
            step=step,
            loss=sums.loss / plan.global_tokens if plan.global_tokens else 0.0,
            grad_norm=sums.grad_norm / plan.global_tokens if plan.global_tokens else 0.0,
            tokens=plan.global_tokens,
            seq_len=max(plan.seq_lens),
            step_s=seconds,
            tokens_per_s=plan.global_tokens / seconds,
            attempt=self.seat.attempt,
            lr=rate,
            parts_s=dict(watch.parts),
            extras=self.router_losses.report(sums.extra[:-1], plan.global_tokens),
            wire_bytes=int(sums.extra[-1]),
            compressed=self.job.pipeline.wire.compresses,
        )
