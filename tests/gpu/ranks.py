"""Runs several ranks on one device: by NCCL on one GPU, by gloo on a machine without a GPU.

NCCL refuses two ranks on one GPU of one host. With an `NCCL_HOSTID` of its own, each process counts
as a host, and the ranks exchange their messages through sockets of the loopback interface. This is
real NCCL, but slow: it shows what works, not how fast.

A test that uses this runs in both places, so that it is known to work before it meets a GPU. Do not
mark it `gpu`:

    from ranks import train

    def test_zbv_gives_the_losses_of_one_rank() -> None:
        one, two = train({**JOB, "mesh": {"pp": 1}}, 3), train({**JOB, "mesh": {"pp": 2}}, 3)
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import run_in_turn, run_ranks
from training import merged, train_steps

from raypp.environment import NCCL_OF_TORCH
from raypp.job.load import parse_job
from raypp.planning.geometry import Mesh
from raypp.rank.joining.cuda_settings import prepare_driver

prepare_driver()  # before CUDA is asked for a device; the ranks' processes inherit it
DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
"""The device that all ranks of a test share."""


def run_on_one_device(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Calls `function(rank, world, port, *arguments)` in `world` processes that share `DEVICE`.
    Returns the results in rank order. Fails as `harness.run_ranks` does."""
    return run_ranks(world, _as_a_host_of_its_own, function, arguments)


def run_in_turn_on_one_device(world: int, function: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Like `run_on_one_device` for several cases, which the same processes run one after another.

    Returns, for each case, the results in rank order.
    """
    return run_in_turn(world, _as_a_host_of_its_own, [(function, case) for case in cases])


def train(document: dict[str, Any], steps: int, device: str = DEVICE) -> dict[str, Any]:
    """Trains some steps of a job, all ranks on one device; returns what `training.merged`
    returns: losses, norms, gradients of every step and final weights."""
    world = Mesh.of(parse_job(document).mesh).world
    return merged(run_on_one_device(world, train_steps, document, steps, device))


def share_the_device(rank: int, world: int, port: int) -> None:
    """Prepares a rank's process to use the same GPU as other ranks. Does nothing without a GPU."""
    if torch.cuda.is_available():
        os.environ.update(
            NCCL_HOSTID=f"raypp-{port}-{rank}",
            NCCL_MULTI_RANK_GPU_ENABLE="1",  # NCCL 2.30 also has a switch for it
            NCCL_NET="Socket",
            NCCL_SOCKET_IFNAME="lo",
        )
        for key, setting in NCCL_OF_TORCH.items():  # as in raypp's own processes, or a failure ends them
            os.environ.setdefault(key, setting)
        # No rank takes the others' memory.
        torch.cuda.set_per_process_memory_fraction(0.9 / world, 0)


def _as_a_host_of_its_own(
    rank: int, world: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    share_the_device(rank, world, port)
    return function(rank, world, port, *arguments)
