"""Relates the ranks' clocks to rank 0's, by messages with the shortest round trip."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from raypp.records import Seat

_ROUNDS = 12
"""Messages per node. The first ones connect."""


@dataclass(frozen=True)
class CommonClock:
    """Converts this rank's `time.perf_counter` to rank 0's.

    Attributes:
        offset_s: What to add to this rank's clock.
        error_s: Half of the shortest round trip: the offset is exact to this.
        now_s: Rank 0's clock when the comparison began; the same on every rank.
    """

    offset_s: float
    error_s: float
    now_s: float


def compare_clocks(seat: Seat) -> CommonClock:
    """Compares this rank's clock with rank 0's. Collective over the world.

    Processes of one host read the same clock, so one rank per node exchanges messages with rank 0,
    node after node: a node takes about twelve round trips.
    """
    node_of = torch.zeros(seat.world_size, dtype=torch.int64)
    node_of[seat.rank] = seat.node_rank
    dist.all_reduce(node_of)
    nodes = [int(node) for node in node_of]
    speakers = {node: nodes.index(node) for node in sorted(set(nodes))}
    told = torch.zeros(2 * len(speakers) + 1, dtype=torch.float64)
    if seat.rank == 0:
        told[-1] = time.perf_counter()
    for place, (node, speaker) in enumerate(speakers.items()):
        if node == nodes[0]:
            continue
        if seat.rank == 0:
            _answer(speaker)
        elif seat.rank == speaker:
            told[2 * place], told[2 * place + 1] = _ask()
    dist.all_reduce(told)
    place = list(speakers).index(seat.node_rank)
    return CommonClock(float(told[2 * place]), float(told[2 * place + 1]), float(told[-1]))


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
    """Returns the offset to rank 0's clock, and its error."""
    asked, now = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    found = []
    for _ in range(_ROUNDS):
        sent = time.perf_counter()
        dist.send(asked, 0)
        dist.recv(now, 0)
        came = time.perf_counter()
        found.append((came - sent, float(now[0]) - (sent + came) / 2))
    round_trip, offset = min(found)
    return offset, round_trip / 2
