"""Tests how the time of a disturbed run is attributed, from its events and history alone."""

from dataclasses import dataclass, field
from typing import Any

from timeline import Part, in_words, parts_of, totals


@dataclass(frozen=True)
class RecordedEvent:
    kind: str
    time: float
    attempt: int
    step: int | None = None
    details: dict[str, Any] = field(default_factory=dict)


class Recorded:
    """Ten steps of 1 s. A fault hits at 6.5 s, and the run resumes at 10 s from step 4."""

    def events(self, kind: str) -> list[RecordedEvent]:
        seconds = {"seconds": {"first step": 1.0}}
        reported = [
            RecordedEvent("first_step", 1.0, 1, 1, seconds),
            RecordedEvent("rank_failed", 6.7, 1, 5),
            RecordedEvent("first_step", 11.0, 2, 4, seconds),
        ]
        return [event for event in reported if event.kind == kind]

    def history(self) -> list[dict[str, Any]]:
        return [{"step": step, "step_s": 1.0} for step in range(1, 11)]


def test_time_is_split_into_training_redoing_and_recovering() -> None:
    parts = parts_of(Recorded(), [6.5], begin=0.0, end=17.0)
    assert parts == [
        Part("training", 0.0, 6.5),
        Part("recovering", 6.5, 10.0),
        Part("redoing", 10.0, 12.0),  # steps 4 and 5 are repeated
        Part("training", 12.0, 17.0),
    ]
    assert totals(parts) == {"training": 11.5, "redoing": 2.0, "recovering": 3.5}


def test_the_chart_shows_every_kind() -> None:
    parts = parts_of(Recorded(), [6.5], begin=0.0, end=17.0)
    words = in_words(parts)
    assert words.splitlines()[0].startswith("  0 min ███████████······▒▒▒█")
