"""Encodes the records of a run as JSON lines, and decodes them.

Floats are written as by Python's `repr`, so reading gives the same bits; NaN and infinities as
`NaN`, `Infinity` and `-Infinity`, which Python's `json` accepts. Unknown fields are ignored.
"""

import dataclasses
import json
import time
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter

from raypp.records import Event, StepReport
from raypp.state.run_records.quantities import ROW_KEYS
from raypp.untrusted.documents import Count, Time

LONGEST_TEXT = 16 * 1024
"""Number of characters of a log line that are kept."""


@dataclass(frozen=True)
class LogLine:
    """One line of a rank's output.

    Attributes:
        text: The line without its line end.
        rank: None for the controller's own lines.
        label: The rank's coordinates in short (`Seat.label`), or another source's name.
        attempt: The attempt that printed it.
        stream: out or err.
        time: When it was read, in seconds since 1970.
    """

    text: str
    rank: Count | None = None
    label: str = ""
    attempt: Count = 0
    stream: str = "out"
    time: Time = field(default_factory=time.time)


@dataclass(frozen=True)
class TimedStep:
    """A step's report and the time it was recorded, in seconds since 1970."""

    report: StepReport
    time: float

    def row(self) -> dict[str, Any]:
        """Returns the line of `raypp history` as a mapping."""
        row = {key: getattr(self.report, key) for key in ROW_KEYS}
        return row | {name: value for name, value in self.report.values.items() if name not in row}


@dataclass(frozen=True)
class _Recorded:
    time: Time = 0.0


def step_line(report: StepReport, now: float) -> bytes:
    return document({**vars(report), "time": now})


def event_line(event: Event) -> bytes:
    return document(vars(event))


def log_line(line: LogLine) -> bytes:
    if len(line.text) > LONGEST_TEXT:
        cut = f"{line.text[:LONGEST_TEXT]} … ({len(line.text) - LONGEST_TEXT} more characters)"
        line = dataclasses.replace(line, text=cut)
    return document(vars(line))


def read_step(line: bytes) -> TimedStep:
    """Decodes a step's line; raises ValueError if it is not one."""
    return TimedStep(_decode(StepReport, line), _decode(_Recorded, line).time)


def read_event(line: bytes) -> Event:
    """Decodes an event's line; raises ValueError if it is not one."""
    return _decode(Event, line)


def read_log(line: bytes) -> LogLine:
    """Decodes a log line; raises ValueError if it is not one."""
    return _decode(LogLine, line)


def document(value: dict[str, Any]) -> bytes:
    """Encodes a JSON object as one line: of records, or the content of a stored object."""
    # ASCII only: nothing that a rank prints (lone surrogates, unusual line ends) can split a line.
    return json.dumps(value, separators=(",", ":"), default=str, skipkeys=True).encode("ascii") + b"\n"


_Record = TypeVar("_Record", StepReport, Event, LogLine, _Recorded)


def _decode(shape: type[_Record], line: bytes) -> _Record:
    """Decodes a line; a newer raypp may write fields that are unknown here."""
    if b"\\ud" in line:
        # Half of a surrogate pair stands for a byte that is not text; it becomes a question mark.
        try:
            line = json.dumps(json.loads(line), ensure_ascii=False).encode("utf-8", "replace")
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
    adapter: TypeAdapter[_Record] = _adapter(cast(Any, shape))
    return adapter.validate_json(line, strict=True, extra="ignore")


@cache
def _adapter(shape: Any) -> TypeAdapter[Any]:
    return TypeAdapter(shape)
