"""Traces the steps that the operator asked to see, and writes each rank's part to the store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from raypp.errors import in_words
from raypp.rank.step.step import StepRunner, Stopwatch
from raypp.records import Event, EventKind, Seat
from raypp.stages.pipeline.action_trace import ActionTrace, Recorded
from raypp.stages.pipeline.device_clock import Anchor
from raypp.state.run_records.trace import MOST_SPANS, MOST_STEPS, RankTrace, Span
from raypp.storage import ObjectStore

_WRITE_PATIENCE_S = 20.0


class StepTracer:
    """Traces steps of one rank. Every rank has one and is asked at the same step."""

    def __init__(self, runner: StepRunner, store: ObjectStore, tell: Callable[[Event], None]) -> None:
        self._runner, self._store, self._tell = runner, store, tell
        self._recording: _Recording | None = None
        self._writers: list[threading.Thread] = []

    def begin(self, step: int, steps: int) -> None:
        """Traces from this step on, whose rows have been read. Collective over the world. While a
        trace is being recorded, a second request changes nothing."""
        if self._recording is None:
            self._recording = _Recording(self._runner, step, min(steps, MOST_STEPS))

    def step_ended(self, step: int, watch: Stopwatch, *, last: bool) -> None:
        """Takes the parts of a step. After the last one to trace: collective over the world."""
        recording = self._recording
        if recording is None:
            return
        recording.take(step, watch)
        if last or step + 1 >= recording.first_step + recording.steps:
            self.finish()

    def finish(self) -> None:
        """Ends a trace that is being recorded and writes it. Collective over the world."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        trace = recording.end()
        writer = threading.Thread(target=self._write, args=(trace,), name="trace", daemon=True)
        writer.start()
        self._writers.append(writer)

    def close(self) -> None:
        """Waits until what was traced is in the store, if that does not take long."""
        if self._recording is not None:
            self._recording.stop()
        for writer in self._writers:
            writer.join(_WRITE_PATIENCE_S)

    def _write(self, trace: RankTrace) -> None:
        seat = self._runner.seat
        steps = f"{trace.steps} steps from {trace.first_step} on"
        details = {"first_step": trace.first_step, "steps": trace.steps}
        kind: EventKind
        try:
            self._store.put(trace.key(), trace.to_bytes())
            kind, message = "traced", f"{steps}: `raypp timeline` shows them"
        except Exception as error:  # noqa: BLE001  a trace that is lost must not end the run
            kind, message = "trace_failed", f"{steps}: rank {seat.rank} cannot write its part: {in_words(error)}"
        if seat.rank == 0 or kind == "trace_failed":
            event = Event(kind, message, attempt=seat.attempt, step=trace.first_step, rank=seat.rank, details=details)
            self._tell(event)


class _Recording:
    """The steps of one trace, while they run."""

    def __init__(self, runner: StepRunner, step: int, steps: int) -> None:
        self._runner, self.first_step, self.steps = runner, step, steps
        self._runtime = runner.built.runtime
        self._mark("clocks")
        self._trace = ActionTrace(runner.device, list(self._runtime.planned.values()))
        with self._trace.timed("clocks"):
            self._anchor = self._trace.clock.anchor()
            self._clock = compare_clocks(runner.seat)
        self._take_exchanges()  # those before
        self._wall = time.time(), time.perf_counter()
        self._taken: list[tuple[int, Recorded]] = []
        self._runtime.trace = self._trace

    def take(self, step: int, watch: Stopwatch) -> None:
        parts = [Recorded(name, span.begin, span.end) for name, span in watch.spans]
        begin = parts[0].begin if parts else self._trace.clock.now()
        parts.append(Recorded("step", begin, self._trace.clock.now()))
        self._taken += [(step, one) for one in (*self._trace.recorded, *parts, *self._take_exchanges())]
        self._trace.recorded.clear()

    def _take_exchanges(self) -> list[Recorded]:
        if (outer := self._runner.outer) is None:
            return []
        return [Recorded("exchanging", *outer.exchanges.popleft()) for _ in range(len(outer.exchanges))]

    def stop(self) -> None:
        self._runtime.trace = None
        self._trace.close()

    def end(self) -> RankTrace:
        """Ends the recording and returns it. Collective over the world; waits for a GPU."""
        self.stop()
        self._mark("clocks")
        # The device reaches this anchor after all that was recorded. One clock drifts against the
        # other, too little to matter within some steps.
        self._trace.clock.anchor()
        clock = between(self._clock, compare_clocks(self._runner.seat))
        seat = self._runner.seat
        wall_s, host_s = self._wall
        return RankTrace(
            run=seat.run,
            attempt=seat.attempt,
            first_step=self.first_step,
            steps=1 + max(step for step, _ in self._taken) - self.first_step,
            rank=seat.rank,
            world=seat.world_size,
            label=seat.label,
            coordinates=seat.coordinates,
            node=seat.node,
            device=seat.device,
            began=wall_s - (host_s + clock.offset_s - clock.now_s),
            clock_error_s=clock.error_s,
            spans=tuple(spans_of(self._taken, self._anchor, clock)[:MOST_SPANS]),
            cut=len(self._taken) > MOST_SPANS,
        )

    def _mark(self, action: str) -> None:
        if self._runtime.mark is not None:
            self._runtime.mark(action)


def spans_of(taken: Sequence[tuple[int, Recorded]], anchor: Anchor, clock: CommonClock) -> list[Span]:
    """Returns what was recorded, by step, on the common clock. What is under way beside the compute
    follows: `gathering` from a gather to the last wait for it in the stage's next forward,
    `summing` from a stage's first sum to the end of the step's sums."""
    shift = clock.offset_s - clock.now_s

    def at(instant: Any) -> float:
        return anchor.seconds(instant) + shift

    spans = [
        Span(one.kind, begin := at(one.begin), max(0.0, at(one.end) - begin), step, one.stage, one.microbatch)
        for step, one in taken
    ]
    return [*spans, *_gathering(spans), *_summing(spans)]


def _gathering(spans: Sequence[Span]) -> list[Span]:
    gathering: list[Span] = []
    begun: dict[int, Span] = {}
    ends: dict[int, float] = {}
    for span in spans:
        if span.kind == "gather":
            begun[span.stage] = span
        elif span.kind == "wait gather":
            ends[span.stage] = span.end
        elif span.kind == "F" and span.stage in begun and span.stage in ends:
            gather = begun.pop(span.stage)
            gathering.append(gather._replace(kind="gathering", seconds=max(0.0, ends[span.stage] - gather.begin)))
    return gathering


def _summing(spans: Sequence[Span]) -> list[Span]:
    summing: list[Span] = []
    begun: dict[int, Span] = {}
    for span in spans:
        if span.kind == "sum":
            begun.setdefault(span.stage, span)
        elif span.kind == "wait sums":
            for first in begun.values():
                summing.append(first._replace(kind="summing", seconds=max(0.0, span.end - first.begin)))
            begun.clear()
    return summing


_ROUNDS = 12
"""Messages per node. The first ones connect."""


@dataclass(frozen=True)
class CommonClock:
    """Converts this rank's `time.perf_counter` to rank 0's. `offset_s`: what to add to this rank's
    clock. `error_s`: half of the shortest round trip: the offset is exact to this. `now_s`: rank
    0's clock when the comparison began; the same on every rank."""

    offset_s: float
    error_s: float
    now_s: float


def compare_clocks(seat: Seat) -> CommonClock:
    """Compares this rank's clock with rank 0's. Collective over the world. One rank per node
    exchanges messages with rank 0, node after node: about twelve round trips each."""
    node_of = torch.zeros(seat.world_size, dtype=torch.int64)
    node_of[seat.rank] = seat.node_rank
    dist.all_reduce(node_of)
    nodes = [int(node) for node in node_of]
    speakers = {node: nodes.index(node) for node in sorted(set(nodes))}
    readings = torch.zeros(2 * len(speakers) + 1, dtype=torch.float64)
    if seat.rank == 0:
        readings[-1] = time.perf_counter()
    for node_index, (node, speaker) in enumerate(speakers.items()):
        if node == nodes[0]:
            continue
        if seat.rank == 0:
            _answer(speaker)
        elif seat.rank == speaker:
            readings[2 * node_index], readings[2 * node_index + 1] = _ask()
    dist.all_reduce(readings)
    node_index = list(speakers).index(seat.node_rank)
    return CommonClock(float(readings[2 * node_index]), float(readings[2 * node_index + 1]), float(readings[-1]))


def between(before: CommonClock, after: CommonClock) -> CommonClock:
    """Returns the clock between two comparisons. Clocks drift, and the error says so."""
    drift = abs(after.offset_s - before.offset_s)
    error_s = max(before.error_s, after.error_s) + drift / 2
    return CommonClock((before.offset_s + after.offset_s) / 2, error_s, before.now_s)


def _answer(speaker: int) -> None:
    asked, now = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    for _ in range(_ROUNDS):
        dist.recv(asked, speaker)
        now[0] = time.perf_counter()
        dist.send(now, speaker)


def _ask() -> tuple[float, float]:
    asked, now = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    exchanges = []
    for _ in range(_ROUNDS):
        sent = time.perf_counter()
        dist.send(asked, 0)
        dist.recv(now, 0)
        came = time.perf_counter()
        exchanges.append((came - sent, float(now[0]) - (sent + came) / 2))
    round_trip, offset = min(exchanges)
    return offset, round_trip / 2
