"""Measures time on a device without waiting for it, and a rank's actions for a few steps.

On a GPU the host runs ahead: the time between two of its own instants says how long queueing took,
not how long the work takes. There, an instant is an event on the current stream. It has a time once
the device has reached it.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from raypp.planning.schedules.action import Kind


@dataclass(frozen=True)
class Span:
    """The time between two instants on one device. `begin`: seconds of the host's clock on a CPU,
    else an event. `end`: the same."""

    begin: Any
    end: Any

    @property
    def seconds(self) -> float | None:
        """The seconds; None while the device has not reached the end. Never waits."""
        if isinstance(self.end, float):
            return self.end - float(self.begin)
        return float(self.begin.elapsed_time(self.end)) / 1e3 if self.end.query() else None


@dataclass(frozen=True)
class Anchor:
    """An instant whose time on the host's clock is known. `instant`: 0.0 on a CPU, else an event.
    `host_s`: the time, in seconds of `time.perf_counter`."""

    instant: Any
    host_s: float

    def seconds(self, instant: Any) -> float:
        """Returns an instant's time on the host's clock. The device must have reached it."""
        if isinstance(instant, float):
            return instant
        return self.host_s + float(self.instant.elapsed_time(instant)) / 1e3


def device_marks(phase: Callable[..., None], name: str, device: torch.device) -> Callable[[str], None]:
    """Returns a function that reports what a rank does next. On a GPU, with it goes an event:
    whoever looks for the rank later sees what the device has come to, where the host may have
    queued everything. `phase`: `Reporter.phase`. `name`: its first argument."""
    if device.type == "cpu":
        return lambda action: phase(name, action)
    module = torch.get_device_module(device)

    def mark(action: str) -> None:
        event = module.Event()
        event.record()
        phase(name, action, partial(_reached, module, device, event))

    return mark


def _reached(module: Any, device: torch.device, event: Any) -> bool:
    """Whether a device has come to an event. The thread that asks also drops the event: if another
    device were current there, CUDA would make a context on it, with hundreds of MB."""
    module.set_device(device)
    return bool(event.query())


class DeviceClock:
    """Times blocks of code on a device: by the host's clock on a CPU, by events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waits = device.type == "cpu"
        """Whether a block's work is done when the block ends, so that its seconds are known."""

    def now(self) -> Any:
        """Returns the instant at which the device has done all that was queued so far."""
        if self.waits:
            return time.perf_counter()
        event = torch.get_device_module(self.device).Event(enable_timing=True)
        event.record()
        return event

    def anchor(self) -> Anchor:
        """Relates the device's instants to the host's clock. Waits for a GPU."""
        if self.waits:
            return Anchor(0.0, 0.0)
        device = torch.get_device_module(self.device)
        device.synchronize(self.device)
        instant = self.now()
        device.synchronize(self.device)
        return Anchor(instant, time.perf_counter())

    @contextmanager
    def timed(self, done: Callable[[Span], None]) -> Iterator[None]:
        """Times a block and passes its span to `done`, also if the block raises."""
        begin = self.now()
        try:
            yield
        finally:
            done(Span(begin, self.now()))


_Key = tuple[Kind, int, bool]
"""The action's kind and stage, and whether its message was timed."""
_ENOUGH = 8
"""Fewest times of one kind from which a spread is computed."""


class ActionClock:
    """Records how long forwards and backwards compute, and on CUDA the memory a forward keeps. The
    time spent waiting for messages is not included. Read the times of a step after its sums
    (`train.reduce`) have been read: the device has then done all of its actions."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._clock = DeviceClock(device)
        self._spans: dict[_Key, list[Span]] = defaultdict(list)
        self._kept: dict[int, list[int]] = defaultdict(list)

    @contextmanager
    def timed(self, kind: Kind, stage: int, *, message: bool = False) -> Iterator[None]:
        """Times a block. `message`: it packs and posts the action's message; timed separately."""
        before = torch.cuda.memory_allocated(self._device) if self._cuda else 0
        with self._clock.timed(self._spans[kind, stage, message].append):
            yield
        if self._cuda and kind == "F" and not message:
            self._kept[stage].append(torch.cuda.memory_allocated(self._device) - before)

    def medians(self) -> dict[tuple[Kind, int], float]:
        """Returns the median seconds of an action with its message, by kind and stage."""
        medians: dict[tuple[Kind, int], float] = defaultdict(float)
        for (kind, stage, _), seconds in self._seconds().items():
            medians[kind, stage] += statistics.median(seconds)
        return dict(medians)

    def backwards(self) -> dict[int, tuple[float, float]]:
        """Returns the median seconds of a backward and of its input half, by stage. Without halves,
        the latter is 0. A schedule may run some backwards whole and others in halves: then these
        are the whole ones and the halves' share of them."""
        medians = self.medians()
        times = {}
        for stage in {stage for kind, stage in medians if kind != "F"}:
            whole, inputs = medians.get(("B", stage), 0.0), medians.get(("I", stage), 0.0)
            halves = inputs + medians.get(("W", stage), 0.0)
            times[stage] = (whole or halves, inputs * (whole / halves if whole and halves else 1.0))
        return times

    def spread(self) -> float:
        """Returns by what fraction an action's time varies: half the distance between the 10th and
        the 90th percentile, the mean over kinds of actions. 0: too few were timed."""
        spreads = []
        for (*_, message), seconds in self._seconds().items():
            if not message and len(seconds) >= _ENOUGH:
                tenths = statistics.quantiles(seconds, n=10)
                spreads.append((tenths[-1] - tenths[0]) / 2 / max(statistics.median(seconds), 1e-9))
        return statistics.mean(spreads) if spreads else 0.0

    def taken_s(self) -> float:
        """Returns the seconds of everything timed since the last call."""
        total = sum(sum(seconds) for seconds in self._seconds().values())
        self._spans.clear()
        self._kept.clear()
        return total

    def kept_bytes(self, stage: int) -> int:
        """Returns the median bytes a forward of a stage keeps for its backward; 0 on CPUs."""
        return int(statistics.median(self._kept[stage])) if self._kept[stage] else 0

    def _seconds(self) -> dict[_Key, list[float]]:
        """Returns the seconds of the spans that have ended; no key without any."""
        durations = {
            key: [s for span in spans if (s := span.seconds) is not None] for key, spans in self._spans.items()
        }
        return {key: seconds for key, seconds in durations.items() if seconds}
