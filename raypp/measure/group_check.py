"""`python -m raypp.measure.group_check RANK WORLD ADDRESS PORT DEVICE`: one rank of a test of NCCL.

`raypp doctor --nccl` starts one for each GPU. A process that hangs or crashes disturbs nothing. On
a CPU it tests gloo. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from raypp.errors import RayppError, in_words
from raypp.ports import place_of
from raypp.train.cuda_settings import prepare_driver
from raypp.train.lost_peer import explained, lost_peer

_VALUES = 16 << 20
_TIMED = 3


def check(rank: int, world: int, address: str, port: int, device: torch.device) -> dict[str, float]:
    """Sums 64 MB over all ranks, passes 64 MB to the next rank, and looks at every number.

    Args:
        rank: This process' rank.
        world: Number of ranks, at least two.
        address: Where rank 0 listens.
        port: Its port.
        device: The device of the data.

    Returns:
        `all_reduce` and `exchange`: GB/s that each rank sends.

    Raises:
        RayppError: A number has changed on its way.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    where = f"tcp://{place_of(address, port)}"
    dist.init_process_group(backend, where, timedelta(seconds=60), world, rank)
    pattern = torch.arange(_VALUES, dtype=torch.float32, device=device) % 251
    data, received = torch.empty_like(pattern), torch.empty_like(pattern)

    def all_reduce() -> None:
        torch.add(pattern, rank, out=data)
        dist.all_reduce(data)

    def exchange() -> None:
        torch.add(pattern, rank, out=data)
        received.zero_()
        send = dist.P2POp(dist.isend, data, (rank + 1) % world)
        receive = dist.P2POp(dist.irecv, received, (rank - 1) % world)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    rates = {"all_reduce": _rate(all_reduce, device) * 2 * (world - 1) / world}
    _same(data, pattern * world + world * (world - 1) // 2, "a sum over all ranks")
    rates["exchange"] = _rate(exchange, device)
    _same(received, pattern + (rank - 1) % world, "a message between neighbours")
    dist.barrier()
    dist.destroy_process_group()
    return rates


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
    """Compares tensors `[n]`.

    Raises:
        RayppError: They differ.
    """
    if wrong := int((values != expected).sum()):
        raise RayppError(f"{wrong} of {expected.numel()} numbers of {what} are wrong")


def main(arguments: list[str]) -> int:
    """Runs one rank and prints its rates, or `error`, `fix` and whether it only lost a peer."""
    prepare_driver()
    rank, world, port = (int(arguments[place]) for place in (0, 1, 3))
    device = torch.device(arguments[4])
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        print(json.dumps(check(rank, world, arguments[2], port, device)))  # noqa: T201
    except Exception as error:  # noqa: BLE001  whatever it is, the report says it
        known = explained(error) or error
        problem = known.problems[0] if isinstance(known, RayppError) else None
        fault, fix = (problem.fault, problem.fix) if problem else (in_words(error).strip().splitlines()[-1], "")
        print(json.dumps({"error": fault, "fix": fix, "peer": lost_peer(error)}), flush=True)  # noqa: T201
        os._exit(1)  # leaving the group would wait for the others
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
