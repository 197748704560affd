"""The channels between pipeline ranks: connects them without deadlock, and times them."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from raypp.planning.schedules.communication import channels_of

_ROUNDS = 5
"""Messages per channel, one after another. The first is not timed: it may fit into buffers."""


@dataclass(frozen=True)
class Channel:
    """What a message takes on one channel. `wire_s`: seconds while no other channel of the pipeline
    uses the cards at either end. `crowded_s`: seconds while all channels are in use. Cards that
    several channels share make it longer."""

    wire_s: float
    crowded_s: float


@dataclass(frozen=True)
class Channels:
    """The channels of a pipeline, at one of its ranks. Both methods are collective over its ranks.
    `up`: group of messages to higher ranks. `down`: group of messages to lower ranks."""

    rank: int
    rank_of_stage: Sequence[int]
    up: dist.ProcessGroup
    down: dist.ProcessGroup
    device: torch.device

    def connect(self) -> None:
        """Sends one number over every channel. NCCL connects two ranks at their first message,
        which takes long and blocks both: not in the first step, pair after pair."""
        number = torch.zeros(1, device=self.device)
        for source, to in channels_of(self.rank_of_stage):
            if self.rank == source:
                dist.send(number, group=self._group(source, to), group_dst=to)
            elif self.rank == to:
                dist.recv(number, group=self._group(source, to), group_src=source)

    def time(self, size: int, together: Callable[[], None]) -> dict[tuple[int, int], Channel]:
        """Measures the seconds of a message on each channel that ends at this rank.

        First in a few turns, in each of which no rank has more than one message to send and one to
        receive at a time: that is what the wire needs. Then with all channels in use, as in the
        middle of a step: that is the wire and the queue at its cards. Only receivers take times,
        each the difference between messages that follow one another without a pause, so no clocks
        are compared and no wait for a sender is counted. `size`: bytes of a message, a uint8 tensor
        `[size]`. `together`: waits for all ranks that may use the same cards, in this pipeline and
        in others. Returns by (source rank, this rank).
        """
        channels = channels_of(self.rank_of_stage)
        wire: dict[tuple[int, int], list[float]] = {}
        for turn in turns_of(channels):
            together()
            wire |= self._intervals(turn, size)
        together()
        crowded = self._intervals(channels, size)
        # Alone, messages arrive evenly, and one that is late has a cause outside. Among others, a
        # card may serve one channel for a while and then another.
        return {
            channel: Channel(statistics.median(wire[channel]), statistics.mean(seconds))
            for channel, seconds in crowded.items()
        }

    def _group(self, source: int, to: int) -> dist.ProcessGroup:
        return self.up if to > source else self.down

    def _intervals(self, channels: Sequence[tuple[int, int]], size: int) -> dict[tuple[int, int], list[float]]:
        """Returns the seconds between messages on these channels, all in use at once."""
        device = self.device
        incoming = [channel for channel in channels if channel[1] == self.rank]
        message = torch.zeros(size, dtype=torch.uint8, device=device)
        buffers = [torch.empty_like(message) for _ in range(_ROUNDS * len(incoming))]
        receives: dict[tuple[int, int], list[dist.Work | None]] = {channel: [] for channel in incoming}
        sends: list[dist.Work | None] = []
        # All ranks post in one order, so none hangs if it has to wait for what it has posted.
        for _ in range(_ROUNDS):
            for source, to in channels:
                group = self._group(source, to)
                if to == self.rank:
                    receives[source, to].append(dist.irecv(buffers.pop(), group=group, group_src=source))
                elif source == self.rank:
                    sends.append(dist.isend(message, group=group, group_dst=to))
        arrived: dict[tuple[int, int], list[float]] = {channel: [] for channel in incoming}
        for turn in range(_ROUNDS):
            for channel in incoming:
                _wait(receives[channel][turn], device)
                arrived[channel].append(time.perf_counter())
        for send in sends:
            _wait(send, device)
        return {channel: [b - a for a, b in pairwise(times)] for channel, times in arrived.items()}


def turns_of(channels: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Divides channels into turns in which each rank sends on at most one and receives on one."""
    turns: list[list[tuple[int, int]]] = []
    for source, to in channels:
        free = (turn for turn in turns if all(source != other and to != target for other, target in turn))
        turn = next(free, None)
        if turn is None:
            turns.append(turn := [])
        turn.append((source, to))
    return turns


def _wait(work: dist.Work | None, device: torch.device) -> None:
    assert work is not None
    work.wait()
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # on CUDA wait() blocks only the stream
