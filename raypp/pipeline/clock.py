"""How long actions take on this rank, for a few steps: by the host's clock on CPUs, by events of the stream on CUDA."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from raypp.schedules.action import Kind


class ActionClock:
    """Notes what forwards and backwards take (not what they wait for), and on CUDA what a forward keeps.

    Args:
        device: Where they are computed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._seconds: dict[tuple[Kind, int, bool], list[float]] = defaultdict(list)
        self._events: list[tuple[tuple[Kind, int, bool], torch.cuda.Event, torch.cuda.Event]] = []
        self._kept: dict[int, list[int]] = defaultdict(list)

    @contextmanager
    def timed(self, kind: Kind, stage: int, *, message: bool = False) -> Iterator[None]:
        """Times what is inside.

        Args:
            message: It packs and hands over the message of an action, which is timed apart.
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
        """Seconds of one action and its message, by kind and stage; on CUDA waits for what was timed."""
        for key, begin, end in self._events:
            end.synchronize()
            self._seconds[key].append(begin.elapsed_time(end) / 1e3)
        self._events.clear()
        found: dict[tuple[Kind, int], float] = defaultdict(float)
        for (kind, stage, _), seconds in self._seconds.items():
            found[kind, stage] += statistics.median(seconds)
        return dict(found)

    def taken_s(self) -> float:
        """Seconds of everything timed since the last call; on CUDA waits for it."""
        self.medians()
        total = sum(sum(seconds) for seconds in self._seconds.values())
        self._seconds.clear()
        self._kept.clear()
        return total

    def kept_bytes(self, stage: int) -> int:
        """Bytes a forward of that stage leaves for its backward, as the allocator saw it; 0 on CPUs: none tells."""
        return int(statistics.median(self._kept[stage])) if self._kept[stage] else 0
