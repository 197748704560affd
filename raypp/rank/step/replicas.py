"""Verifies before each save that ranks which hold the same weights hold the same bits."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from raypp.errors import RayppError
from raypp.failure_kinds import FailureKind
from raypp.stages.parallel.host_copies import await_on_host
from raypp.stages.parallel.outer_sync import agreed_weights
from raypp.stages.parallel.shard import local_part

_NONE = -(2**62)
_NAMES_SHOWN = 3
_MASK = 2**61 - 1
_PIECE = 1 << 20
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicasDifferError(RayppError):
    """Ranks that hold the same weights hold different bits. Raised on every rank."""

    failure_kind = FailureKind.CORRUPT


class ReplicaCheck:
    """Compares weights that must be equal: along dp_replicate, and both ends of a tied embedding.
    `names`: all parameters of the model, in the same order on all ranks."""

    def __init__(self, stages: Sequence[nn.Module], names: Sequence[str], labels: Sequence[str]) -> None:
        index_of = {name: index for index, name in enumerate(names)}
        self._names, self._labels = list(names), list(labels)
        self._stages = stages
        self._own = {
            name: (index_of[name], *shard_of(parameter))
            for stage in stages
            for name, parameter in stage.named_parameters()
        }
        shards = torch.tensor([max((count for _, _, count in self._own.values()), default=1)])
        dist.all_reduce(shards, op=dist.ReduceOp.MAX)
        self._shards = int(shards)

    @torch.no_grad()
    def run(self) -> None:
        """Compares the checksums of all ranks. Collective over the world, between two steps. Raises
        ReplicasDifferError: names the parameters that differ, and the ranks."""
        slots = len(self._names) * self._shards
        sums: dict[int, list[int]] = defaultdict(list)
        shards = [
            (self._own[name], agreed_weights(stage).get(name, parameter))
            for stage in self._stages
            for name, parameter in stage.named_parameters()
        ]
        await_on_host(weight for _, weight in shards)
        for (index, shard, _), weight in shards:
            sums[index * self._shards + shard].append(checksum(local_part(weight)))
        vector = torch.full((2 * slots,), _NONE, dtype=torch.int64)
        for slot, values in sums.items():
            vector[slot], vector[slots + slot] = max(values), -min(values)
        dist.all_reduce(vector, op=dist.ReduceOp.MAX)
        high, low = vector[:slots], -vector[slots:]
        differing = torch.nonzero((high != low) & (high != _NONE)).flatten().tolist()
        if differing:
            self._raise(differing, sums)

    def _raise(self, differing: Sequence[int], sums: Mapping[int, Sequence[int]]) -> None:
        """Gathers the checksums of differing shards and raises; names the ranks in the minority."""
        checksums = torch.full((len(differing),), _NONE, dtype=torch.int64)
        for position, slot in enumerate(differing):
            if slot in sums:
                checksums[position] = sums[slot][0]
        everyone = [torch.empty_like(checksums) for _ in self._labels]
        dist.all_gather(everyone, checksums)
        table = [
            {rank: int(sent[i]) for rank, sent in enumerate(everyone) if int(sent[i]) != _NONE}
            for i in range(len(differing))
        ]
        names = list(dict.fromkeys(self._names[slot // self._shards] for slot in differing))
        raise ReplicasDifferError(difference_in_words(names, table, self._labels))


def difference_in_words(names: Sequence[str], table: Sequence[Mapping[int, int]], labels: Sequence[str]) -> str:
    """Describes which ranks differ from the others. `table`: for each difference, the checksum of
    each rank that holds the weights."""
    odd: set[int] = set()
    undecided: set[int] = set()
    for held in table:
        counts = Counter(held.values()).most_common()
        if len(counts) > 1 and counts[0][1] > counts[1][1]:
            odd |= {rank for rank, value in held.items() if value != counts[0][0]}
        else:
            undecided |= held.keys()

    def named(ranks: set[int]) -> str:
        return ", ".join(f"rank {rank} ({labels[rank]})" for rank in sorted(ranks)[:8])

    shown = ", ".join(names[:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    who = []
    if odd:
        who.append(f"{named(odd)} differs from most others")
    if undecided:
        who.append(f"{named(undecided)} differ, and it is unknown which is right")
    return f"weights that must be bit-identical differ: {shown}{more}; {'; '.join(who)}"


def checksum(tensor: Tensor) -> int:
    """Returns a position-weighted sum of a tensor's bits, below 2**61. One pass over the memory, in
    pieces. `tensor`: `[...]`, of a dtype with 1, 2, 4 or 8 bytes."""
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view(_WORDS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _PIECE):
        piece = words[start : start + _PIECE].to(torch.int64)
        weights = torch.arange(1, piece.numel() + 1, device=words.device, dtype=torch.int64).bitwise_and_(0xFFFF)
        total = total * 31 + (piece * (2 * weights + 1)).sum()  # wraps around, the same on every rank
    return int(total) & _MASK


def shard_of(parameter: Tensor) -> tuple[int, int]:
    """Returns the index and the number of a parameter's shards; replicated axes do not count.
    `parameter`: a DTensor, or a whole tensor `[...]`, which gives (0, 1)."""
    if not isinstance(parameter, DTensor):
        return 0, 1
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    shard, count = 0, 1
    for index, size, layout in zip(coordinate, parameter.device_mesh.shape, parameter.placements, strict=True):
        if not isinstance(layout, Replicate):
            shard, count = shard * size + index, count * size
    return shard, count
