"""From a job and a seat to a rank that can run steps: groups, stages, optimizer, reducer, rows. The one way there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from raypp.data.loader import Loader, open_loader
from raypp.models.stage import parameter_names
from raypp.parallel.rank_groups import RankGroups, make_groups
from raypp.planning.resolve import ResolvedPipeline, resolve_pipeline
from raypp.records import Event, Seat
from raypp.spec.job import Job
from raypp.train.build import BuiltStages, build_stages
from raypp.train.optimizer import build_optimizer
from raypp.train.process_group import joined, pick_device
from raypp.train.reduce import GradientReducer


@dataclass(frozen=True)
class AssembledRank:
    """What a rank computes its steps with.

    Attributes:
        job: The job.
        seat: This rank's.
        device: Where it computes.
        pipeline: The job's, resolved.
        rendezvous: The key-value store at which the ranks met.
        groups: Its process groups.
        built: Its stages and the runtime that drives them.
        optimizer: Over the parameters of its stages.
        reducer: Over the same parameters.
        loader: Its replica's rows.
    """

    job: Job
    seat: Seat
    device: torch.device
    pipeline: ResolvedPipeline
    rendezvous: TCPStore
    groups: RankGroups
    built: BuiltStages
    optimizer: torch.optim.Optimizer
    reducer: GradientReducer
    loader: Loader


@contextmanager
def assemble(
    job: Job,
    seat: Seat,
    *,
    hang_timeout_s: float,
    rendezvous: TCPStore | None = None,
    draw: bool = True,
    part: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    mark: Callable[[str], None] = lambda action: None,
    tell: Callable[[Event], None] = lambda event: None,
) -> Iterator[AssembledRank]:
    """Joins the attempt, and builds everything that a step needs; leaves and closes it at the end.

    Collective over the world.

    Args:
        job: The job.
        seat: This rank's.
        hang_timeout_s: Longest a collective may take once the run is under way.
        rendezvous: Where the ranks meet, when it is there already; None: rank 0 serves one at the seat's address.
        draw: Give the weights their first values; False: the caller gives every one of them a value.
        part: Entered around `rendezvous`, `build` and `data`, with that name.
        mark: Told every action of the schedule as it begins.
        tell: Hears of the network.

    Raises:
        UnreachableError: Two nodes do not reach each other.
        RayppError: Something else that the user can act on (data, sizes).
    """
    device = pick_device(seat)
    with ExitStack() as stack:
        with part("rendezvous"):
            store = stack.enter_context(joined(seat, hang_timeout_s, rendezvous, tell))
            groups = make_groups(seat.mesh_sizes, device.type, job.mesh.ep)
        with part("build"):
            pipeline = resolve_pipeline(job)
            built = build_stages(job, pipeline, groups, device, mark, draw=draw)
            optimizer = build_optimizer(built.modules, job.train.optimizer, job.train.precision)
            reducer = GradientReducer(built.modules, parameter_names(job.model))
        with part("data"):
            loader = open_loader(job, seat.replica, job.mesh.replicas)
        stack.callback(loader.close)
        yield AssembledRank(job, seat, device, pipeline, store, groups, built, optimizer, reducer, loader)
