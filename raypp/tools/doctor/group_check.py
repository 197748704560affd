"""`python -m raypp.tools.doctor.group_check RANK WORLD NODES ADDRESS PORT DEVICE`: one rank of a
test of NCCL, with the groups and the pattern of a run. `raypp doctor --nccl` starts one for each
GPU. On a CPU it tests gloo. Prints one JSON object."""

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from raypp.errors import RayppError, in_words
from raypp.planning.schedules.communication import channels_of
from raypp.ports import place_of
from raypp.rank.joining.cuda_settings import prepare_driver
from raypp.rank.joining.lost_peer import explained, lost_peer
from raypp.records import Coordinates
from raypp.stages.parallel.rank_groups import make_groups
from raypp.stages.pipeline.link_probe import Channels

_VALUES = 16 << 20
_MESSAGE = 16 << 20
_TIMED = 3


def check(rank: int, world: int, nodes: int, address: str, port: int, device: torch.device) -> dict[str, float]:
    """Sums 64 MB over all ranks, sends 16 MB between neighbours, and looks at every number.

    The ranks are those of a mesh: the pipeline crosses the nodes, shards are inside one. Messages
    go one by one over the pipeline's channels, and shards are gathered beside posted receives.

    Args:
        world: Number of ranks, at least two.
        nodes: Number of nodes; with as many ranks on each, the pipeline has one rank on each node.
        address: Where rank 0 listens.

    Returns:
        `all_reduce` and `exchange`: GB/s that each rank sends.

    Raises:
        RayppError: A number has changed on its way.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    where = f"tcp://{place_of(address, port)}"
    dist.init_process_group(backend, where, timedelta(seconds=60), world, rank)
    pattern = torch.arange(_VALUES, dtype=torch.float32, device=device) % 251
    data = torch.empty_like(pattern)

    def all_reduce() -> None:
        torch.add(pattern, rank, out=data)
        dist.all_reduce(data)

    rates = {"all_reduce": _rate(all_reduce, device) * 2 * (world - 1) / world}
    _same(data, pattern * world + world * (world - 1) // 2, "a sum over all ranks")
    pp = nodes if nodes > 1 and world % nodes == 0 else world
    groups = make_groups(Coordinates(pp, 1, world // pp, 1, 1), device.type)
    place, stages = groups.coordinates.pp, range(pp)
    channels = Channels(place, stages, groups.forward, groups.backward, device)
    channels.connect()
    _exchange(channels, groups.mesh["fsdp"].get_group() if pp < world else dist.group.WORLD, pattern[: _MESSAGE // 4])
    times = channels.time(_MESSAGE, dist.barrier)
    rates["exchange"] = _MESSAGE / max(one.wire_s for one in times.values()) / 1e9
    dist.barrier()
    dist.destroy_process_group()
    return rates


def _exchange(channels: Channels, shards: dist.ProcessGroup | None, pattern: torch.Tensor) -> None:
    """Gathers beside posted receives, then sends, as a step does, and looks at what arrived."""
    mine = pattern + channels.rank
    posted = []
    for source, to in channels_of(channels.rank_of_stage):
        group = channels.up if to > source else channels.down
        if to == channels.rank:
            buffer = torch.empty_like(mine)
            posted.append((source, buffer, dist.irecv(buffer, group=group, group_src=source)))
    gathered = torch.empty(dist.get_world_size(shards) * len(mine), device=mine.device)
    place = dist.get_rank(shards)
    dist.all_gather_into_tensor(gathered, pattern + place, group=shards)
    sends = [
        dist.isend(mine, group=channels.up if to > source else channels.down, group_dst=to)
        for source, to in channels_of(channels.rank_of_stage)
        if source == channels.rank
    ]
    for work in (*(work for _, _, work in posted), *sends):
        assert work is not None
        work.wait()
    for source, buffer, _ in posted:
        _same(buffer, pattern + source, "a message between neighbours")
    for source, part in enumerate(gathered.view(-1, len(mine))):
        _same(part, pattern + source, "a gather beside posted receives")


def _rate(run: Callable[[], None], device: torch.device) -> float:
    """Returns the GB/s of a run on 64 MB, after one that connects."""
    run()
    _finish(device)
    start = time.perf_counter()
    for _ in range(_TIMED):
        run()
    _finish(device)
    return _TIMED * _VALUES * 4 / (time.perf_counter() - start) / 1e9


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _same(values: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if wrong := int((values != expected).sum()):
        raise RayppError(f"{wrong} of {expected.numel()} numbers of {what} are wrong")


def main(arguments: list[str]) -> int:
    """Runs one rank and prints its rates, or `error`, `fix` and whether it only lost a peer."""
    prepare_driver()
    rank, world, nodes, port = (int(arguments[place]) for place in (0, 1, 2, 4))
    device = torch.device(arguments[5])
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        print(json.dumps(check(rank, world, nodes, arguments[3], port, device)))  # noqa: T201
    except Exception as error:  # noqa: BLE001  whatever it is, the report says it
        known = explained(error) or error
        problem = known.problems[0] if isinstance(known, RayppError) else None
        fault, fix = (problem.fault, problem.fix) if problem else (in_words(error).strip().splitlines()[-1], "")
        print(json.dumps({"error": fault, "fix": fix, "peer": lost_peer(error)}), flush=True)  # noqa: T201
        os._exit(1)  # leaving the group would wait for the others
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
