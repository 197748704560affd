"""The channels between pipeline ranks: connected in an order that cannot hang, and timed with messages of real size."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from raypp.schedules.communication import channels_of

_ROUNDS = 4
"""Messages one after another on each channel; what a link lets through at once at the beginning is not timed."""


def connect(
    rank: int, rank_of_stage: Sequence[int], up: dist.ProcessGroup, down: dist.ProcessGroup, device: torch.device
) -> None:
    """Sends one number over every channel of the pipeline. Collective over its ranks.

    NCCL connects two ranks when they first talk, and holds both up until it has. Receives are posted long before their
    messages exist, so the first of them would wait for a rank that waits for this one.
    """
    number = torch.zeros(1, device=device)
    for source, to in channels_of(rank_of_stage):
        group = up if to > source else down
        if rank == source:
            dist.send(number, group=group, group_dst=to)
        elif rank == to:
            dist.recv(number, group=group, group_src=source)


def message_seconds(
    rank: int,
    rank_of_stage: Sequence[int],
    up: dist.ProcessGroup,
    down: dist.ProcessGroup,
    device: torch.device,
    size: int,
) -> dict[tuple[int, int], float]:
    """Seconds of a message on each channel that ends at this rank, with all channels of the pipeline busy at once.

    That is how they are in the middle of a step, when a rank between two others has two messages in each direction on
    its one cable. Collective over the pipeline's ranks.

    Args:
        rank: This pipeline rank.
        rank_of_stage: Pipeline rank of every stage.
        up: Group of messages to higher ranks.
        down: Group of messages to lower ranks.
        device: Where messages come from and go to.
        size: Bytes of a message.
    """
    channels = channels_of(rank_of_stage)
    incoming = [channel for channel in channels if channel[1] == rank]
    receives: dict[tuple[int, int], list[dist.Work | None]] = {}
    for source, to in incoming:
        group = up if to > source else down
        buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(_ROUNDS)]
        receives[source, to] = [dist.irecv(buffer, group=group, group_src=source) for buffer in buffers]
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    sends = [
        dist.isend(message, group=up if to > source else down, group_dst=to)
        for _ in range(_ROUNDS)
        for source, to in channels
        if source == rank
    ]
    arrived: dict[tuple[int, int], list[float]] = {channel: [] for channel in incoming}
    for turn in range(_ROUNDS):
        for channel in incoming:
            _wait(receives[channel][turn], device)
            arrived[channel].append(time.perf_counter())
    for send in sends:
        _wait(send, device)
    return {channel: (times[-1] - times[0]) / (_ROUNDS - 1) for channel, times in arrived.items()}


def _wait(work: dist.Work | None, device: torch.device) -> None:
    assert work is not None
    work.wait()
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # there wait() only makes the stream wait
