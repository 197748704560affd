"""One optimizer step: from rows to updated weights.

Legend: B rows of a microbatch, t this rank's share of its tokens, P parameters, N extra numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from raypp.planning.decision import sent_bytes
from raypp.rank.assemble import AssembledRank
from raypp.rank.data.packing import Row
from raypp.rank.joining.device_memory import alloc_retries, peak_memory
from raypp.rank.optimizers.optimizer import begin_update
from raypp.rank.optimizers.reduce import GlobalSums, coefficient
from raypp.rank.step.collate import StageBatch, collate, labelled_tokens, longest_row, on_device, rows_digest
from raypp.rank.step.nonfinite import FiniteGuard, LossScale
from raypp.rank.step.stragglers import Pace
from raypp.rank.step.warm_up import RouterLosses, warm_up
from raypp.records import Event, Requests, SaveProgress, StepReport
from raypp.stages.models.adapter_dropout import StepKeys
from raypp.stages.parallel.tensor import sum_replicated
from raypp.stages.pipeline.agreement import SnapshotState, StepPlan, StepProposal, agree_on_step, padded_length
from raypp.stages.pipeline.device_clock import DeviceClock, Span

if TYPE_CHECKING:
    from raypp.rank.fault_injection import Injection
    from raypp.rank.step.tune_lookahead import LookaheadTuner

CPU = torch.device("cpu")
_AFTER_STEP = "save"
"""The part that `StepReport.step_s` does not contain."""


class Stopwatch:
    """Seconds of a step, by part, on the clock of a device. On a GPU, a part lasts until the device
    has done what was queued in it. Nothing waits for that: a part that has not ended when a step is
    reported (the update, a save) counts in the next one. `parts`: the seconds of this step's parts
    that are known. `spans`: this step's parts, in the order of their ends."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.parts: dict[str, float] = {}
        self.spans: list[tuple[str, Span]] = []
        self._clock = DeviceClock(device)
        self._open: list[tuple[str, Span]] = []

    def next_step(self) -> None:
        """Forgets the parts of the last step, except those that have not ended yet."""
        self.parts.clear()
        self.spans.clear()

    def part(self, name: str) -> AbstractContextManager[None]:
        """Times a block as part of `name`."""
        return self._clock.timed(lambda span: self._ended(name, span))

    def _ended(self, name: str, span: Span) -> None:
        self._open.append((name, span))
        self.spans.append((name, span))
        if self._clock.waits:
            self.read()

    def read(self) -> None:
        """Adds the parts that the device has ended to `parts`."""
        open_before, self._open = self._open, []
        for name, span in open_before:
            if (seconds := span.seconds) is None:
                self._open.append((name, span))
            else:
                self.parts[name] = self.parts.get(name, 0.0) + seconds


@dataclass(frozen=True)
class ReadStep:
    """A step whose rows are read and agreed on, not yet run."""

    microbatches: list[tuple[Row, ...]]
    plan: StepPlan


def step_seed(seed: int, step: int, replica: int) -> int:
    """Returns the seed of a step's random numbers. A resumed run needs no saved state, and all
    ranks of a replica draw the same numbers."""
    return ((seed * 1_000_003 + step) * 65_537 + replica) % 2**64  # torch takes no larger ones


class StepRunner:
    """Runs the steps of a job on this rank.

    Args:
        tell: Called with events; on rank 0, which reports for all.
        saving: How far this rank's last save is; agreed on once per step.
        snapshots: State of the memory tier's snapshots, agreed on once per step. None: no tier.
        pace: Times steps and reports stragglers.
    """

    def __init__(
        self,
        rank: AssembledRank,
        *,
        tell: Callable[[Event], None] = lambda event: None,
        saving: Callable[[], SaveProgress] = lambda: SaveProgress.OVER,
        snapshots: Callable[[], SnapshotState] | None = None,
        pace: Pace | None = None,
        injection: Injection | None = None,
    ) -> None:
        self.job, self.seat, self.pipeline, self.device = rank.job, rank.seat, rank.pipeline, rank.device
        self.built, self.loader, self.optimizer, self.reducer = rank.built, rank.loader, rank.optimizer, rank.reducer
        self.outer, self._decision = rank.outer, rank.decision
        self._tell, self._saving, self._snapshots = tell, saving, snapshots
        self._pace, self._injection = pace, injection
        self.router_losses = RouterLosses(rank.built.modules, rank.job.model, rank.device)
        self.lookahead: LookaheadTuner | None = None
        if rank.job.pipeline.lookahead == "auto" and rank.job.mesh.pp > 1:
            from raypp.rank.step.tune_lookahead import LookaheadTuner

            self.lookahead = LookaheadTuner(rank)
        self.guard, self.loss_scale = FiniteGuard(rank), LossScale(rank.job)
        self._replica = rank.groups.replica
        self.share = rank.groups.context_share(rank.job.mesh.cp_style)
        self._tensor, self._parts = rank.groups.tensor, rank.job.mesh.cp * rank.job.mesh.tp
        self.attention = rank.attention
        self.warm = rank.device.type != "cuda"

    def read(self, requests: Requests, watch: Stopwatch, *, everyone: bool = True) -> ReadStep:
        """Reads the next rows and agrees on them. Collective over the ranks of `agree`."""
        with watch.part("data"):
            microbatches = [tuple(microbatch.rows) for microbatch in self.loader.next_step()]
        compute_us = self._pace.before_step() if self._pace is not None else ()
        read = self.agree(microbatches, requests, watch, compute_us, everyone=everyone)
        if self._pace is not None:
            self._pace.agreed(read.plan.compute_us, self._tell)
        return read

    def agree(
        self,
        microbatches: list[tuple[Row, ...]],
        requests: Requests,
        watch: Stopwatch,
        compute_us: tuple[int, ...] = (),
        *,
        everyone: bool = True,
    ) -> ReadStep:
        """Agrees with the other ranks on the rows that each has read. Collective. `microbatches`:
        the rows of each of this replica's microbatches. `requests`: the operator's requests as this
        rank knows them. `compute_us`: from `Pace.before_step`. `everyone`: False: a replica that
        trains apart agrees in itself."""
        everyone = everyone or self._replica is None
        rows = [row for microbatch in microbatches for row in microbatch]
        self._mark("agree" if everyone else "replica agree")
        with watch.part("negotiate"):
            proposal = StepProposal(
                seq_lens=self._lengths(microbatches),
                tokens=sum(labelled_tokens(microbatch) for microbatch in microbatches),
                digest=rows_digest(rows),
                requests=requests,
                saving=self._saving(),
                snapshots=self._snapshots() if self._snapshots is not None else None,
                compute_us=compute_us,
                peak_bytes=self._peaks(),
                alloc_retries=alloc_retries(self.device),
            )
            group = None if everyone else self._replica
            replicas, apart = self.job.mesh.replicas, 1 if self.outer is None else self.outer.replicas
            plan = agree_on_step(proposal, replica=self.seat.replica, replicas=replicas, group=group, apart=apart)
        return ReadStep(microbatches, plan)

    def _peaks(self) -> list[int]:
        """Returns this rank's peak of memory so far, in the place of its pipeline rank."""
        peaks = [0] * self.job.mesh.pp
        peaks[self.seat.coordinates.pp] = peak_memory(self.device)
        return peaks

    def _lengths(self, microbatches: list[tuple[Row, ...]]) -> list[int]:
        """Returns the length this rank proposes per microbatch, by pipeline.variable_seq_len."""
        mode, pipeline = self.job.pipeline.variable_seq_len, self.job.pipeline
        longest = [longest_row(rows) for rows in microbatches]
        if mode == "off":
            longest = [self.job.data.seq_len] * len(longest)
        elif mode == "step":
            longest = [max(longest)] * len(longest)
        return [
            padded_length(n, parts=self._parts, multiple=pipeline.pad_to_multiple_of, bucket=pipeline.seq_len_bucket)
            for n in longest
        ]

    def batches(self, read: ReadStep, step: int | None = None) -> list[StageBatch]:
        """Returns this rank's share of every microbatch, on its device: tensors `[B, t]`. `step`:
        its number, on which adapters' dropout depends. None: no dropout."""
        keys = None if step is None else self._keys(step)
        size = self.job.train.micro_batch_size
        batches = [
            collate(rows, length, self.share, self.attention, keys, index * size)
            for index, (rows, length) in enumerate(zip(read.microbatches, read.plan.seq_lens, strict=True))
        ]
        return on_device(batches, self.device)

    def _keys(self, step: int) -> StepKeys | None:
        """Returns the keys of a step's tokens; None if nothing is dropped."""
        lora, rows = self.job.model.lora, self.job.pipeline.microbatches * self.job.train.micro_batch_size
        return StepKeys(self.job.train.seed, step, self.seat.replica * rows) if lora and lora.dropout else None

    def own_lengths(self, read: ReadStep) -> list[int]:
        """Returns t of each microbatch: the tokens of a row that this rank has between blocks."""
        return [length // self._parts for length in read.plan.seq_lens]

    def run(self, step: int, read: ReadStep, watch: Stopwatch) -> StepReport:
        """Runs a step that was read, and updates the weights. Collective: over the replica between
        outer steps, else over the world. `step`: the step's number, 1-based."""
        getattr(self.optimizer, "settle", lambda: None)()
        if self.outer is not None:
            self.outer.begin()
        self._seed(step)
        self._mark("prepare")
        with watch.part("data"):
            batches = self.batches(read, step)
        if not self.warm:
            with watch.part("warm_up"):
                warm_up(self.built, self.pipeline.program, batches[0], self.share, self.router_losses, self.job.mesh.tp)
            self.warm = True
        if self.lookahead is not None:
            with watch.part("lookahead"):
                choice = self.lookahead.before_step(self.own_lengths(read))
            if choice is not None and (self._replica is None or self.seat.rank == 0):
                self._tell(choice.event(step, self.seat.attempt))
        scale = self.loss_scale.state.scale
        self.built.runtime.loss_scale = self.reducer.factor = self.loss_scale.factor
        self.router_losses.scale(self.loss_scale.factor)
        with watch.part("pipeline"):
            losses = self._compute(step, read, batches)
        with watch.part("reduce"):
            gradients, sums = self._reduce(step, read, losses)
        rate, tokens = self.job.train.learning_rate(step), read.plan.global_tokens
        if self.outer is not None:
            tokens = read.plan.tokens_apart(self.outer.replicas)[self.outer.replica]
        self._mark("update")
        with watch.part("optimizer"):
            updated = self._updated(step, read, batches, gradients, sums, tokens, rate)
            for one in self.built.replica_sums:
                one.drop_residuals()
        if self.outer is not None and self.outer.acts_after(step):
            with watch.part("outer"):
                if not updated:
                    self.optimizer.step()  # updates nothing, but waits for copies of the weights
                met = self.outer.run(step, lambda: self._mark("outer"), self.loss_scale.numbers())
                self.loss_scale.agree(met)
        if self._injection is not None:
            self._injection.updated(self.built.modules)
        return self._report(step, read.plan, tokens, sums, rate, watch, self.loss_scale.report(scale))

    def _updated(
        self,
        step: int,
        read: ReadStep,
        batches: list[StageBatch],
        gradients: list[torch.Tensor],
        sums: GlobalSums,
        tokens: int,
        rate: float,
    ) -> bool:
        """Updates the weights, unless the step's sums forbid it; returns whether it did."""
        if not self.guard.is_finite(sums):
            self.optimizer.zero_grad(set_to_none=True)
            again = partial(self._again, step, read, batches)
            if self.loss_scale.overflowed(sums):
                self.guard.lower_scale(step, sums, self.loss_scale, again, self._tell)
            else:
                self.guard.handle(step, sums, again, self._tell)
            self.optimizer.zero_grad(set_to_none=True)
            return False
        self.loss_scale.good()
        if tokens > 0 and self.guard.is_spike(step, sums.loss / tokens, self._tell):
            self.optimizer.zero_grad(set_to_none=True)
            return False
        if self.outer is not None:
            self.outer.count(tokens)
        self.update(step, gradients, sums.grad_norm, tokens, rate)
        if tokens:
            self.router_losses.correct(sums.extra[:-3])
        return tokens > 0

    def _compute(self, step: int, read: ReadStep, batches: list[StageBatch]) -> list[torch.Tensor]:
        """Runs the forwards and backwards; the last stage returns each microbatch's loss `[]`."""
        clock = self._pace.clock if self._pace is not None else None
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

    def _reduce(self, step: int, read: ReadStep, losses: list[torch.Tensor]) -> tuple[list[torch.Tensor], GlobalSums]:
        """Returns the local part `[...]` of every gradient, and the sums of losses and norms."""
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        place = self.seat.coordinates
        loss_sum = torch.stack(losses).double().sum() if losses and place.tp == 0 else zero  # the same with any tp
        if self.built.tied is not None:
            self._mark("tie")
            self.built.tied.sum_gradients()
        if self._tensor is not None:
            self._mark("tensor sum")
            sum_replicated(self.built.modules, self._tensor)
        gradients = self.reducer.gradients()
        if self._injection is not None:
            self._injection.gradients(gradients)
        self._mark("sum" if self._replica is None else "replica sum")
        getattr(self.optimizer, "prepare_fused", lambda: None)()
        own = place.pp == place.cp == place.tp == 0  # one rank of a replica counts its rows
        flops = (
            self._decision.flops(n for rows in read.microbatches for row in rows for n in row.documents) if own else 0
        )
        to_replicas = 0
        if self.job.mesh.dp_replicate > 1:
            numbers = sum(map(torch.Tensor.numel, gradients)) if self.outer is None else self.outer.numbers_due(step)
            to_replicas = int(sent_bytes(self.job, numbers, self.job.train.sync.kind))
        counts = (
            torch.full((1,), one, dtype=torch.float64, device=self.device)
            for one in (self.built.runtime.sent_bytes, to_replicas, flops)
        )
        return gradients, self.reducer.sums(gradients, loss_sum, torch.cat((self.router_losses.take(), *counts)))

    def _again(self, step: int, read: ReadStep, batches: list[StageBatch]) -> None:
        """Repeats a step's forwards and backwards from the same numbers."""
        self._seed(step)
        self._compute(step, read, batches)
        if self.built.tied is not None:
            self.built.tied.sum_gradients()  # also empties its accumulated gradients
        self.router_losses.take()

    def _seed(self, step: int) -> None:
        torch.manual_seed(step_seed(self.job.train.seed, step, self.seat.replica))

    def _mark(self, action: str) -> None:
        """Marks what this rank does next, with a name that `hang_analysis` knows."""
        if self.built.runtime.mark is not None:
            self.built.runtime.mark(action)

    def update(self, step: int, gradients: list[torch.Tensor], norm: float, tokens: int, rate: float) -> None:
        """Scales the gradients, local shards `[...]`, and runs the optimizer. `norm`: theirs, but
        for the scale of the loss."""
        if tokens:
            factor = coefficient(norm, tokens, self.job.train.clip_norm) / self.reducer.factor
            begin_update(self.optimizer, gradients, factor, rate, step)
            self.optimizer.step()
            for one in self.built.replica_sums:
                one.keep_residuals()
        self.optimizer.zero_grad(set_to_none=True)

    def _report(
        self,
        step: int,
        plan: StepPlan,
        tokens: int,
        sums: GlobalSums,
        rate: float,
        watch: Stopwatch,
        extras: dict[str, float],
    ) -> StepReport:
        """Returns the report of this replica if it trains apart, else of all."""
        watch.read()
        seconds = sum(value for part, value in watch.parts.items() if part != _AFTER_STEP)
        return StepReport(
            step=step,
            loss=sums.loss / tokens if tokens else 0.0,
            grad_norm=sums.grad_norm / tokens if tokens else 0.0,
            tokens=tokens,
            seq_len=max(plan.seq_lens),
            step_s=seconds,
            tokens_per_s=tokens / seconds,
            attempt=self.seat.attempt,
            lr=rate,
            parts_s=dict(watch.parts),
            extras={**self.router_losses.report(sums.extra[:-3], tokens), **extras, **self.loader.used()},
            wire_bytes=int(sums.extra[-3]),
            replica_bytes=int(sums.extra[-2]) if self.job.mesh.dp_replicate > 1 else None,
            flops=float(sums.extra[-1]),
            gpus=self.seat.world_size if self.device.type == "cuda" else 0,
            peak_tflops=self._decision.peak_tflops,
            compressed=self.job.pipeline.wire.compresses,
            peak_bytes=list(plan.peak_bytes),
            alloc_retries=plan.alloc_retries,
        )
