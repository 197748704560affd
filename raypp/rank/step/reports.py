"""The steps' reports: the latest are saved in checkpoints, those of replicas become those of all.

The writer of the records buffers a report for about a second. If it dies after the step's
checkpoint, the ranks that load this report the step again: the history lacks no committed step.
"""

import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from raypp.records import Reporter, StepReport
from raypp.stages.parallel.outer_sync import weighted_mean
from raypp.state.checkpoint.commit import ScaleState

_MOST = 256
"""Reports kept; far more than the steps between two writes of the records."""
_MEANS = ("aux_loss", "z_loss")
"""The extras that are means over tokens; others are the same on all replicas."""


class EncodedReports:
    """Reports of steps without `parts_s`, oldest first, each encoded once. `most`: how many are
    kept; None: all."""

    def __init__(self, most: int | None = None) -> None:
        self._reports: deque[StepReport] = deque(maxlen=most)
        self._texts: deque[str] = deque(maxlen=most)

    def __iter__(self) -> Iterator[StepReport]:
        return iter(self._reports)

    @property
    def newest(self) -> int:
        """The last step that has a report; 0: none."""
        return self._reports[-1].step if self._reports else 0

    def add(self, report: StepReport) -> None:
        """Appends a step's report."""
        self._reports.append(replace(report, parts_s={}))
        self._texts.append(json.dumps(asdict(self._reports[-1]), separators=(",", ":")))

    def clear(self) -> None:
        self._reports.clear()
        self._texts.clear()

    def json_text(self) -> str:
        """Returns the reports as a JSON text, needed every step."""
        return f"[{','.join(self._texts)}]"

    def document(self) -> list[dict[str, Any]]:
        """Returns the reports as plain JSON data, for a checkpoint."""
        return [asdict(report) for report in self._reports]


class RecentReports(EncodedReports):
    """The latest reports of a run, from any attempt. `own`: where replicas train apart, those of
    this one since the last outer step: after a restart they may be at different steps, and figures
    are gathered again from there on. `losses`: the losses by which a spike is told, with
    recovery.on_spike, as a state holds them. `loss_scale`: likewise."""

    losses: tuple[float, ...] = ()
    loss_scale: ScaleState | None = None

    def __init__(self) -> None:
        super().__init__(_MOST)
        self.own = EncodedReports()

    def restore(self, reports: Iterable[StepReport], own: Iterable[StepReport] = ()) -> None:
        """Appends the reports that a state holds."""
        for report in reports:
            self.add(report)
        for report in own:
            self.own.add(report)

    def report_again(self, reporter: Reporter) -> None:
        """Reports all steps again. Readers of the records keep one report per step."""
        for report in self:
            reporter.step(report)


@dataclass(frozen=True)
class _Gathering:
    """A step's report of this replica, and the figures `[R, 8 + E]` of all that are under way."""

    report: StepReport
    figures: list[Tensor]
    work: dist.Work


class ReplicaReports:
    """Turns the reports of one replica into reports of all. No step waits for another replica: a
    report comes when all have done its step, usually while the next one runs. `group`: one rank of
    each replica, in their order; computes on CPUs. `kept`: all replicas' `kept`, for each report
    that the last call of `add` returned."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._replicas = group, group.size()
        self._under_way: deque[_Gathering] = deque()
        self.kept: list[list[tuple[int, int]]] = []

    def add(self, report: StepReport, *, wait: bool, kept: tuple[int, int] = (-1, -1)) -> list[StepReport]:
        """Takes this replica's report of a step; returns those that are complete, in their order.

        Collective over the group, with a rank's part of it done in the background. `report`: of
        this replica. Its `parts_s` may still change until it is returned. `wait`: whether to wait
        until all that were added are complete. `kept`: `MemoryTier.kept` of this replica."""
        means = [report.loss, report.grad_norm, *(report.extras[name] for name in _MEANS if name in report.extras)]
        own = torch.tensor(
            [*map(float, (report.tokens, report.wire_bytes, *kept, report.flops, report.replica_bytes or 0)), *means],
            dtype=torch.float64,
        )
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
    table = torch.stack(figures)
    tokens = [int(count) for count in table[:, 0]]
    loss, grad_norm, *extras = weighted_mean([row[6:] for row in table], tokens).tolist() if any(tokens) else [0.0] * 4
    named = zip((name for name in _MEANS if name in report.extras), extras, strict=False)
    return replace(
        report,
        loss=loss,
        grad_norm=grad_norm,
        tokens=sum(tokens),
        tokens_per_s=sum(tokens) / report.step_s,
        wire_bytes=int(table[:, 1].sum()),
        flops=float(table[:, 4].sum()),
        replica_bytes=None if report.replica_bytes is None else int(table[:, 5].sum()),
        extras=report.extras | dict(named),
    )
