"""An operation may last as long as a step, in every group. On a GPU the host queues a step at once,
and NCCL counts from then."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

from raypp.parallel.rank_groups import make_groups
from raypp.spec.load import parse_job
from raypp.train import process_group
from raypp.train.own_seat import local_seat
from raypp.train.process_group import allow_long_steps, joined

pytestmark = pytest.mark.ranks

LONGEST_S = 60.0
"""Far more than the second that is set, and far less than the 300 and 1,800 s that groups have."""


def waits(rank: int, world: int, port: int) -> list[float]:
    """Returns how long this rank waits in each of its groups for a peer that does not come."""
    job = parse_job(
        {
            "name": "long",
            "model": {"kind": "llama", "num_layers": 2},
            "data": {"kind": "synthetic"},
            "mesh": {"pp": 2},
            "pipeline": {"microbatches": 2},
        }
    )
    process_group._STEP_S = 1.0
    seat = local_seat(rank, world, port, job)
    found = []
    with joined(seat, 60.0) as store:
        groups = make_groups(seat.mesh_sizes, "cpu")
        allow_long_steps(torch.device("cpu"), 0.5)
        if rank == 0:
            for group in (None, groups.backward):  # the world is also the group of activations
                began = time.monotonic()
                with pytest.raises(RuntimeError):
                    dist.all_reduce(torch.zeros(1), group=group)
                found.append(time.monotonic() - began)
        store.set(f"done {rank}", "")
        store.wait([f"done {other}" for other in range(world)])
    return found


def test_every_group_waits_as_long_as_a_step_may_take_and_no_longer() -> None:
    found, _ = run_ranks(2, waits)
    assert len(found) == 2 and all(1.0 <= seconds < LONGEST_S for seconds in found)
