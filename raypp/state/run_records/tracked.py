"""What a tracker is given, and what it must do."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from raypp.records import Event, StepReport
from raypp.state.run_records.quantities import CURVES

LOGDIR = "tensorboard --logdir "
"""The end of what the tracker `tensorboard` tells, before its folder."""


@dataclass(frozen=True)
class TrackedRun:
    """The run whose figures a tracker takes. `id`: unique among all runs, and the same in every
    life of this one. `folder`: a local folder for files; it exists. `shown_folder`: where users
    find them: the folder, or a URL to which they are copied. `config`: the resolved job, without
    secrets."""

    name: str
    url: str
    id: str
    folder: Path
    shown_folder: str
    options: Mapping[str, str]
    config: Mapping[str, Any]


class Tracker(Protocol):
    """A library's curves of one run. Used by one thread, which uses nothing else. Any method may
    raise or hang: the tracker is then given up, and the reason reported to the run. `where`: where
    a user finds the curves, or the command that shows them. `newest`: the last step that it has
    from an earlier life of the run; 0 if that is unknown."""

    where: str
    newest: int

    def values(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Takes a step's values; `time`: s since 1970. Steps ascend, except of evaluations."""

    def text(self, step: int, time: float, name: str, text: str) -> None:
        """Takes a text of a step, in Markdown."""

    def rewind(self, step: int) -> bool:
        """The run continues at `step`; what it knows of later ones is void. Also called before the
        first step of each life. Returns whether it forgets them; else repeats are left out."""

    def close(self, state: str) -> None:
        """Writes everything. `state`: how the run ended, such as SUCCEEDED; empty if that is
        unknown, because the process that leads it was killed."""


def values_of(report: StepReport) -> dict[str, float]:
    """Returns the values of a step that trackers get, by name."""
    peak = {"peak_bytes": float(max(report.peak_bytes))} if report.peak_bytes else {}
    peak |= {"alloc_retries": float(report.alloc_retries)} if report.alloc_retries else {}
    return {**{one.name: float(getattr(report, one.name)) for one in CURVES}, **peak, **report.values}


def values_of_event(event: Event) -> dict[str, float]:
    """Returns the values in an event: those of an evaluation."""
    loss = event.number("loss") if event.kind == "evaluated" else None
    return {} if loss is None else {"eval_loss": loss}


def text_of_event(event: Event) -> str:
    """Returns the samples in an event, in Markdown; empty if there are none."""
    listed = event.details.get("samples") if event.kind == "sampled" else None
    samples = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    return "\n\n".join(f"**{one.get('prompt', '')}**{one.get('text', '')}" for one in samples)
