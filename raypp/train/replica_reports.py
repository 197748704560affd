"""Reports over all replicas that train apart, gathered beside the steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from raypp.parallel.outer_sync import weighted_mean
from raypp.records import StepReport

_MEANS = ("aux_loss", "z_loss")
"""The extras that are means over tokens; others are the same on all replicas."""


@dataclass(frozen=True)
class _Gathering:
    """A step's report of this replica, and the figures `[R, 6 + E]` of all that are under way."""

    report: StepReport
    figures: list[Tensor]
    work: dist.Work


class ReplicaReports:
    """Turns the reports of one replica into reports of all.

    No step waits for another replica: a report comes when all have done its step, usually while the
    next one runs.

    Args:
        group: One rank of each replica, in their order; computes on CPUs.

    Attributes:
        kept: All replicas' `kept`, for each report that the last call of `add` returned.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._replicas = group, group.size()
        self._under_way: deque[_Gathering] = deque()
        self.kept: list[list[tuple[int, int]]] = []

    def add(self, report: StepReport, *, wait: bool, kept: tuple[int, int] = (-1, -1)) -> list[StepReport]:
        """Takes this replica's report of a step; returns those that are complete, in their order.

        Collective over the group, with a rank's part of it done in the background.

        Args:
            report: Of this replica. Its `parts_s` may still change until it is returned.
            wait: Whether to wait until all that were added are complete.
            kept: `MemoryTier.kept` of this replica.
        """
        means = [report.loss, report.grad_norm, *(report.extras[name] for name in _MEANS if name in report.extras)]
        own = torch.tensor([*map(float, (report.tokens, report.wire_bytes, *kept)), *means], dtype=torch.float64)
        figures = list(own.new_empty(self._replicas, len(own)))
        work = dist.all_gather(figures, own, group=self._group, async_op=True)
        assert work is not None
        self._under_way.append(_Gathering(report, figures, work))
        complete, self.kept = [], []
        while self._under_way and (wait or self._under_way[0].work.is_completed()):
            one = self._under_way.popleft()
            one.work.wait()
            self.kept.append([(int(row[2]), int(row[3])) for row in one.figures])
            complete.append(_of_all(one.report, one.figures))
        return complete


def _of_all(report: StepReport, figures: list[Tensor]) -> StepReport:
    """Returns the report of all replicas: sums, and means weighted by tokens."""
    table = torch.stack(figures)
    tokens = [int(count) for count in table[:, 0]]
    loss, grad_norm, *extras = weighted_mean([row[4:] for row in table], tokens).tolist() if any(tokens) else [0.0] * 4
    named = zip((name for name in _MEANS if name in report.extras), extras, strict=False)
    return replace(
        report,
        loss=loss,
        grad_norm=grad_norm,
        tokens=sum(tokens),
        tokens_per_s=sum(tokens) / report.step_s,
        wire_bytes=int(table[:, 1].sum()),
        extras=report.extras | dict(named),
    )
