"""Times this rank's actions for a few steps, and what a forward keeps in memory on a GPU."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from raypp.pipeline.device_clock import DeviceClock, Span
from raypp.schedules.action import Kind

_Key = tuple[Kind, int, bool]
"""The action's kind and stage, and whether its message was timed."""
_ENOUGH = 8
"""Fewest times of one kind from which a spread is computed."""


class ActionClock:
    """Records how long forwards and backwards compute, and on CUDA the memory a forward keeps.

    The time spent waiting for messages is not included. Read the times of a step after its sums
    (`train.reduce`) have been read: the device has then done all of its actions.

    Args:
        device: The device that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._clock = DeviceClock(device)
        self._spans: dict[_Key, list[Span]] = defaultdict(list)
        self._kept: dict[int, list[int]] = defaultdict(list)

    @contextmanager
    def timed(self, kind: Kind, stage: int, *, message: bool = False) -> Iterator[None]:
        """Times a block.

        Args:
            kind: The action's kind.
            stage: The action's stage.
            message: Whether the block packs and posts the action's message; timed separately.
        """
        before = torch.cuda.memory_allocated(self._device) if self._cuda else 0
        with self._clock.timed(self._spans[kind, stage, message].append):
            yield
        if self._cuda and kind == "F" and not message:
            self._kept[stage].append(torch.cuda.memory_allocated(self._device) - before)

    def medians(self) -> dict[tuple[Kind, int], float]:
        """Returns the median seconds of an action with its message, by kind and stage."""
        found: dict[tuple[Kind, int], float] = defaultdict(float)
        for (kind, stage, _), seconds in self._seconds().items():
            found[kind, stage] += statistics.median(seconds)
        return dict(found)

    def backwards(self) -> dict[int, tuple[float, float]]:
        """Returns the median seconds of a backward and of its input half, by stage.

        Without halves, the latter is 0. A schedule may run some backwards whole and others in
        halves: then these are the whole ones and the halves' share of them.
        """
        medians = self.medians()
        found = {}
        for stage in {stage for kind, stage in medians if kind != "F"}:
            whole, inputs = medians.get(("B", stage), 0.0), medians.get(("I", stage), 0.0)
            halves = inputs + medians.get(("W", stage), 0.0)
            found[stage] = (whole or halves, inputs * (whole / halves if whole and halves else 1.0))
        return found

    def spread(self) -> float:
        """Returns by what fraction an action's time varies, up or down.

        Half the distance between the 10th and the 90th percentile, as a mean over the kinds of
        actions. 0: too few were timed.
        """
        found = []
        for (*_, message), seconds in self._seconds().items():
            if not message and len(seconds) >= _ENOUGH:
                tenths = statistics.quantiles(seconds, n=10)
                found.append((tenths[-1] - tenths[0]) / 2 / max(statistics.median(seconds), 1e-9))
        return statistics.mean(found) if found else 0.0

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
        found = {key: [s for span in spans if (s := span.seconds) is not None] for key, spans in self._spans.items()}
        return {key: seconds for key, seconds in found.items() if seconds}
