"""Tests the groups of a mesh on CPUs: whom each axis joins, and that axes of size 1 cost no thread
each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness import run_ranks
from test_mesh_does_not_change_numbers import document
from training import seat_of

from raypp.parallel.rank_groups import AXES, make_groups
from raypp.spec.load import parse_job
from raypp.train.process_group import joined

pytestmark = pytest.mark.ranks


def groups_of(rank: int, world: int, port: int, source: dict[str, Any]) -> tuple[dict[str, list[int]], int]:
    """Returns the ranks of each axis' group, and how many threads of gloo this process has."""
    seat = seat_of(rank, world, port, parse_job(source))
    with joined(seat, 60):
        groups = make_groups(seat.mesh_sizes, "cpu")
        found = {axis: dist.get_process_group_ranks(groups.mesh[axis].get_group()) for axis in AXES}
        assert dist.get_process_group_ranks(groups.backward) == found["pp"]
        assert groups.backward is not groups.forward
        # The kernel keeps 15 characters of a thread's name.
        names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        dist.barrier()  # rank 0 must not leave, and the store with it, while others still connect
    return found, names.count("gloo_tcp_loop")


def test_axes_of_size_1_share_one_group() -> None:
    for rank, (found, threads) in enumerate(run_ranks(2, groups_of, document(pp=2, microbatches=2))):
        assert found == {"pp": [0, 1], "dp_replicate": [rank], "fsdp": [rank], "cp": [rank]}
        assert threads == 3, "of the world, of this rank alone, of gradients between stages"


def test_each_axis_joins_the_ranks_that_differ_in_it_alone() -> None:
    for rank, (found, threads) in enumerate(run_ranks(4, groups_of, document(pp=2, fsdp=2, microbatches=2))):
        assert found["pp"] == [rank % 2, rank % 2 + 2]
        assert found["fsdp"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert found["dp_replicate"] == found["cp"] == [rank]
        assert threads == 5
