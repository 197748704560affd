"""What ranks tell each other over the CPU process group, and parts of snapshots that they send.

Metadata is JSON, never a pickle. A part is announced, then sent if wanted: no peer is believed.
"""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_NONE = -1
"""The size of a part that the sender does not have."""
_PIECE_BYTES = 64 << 20


def give(part: Tensor | None, to: int) -> None:
    """Sends a uint8 tensor `[N]` to a rank that calls `take`; None: this rank does not have it."""
    dist.send(torch.tensor([_NONE if part is None else part.numel()]), to)
    if part is None:
        return
    wanted = torch.zeros(1, dtype=torch.int64)
    dist.recv(wanted, to)
    for start in range(0, part.numel() if wanted else 0, _PIECE_BYTES):
        dist.send(part[start : start + _PIECE_BYTES], to)


def take(source: int, least: int, most: int) -> Tensor:
    """Receives what `give` sends: uint8 `[N]`, `least` ≤ N ≤ `most`. Raises ValueError: the sender
    does not have it, or announces another size."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, source)
    if int(size) == _NONE:
        raise ValueError(f"is not intact on rank {source}'s node")
    wanted = least <= int(size) <= most
    dist.send(torch.tensor([int(wanted)]), source)
    if not wanted:
        raise ValueError(f"cannot come from rank {source}'s node, which announces {int(size)} bytes")
    part = torch.zeros(int(size), dtype=torch.uint8)
    for start in range(0, part.numel(), _PIECE_BYTES):
        dist.recv(part[start : start + _PIECE_BYTES], source)
    return part


def gather_json(value: Any) -> list[Any]:
    """Gathers a value from every rank, in rank order. Collective over the world."""
    data = json.dumps(value).encode()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)]))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    texts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(texts, padded)
    return [json.loads(text[: int(size)].numpy().tobytes()) for text, size in zip(texts, sizes, strict=True)]


def from_rank_zero(value: Any) -> Any:
    """Returns rank 0's value and ignores the others'. Collective over the world."""
    return gather_json(value if dist.get_rank() == 0 else None)[0]
