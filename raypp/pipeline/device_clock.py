"""Measures time on a device without waiting for it.

On a GPU the host runs ahead: the time between two of its own instants says how long queueing took,
not how long the work takes. There, an instant is an event on the current stream. It has a time once
the device has reached it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Span:
    """The time between two instants on one device.

    Attributes:
        begin: Seconds of the host's clock on a CPU, else an event.
        end: The same.
    """

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
    """An instant whose time on the host's clock is known.

    Attributes:
        instant: 0.0 on a CPU, else an event.
        host_s: The time, in seconds of `time.perf_counter`.
    """

    instant: Any
    host_s: float

    def seconds(self, instant: Any) -> float:
        """Returns an instant's time on the host's clock. The device must have reached it."""
        if isinstance(instant, float):
            return instant
        return self.host_s + float(self.instant.elapsed_time(instant)) / 1e3


def device_marks(phase: Callable[..., None], name: str, device: torch.device) -> Callable[[str], None]:
    """Returns a function that reports what a rank does next.

    On a GPU, with it goes an event: whoever looks for the rank later sees what the device has come
    to, where the host may have queued everything.

    Args:
        phase: `Reporter.phase`.
        name: Its first argument.
        device: The device that computes, on the stream that is current when the function is called.
    """
    if device.type == "cpu":
        return lambda action: phase(name, action)
    module = torch.get_device_module(device)

    def mark(action: str) -> None:
        event = module.Event()
        event.record()
        phase(name, action, event.query)

    return mark


class DeviceClock:
    """Times blocks of code on a device: by the host's clock on a CPU, by events on a GPU.

    Args:
        device: The device that computes.
    """

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
