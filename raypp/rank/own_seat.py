"""Seats without a controller: for ranks on one machine, and for processes started by torchrun."""

import os
import socket
from dataclasses import replace

import torch

from raypp.errors import JobError, Problem
from raypp.job.job import Job
from raypp.planning.geometry import Mesh
from raypp.rank.joining.cuda_settings import prepare_driver
from raypp.records import Seat


def local_seat(rank: int, world: int, port: int, job: Job, *, attempt: int = 1, device: str = "cpu") -> Seat:
    """Returns the seat of a rank on this machine; the ranks meet at a loopback port. `device`:
    `cpu`, `cuda` (each rank has its own), or for example `cuda:0` (all share that one)."""
    kind, _, index = device.partition(":")
    mesh = Mesh.of(job.mesh)
    if mesh.world != world:
        raise ValueError(f"{world} processes for a mesh of {mesh.world}")
    return Seat(
        run=job.name,
        attempt=attempt,
        rank=rank,
        world_size=world,
        coordinates=mesh.coordinates(rank),
        mesh_sizes=mesh.sizes,
        local_rank=rank,
        local_world_size=world,
        master_port=port,
        device=kind,
        device_index=int(index) if index else rank,
    )


def seat_from_environment(job: Job) -> Seat:
    """Returns this process's seat from torchrun's variables (RANK, WORLD_SIZE, …). Its attempt is 0
    until claimed. Raises JobError: a variable is missing, or the world size is not the mesh's."""
    environment = os.environ
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        how = "start it with: torchrun --local-addr 127.0.0.1 --nproc-per-node N -m raypp.rank --job JOB"
        raise JobError(Problem("", f"{', '.join(missing)} not set", how))
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if world != job.mesh.world:
        fix = f"start {job.mesh.world} processes in total, or change the mesh"
        raise JobError(Problem("mesh", f"the mesh has {job.mesh.world} ranks, but torchrun started {world}", fix))
    local = int(environment.get("LOCAL_RANK", rank))
    device = f"{_device(job.resources.device)}:{local}"
    return replace(
        local_seat(rank, world, int(environment["MASTER_PORT"]), job, attempt=0, device=device),
        local_rank=local,
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", 1)),
        node_rank=int(environment.get("GROUP_RANK", 0)),
        node=socket.gethostname(),
        master_addr=environment["MASTER_ADDR"],
    )


def _device(asked: str) -> str:
    if asked != "auto":
        return asked
    prepare_driver()
    return "cuda" if torch.cuda.is_available() else "cpu"
