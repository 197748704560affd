"""Small plain facts between all ranks, between two steps: JSON over the CPU group, never a pickle."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def gather_json(value: Any) -> list[Any]:
    """What every rank said, in rank order. Collective over the world.

    Args:
        value: Plain JSON.
    """
    data = json.dumps(value).encode()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)]))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    said = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(said, padded)
    return [json.loads(text[: int(size)].numpy().tobytes()) for text, size in zip(said, sizes, strict=True)]


def from_rank_zero(value: Any) -> Any:
    """What rank 0 said; the others' values do not matter. Collective over the world."""
    return gather_json(value if dist.get_rank() == 0 else None)[0]


def send_bytes(tensor: torch.Tensor, to: int, piece: int = 64 << 20) -> None:
    """Sends a uint8 tensor in pieces; `receive_bytes` there has one of the same length."""
    for start in range(0, tensor.numel(), piece):
        dist.send(tensor[start : start + piece], to)


def receive_bytes(tensor: torch.Tensor, source: int, piece: int = 64 << 20) -> None:
    """Fills a uint8 tensor with what `send_bytes` sends."""
    for start in range(0, tensor.numel(), piece):
        dist.recv(tensor[start : start + piece], source)
