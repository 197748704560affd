"""An operation may last as long as a step, in every group: NCCL counts from when it is queued."""

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from training import document

from raypp.job.load import parse_job
from raypp.rank.joining import process_group
from raypp.rank.joining.process_group import allow_long_steps, joined
from raypp.rank.own_seat import local_seat
from raypp.stages.parallel.rank_groups import make_groups


def waits(rank: int, world: int, port: int) -> list[str]:
    """Returns what each of this rank's groups says of a peer that does not come."""
    job = parse_job(document(pp=2, microbatches=2))
    process_group._STEP_S = 1.0
    seat = local_seat(rank, world, port, job)
    found = []
    with joined(seat, 60.0) as store:
        groups = make_groups(seat.mesh_sizes, "cpu")
        allow_long_steps(torch.device("cpu"), 0.5)
        if rank == 0:
            for group in (None, groups.backward):  # the world is also the group of activations
                with pytest.raises(RuntimeError) as raised:
                    dist.all_reduce(torch.zeros(1), group=group)
                found.append(str(raised.value))
        store.set(f"done {rank}", "")
        store.wait([f"done {other}" for other in range(world)])
    return found


def test_every_group_waits_as_long_as_a_step_may_take_and_no_longer() -> None:
    found, _ = run_ranks(2, waits)
    assert len(found) == 2 and all("1000ms" in error for error in found), found
