"""Traces: what every rank did in a few steps, and when. One object per rank in the run's store.

`NAME/traces/a2-s00000012/rank-00003.json` has rank 3 from step 12 of attempt 2 on. All times
are on rank 0's clock.

torch's profiler shows kernels of one rank on its own clock, without messages and what waits for
them; spans sent with the reports would all pass through one controller.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Annotated, NamedTuple

from annotated_types import Ge, Le, MaxLen

from raypp.errors import CheckpointError
from raypp.records import Coordinates
from raypp.storage import ObjectStore
from raypp.untrusted.documents import Bounds, Count, Seconds, Time, parse_as

MOST_STEPS = 100
"""Steps of a trace."""
MOST_SPANS = 200_000
"""Spans of a rank; what follows is left out, and `RankTrace.cut` says so."""
COMPUTE = ("F", "B", "I", "W")
"""The kinds of spans in which a rank computes: as in `schedules.action`."""

_BOUNDS = Bounds(64 << 20, 12 * MOST_SPANS)
_KEY = re.compile(r"a([0-9]{1,9})-s([0-9]{8,12})/rank-([0-9]{5,9})\.json")

_Moment = Annotated[float, Ge(-1e10), Le(1e10)]
_Index = Annotated[int, Ge(-1), Le(1 << 31)]


class Span(NamedTuple):
    """Something that a rank did.

    Attributes:
        kind: `F B I W`: an action's compute. `send F`, `send B`: it posted the message. `wait F`,
            `wait B`: it waited for the message that a forward or backward needs. `gather`, `sum`:
            it began to gather weights or to sum gradients. `wait gather`, `wait sums`, `wait
            sends`: it waited for these. `gathering`, `summing`: they were under way, at most.
            `exchanging`: replicas that train apart exchanged weights, in the step where it ended.
            `step`, or a part of a step (`StepReport.parts_s`).
        begin: Seconds since the trace began.
    """

    kind: Annotated[str, MaxLen(40)]
    begin: _Moment
    seconds: Seconds
    step: Count
    stage: _Index = -1
    microbatch: _Index = -1

    @property
    def end(self) -> float:
        return self.begin + self.seconds


@dataclass(frozen=True)
class RankTrace:
    """What one rank did in some steps.

    Attributes:
        steps: How many were traced.
        coordinates: Its place in the mesh.
        began: When the trace began, in seconds since 1970 by the clock of the rank's node.
        clock_error_s: The rank's times are exact to this many seconds against rank 0's.
        spans: In the order of their ends.
        cut: There were more spans than a trace holds.
    """

    run: str
    attempt: Count
    first_step: Count
    steps: Count
    rank: Count
    world: Count
    label: str
    coordinates: Coordinates
    node: str
    device: str
    began: Time
    clock_error_s: Seconds
    spans: tuple[Span, ...]
    cut: bool = False

    def key(self) -> str:
        """Returns the key under which the trace is stored."""
        return f"{TracePlace(self.attempt, self.first_step).folder(self.run)}/rank-{self.rank:05d}.json"

    def to_bytes(self) -> bytes:
        """Returns the content of the stored object. Times are rounded to 0.1 µs."""
        spans = [[s.kind, round(s.begin, 7), round(max(0.0, s.seconds), 7), *s[3:]] for s in self.spans]
        fields = asdict(self) | {"spans": spans, "coordinates": self.coordinates.as_dict()}
        return json.dumps(fields, separators=(",", ":")).encode()


class TracePlace(NamedTuple):
    """Where a trace is: its attempt and its first step."""

    attempt: int
    first_step: int

    def folder(self, run: str) -> str:
        return f"{run}/traces/a{self.attempt}-s{self.first_step:08d}"


def list_traces(store: ObjectStore, run: str) -> dict[TracePlace, list[int]]:
    """Returns a run's traces, oldest first, and the ranks that are there. Raises StoreError."""
    traces: dict[TracePlace, list[int]] = {}
    start = f"{run}/traces/"
    for info in store.list(start):
        if named := _KEY.fullmatch(info.key[len(start) :]):
            traces.setdefault(TracePlace(int(named[1]), int(named[2])), []).append(int(named[3]))
    return {place: sorted(traces[place]) for place in sorted(traces)}


def read_trace(store: ObjectStore, run: str, place: TracePlace, ranks: Iterable[int]) -> list[RankTrace]:
    """Returns these ranks' parts. Raises CheckpointError: it is no trace; StoreError."""
    return [_read(store, f"{place.folder(run)}/rank-{rank:05d}.json") for rank in ranks]


def _read(store: ObjectStore, key: str) -> RankTrace:
    data = store.get(key, 0, _BOUNDS.size + 1)
    fix = "it is not a trace that raypp wrote; remove it and record another"
    return parse_as(
        RankTrace, data, f"{store.url}/{key}", _BOUNDS, CheckpointError, fix, kind="a trace", unknown="ignore"
    )


def is_complete(ranks: list[RankTrace]) -> bool:
    """Returns whether the parts of all ranks of the attempt are there."""
    return bool(ranks) and [one.rank for one in ranks] == list(range(ranks[0].world))


def newest_trace(store: ObjectStore, run: str) -> list[RankTrace] | None:
    """Returns the newest trace with the parts of all ranks; None if there is none."""
    for place, ranks in reversed(list_traces(store, run).items()):
        first = read_trace(store, run, place, ranks[:1])
        if len(ranks) == first[0].world and is_complete(trace := read_trace(store, run, place, ranks)):
            return trace
    return None
