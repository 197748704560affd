"""The loss on the held-out part, computed by a forward-only program on the same pipeline.

An evaluation runs between two steps and changes no bit of the training.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from raypp.rank.data.loader import Microbatch
from raypp.rank.data.packing import Row
from raypp.rank.step.step import StepRunner, Stopwatch
from raypp.records import Event, Requests
from raypp.stages.models.loss import token_loss_sum
from raypp.stages.parallel.rank_groups import check_groups
from raypp.stages.pipeline.agreement import StepPlan
from raypp.stages.pipeline.runtime import LossFn, Mark, ProgramRuntime


@dataclass(frozen=True)
class Evaluation:
    """An evaluation over all replicas. `loss`: mean over the counted, labelled tokens, or 0."""

    loss: float
    tokens: int
    seconds: float

    def event(self, step: int, attempt: int) -> Event:
        """Returns the `evaluated` event for the run's records."""
        words = f"loss {self.loss:.4f} on {self.tokens:,} held-out tokens in {self.seconds:.1f} s"
        details = {"loss": self.loss, "tokens": self.tokens, "seconds": round(self.seconds, 4)}
        return Event("evaluated", words, attempt=attempt, step=step, details=details)


class ForwardRunner:
    """Runs a second, forward-only program on the stages of training. A training program must never
    run under `no_grad`. Each step begins without what either runtime left."""

    def __init__(self, runner: StepRunner, loss: LossFn, mark: Mark | None = None) -> None:
        self._runner, pipeline = runner, runner.pipeline
        stages, program = list(runner.built.runtime.planned.values()), pipeline.forward_program()
        self._runtime = ProgramRuntime(
            stages, program, pipeline.rank_of_stage, pipeline.microbatches, loss, mark, backward=False
        )

    @torch.no_grad()
    def run(self, microbatches: list[tuple[Row, ...]]) -> tuple[StepPlan, list[Tensor]]:
        """Agrees on the rows of a step, and computes it. Collective over the world. Returns the
        plan; and on the rank of the last stage what `loss` returned for each microbatch, `[...]`.
        Raises DataError: the ranks of a replica read different rows."""
        runner = self._runner
        read = runner.agree(microbatches, Requests(), Stopwatch())
        batches = runner.batches(read)
        losses = self._runtime.run(
            runner.job.train.micro_batch_size,
            runner.own_lengths(read),
            [batch.tokens_BT for batch in batches],
            # Without labels no layer adds an auxiliary loss (of a router).
            [{**batch.stage_arguments(), "labelled_BT": None} for batch in batches],
            [batch.labels_BT for batch in batches],
        )
        return read.plan, losses


class Evaluator:
    """Evaluates the stages of a rank; see `ForwardRunner`."""

    def __init__(self, runner: StepRunner, mark: Mark | None = None) -> None:
        self._runner, self._forwards = runner, ForwardRunner(runner, token_loss_sum, mark)

    def run(
        self, steps: Iterable[list[Microbatch]] | None = None, progress: Callable[[int], None] = lambda tokens: None
    ) -> Evaluation:
        """Evaluates the held-out part, or `steps`, once. Collective over the world: all ranks must
        call it after the same step. `steps`: of this replica, as many on every rank."""
        started = time.perf_counter()
        # Ranks without the last stage add exact zeros: any cut gives the bits of a single process.
        total, tokens = torch.zeros((), dtype=torch.float64, device=self._runner.device), 0
        done = 0
        for microbatches in self._runner.loader.held_out() if steps is None else steps:
            plan, losses = self._forwards.run([tuple(microbatch.rows) for microbatch in microbatches])
            if losses and self._runner.seat.coordinates.tp == 0:
                total += torch.stack(losses).double().sum()
            tokens += plan.global_tokens
            done += sum(len(row.tokens) for microbatch in microbatches for row in microbatch.rows)
            progress(done)
        dist.all_reduce(total)
        loss = float(total) / tokens if tokens else 0.0
        check_groups()  # after an abort, forwards compute with what was never received
        return Evaluation(loss, tokens, time.perf_counter() - started)
