"""Times this rank's actions for a few steps: by the host's clock on CPUs, by CUDA events on GPUs.

On CUDA, reading the times waits for the timed work.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from raypp.schedules.action import Kind


class ActionClock:
    """Records how long forwards and backwards compute, and on CUDA the memory a forward keeps.

    The time spent waiting for messages is not included.

    Args:
        device: The device that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._seconds: dict[tuple[Kind, int, bool], list[float]] = defaultdict(list)
        self._events: list[tuple[tuple[Kind, int, bool], torch.cuda.Event, torch.cuda.Event]] = []
        self._kept: dict[int, list[int]] = defaultdict(list)

    @contextmanager
    def timed(self, kind: Kind, stage: int, *, message: bool = False) -> Iterator[None]:
        """Times a block.

        Args:
            kind: The action's kind.
            stage: The action's stage.
            message: Whether the block packs and posts the action's message; timed separately.
        """
        key = kind, stage, message
        if not self._cuda:
            start = time.perf_counter()
            yield
            self._seconds[key].append(time.perf_counter() - start)
            return
        before = torch.cuda.memory_allocated(self._device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        yield
        end.record()
        self._events.append((key, begin, end))
        if kind == "F" and not message:
            self._kept[stage].append(torch.cuda.memory_allocated(self._device) - before)

    def medians(self) -> dict[tuple[Kind, int], float]:
        """Returns the median seconds of an action with its message, by kind and stage."""
        for key, begin, end in self._events:
            end.synchronize()
            self._seconds[key].append(begin.elapsed_time(end) / 1e3)
        self._events.clear()
        found: dict[tuple[Kind, int], float] = defaultdict(float)
        for (kind, stage, _), seconds in self._seconds.items():
            found[kind, stage] += statistics.median(seconds)
        return dict(found)

    def taken_s(self) -> float:
        """Returns the seconds of everything timed since the last call; waits for it on CUDA."""
        self.medians()
        total = sum(sum(seconds) for seconds in self._seconds.values())
        self._seconds.clear()
        self._kept.clear()
        return total

    def kept_bytes(self, stage: int) -> int:
        """Returns the median bytes a forward of a stage keeps for its backward; 0 on CPUs."""
        return int(statistics.median(self._kept[stage])) if self._kept[stage] else 0
