"""`run_rank`: the whole life of a rank in one attempt, in order; the loop is in `train.loop`."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import cast

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from raypp.checkpoint.announce import Announcements
from raypp.checkpoint.retention import look_after_store
from raypp.checkpoint.save import CheckpointSaver
from raypp.errors import RayppError
from raypp.memory.restore import open_memory_tier
from raypp.memory.tier import Apart
from raypp.mesh.geometry import Mesh
from raypp.models.stage import parameter_names
from raypp.parallel.rank_groups import check_groups
from raypp.pipeline.device_clock import device_marks
from raypp.records import Coordinates, RankResult, Reporter, Seat
from raypp.spec.job import Job
from raypp.spec.load import job_document
from raypp.storage import ObjectStore, open_store
from raypp.storage.rate_limit import OtherTraffic
from raypp.storage.rate_limit import Pace as CablePace
from raypp.storage.store_retry import LONG_S, patience_from_environment
from raypp.train.abort import abort_groups
from raypp.train.abort import cut_connections as cut_connections
from raypp.train.assemble import AssembledRank, assemble
from raypp.train.between_steps import BetweenSteps
from raypp.train.device_memory import device_memory_error, out_of_device_memory
from raypp.train.device_memory import free_cache as free_cache
from raypp.train.fault_injection import FaultyReporter, FaultyStore, injection_for
from raypp.train.loop import Training, train
from raypp.train.lost_peer import LostPeerError, explained, lost_peer
from raypp.train.recent_reports import RecentReports
from raypp.train.replica_reports import ReplicaReports
from raypp.train.replicas import ReplicaCheck, has_replicas
from raypp.train.resume import Restorable, check_shared, restore_newest
from raypp.train.step import StepRunner, Stopwatch
from raypp.train.step_trace import StepTracer
from raypp.train.stragglers import Pace, SpikeWatch


def run_rank(job: Job, seat: Seat, reporter: Reporter, rendezvous: TCPStore | None = None) -> RankResult:
    """Trains until the job's steps are done or the operator requests a stop.

    Collective over the attempt: every rank of the mesh must call it with its own seat.

    Args:
        job: The job. Submission has decided `train.precision: auto`; else it is bf16 on every card.
        seat: This rank's place in the mesh and the rendezvous address.
        reporter: Takes steps and events, and returns the operator's requests.
        rendezvous: The store the ranks meet at. None: rank 0 serves one at the seat's address.

    Raises:
        LostPeerError: Another rank died; this rank did not fail.
        DeviceMemoryError: The device is out of memory; says what held it and what would fit.
        DeviceTakenError: It is, because other processes hold memory of it.
        NcclError: NCCL failed because of this rank's card, node or settings; says what helps.
        NotSavedError: The checkpoint after the last step, or before a stop, could not be saved.
        RayppError: Data, checkpoint or store are at fault; the user can fix it.
    """
    job = job.for_device(seat.device)
    try:
        with ExitStack() as stack:
            return _run_attempt(job, seat, reporter, stack, rendezvous)
    except Exception as error:
        if out_of_device_memory(error):
            raise device_memory_error(error, job, seat) from error
        if lost_peer(error):
            raise LostPeerError(f"rank {seat.rank} ({seat.label}) lost a peer: {error}") from error
        if own := explained(error):
            raise own from error
        raise


def _run_attempt(job: Job, seat: Seat, reporter: Reporter, stack: ExitStack, rendezvous: TCPStore | None) -> RankResult:
    start = Stopwatch()
    injection = injection_for(seat, job.train.steps)
    if injection is not None:
        reporter = FaultyReporter(reporter, injection)
    rank = stack.enter_context(_assembled(job, seat, reporter, rendezvous, start))

    reporter.phase("load")
    with start.part("load"):
        # Connects before the ranks agree on what they load: otherwise rank 0 could end, and its
        # server with it, before all have connected, if no step is left.
        announcements = Announcements(rank.rendezvous, seat.attempt)
        store = open_store(job.checkpoint.url, patience=patience_from_environment(unreachable_s=LONG_S))
        if injection is not None:
            store = cast(ObjectStore, FaultyStore(store, injection))
        check_shared(store, job.name, seat)
        if seat.rank == 0:
            look_after_store(store, job.name, seat, reporter)
        recent = RecentReports()
        rate = job.checkpoint.max_upload_mbps * 1e6 / 8 / max(1, seat.local_world_size)
        pace = CablePace(rate, gives_way=OtherTraffic().is_under_way)
        apart = None if rank.outer is None else Apart(job, rank.outer, rank.groups.replica)
        tier = open_memory_tier(job, seat, store, reporter, pace, apart)
        if tier is not None:
            stack.push(tier.leave)
        mine = Restorable(
            store, job, rank.built.modules, rank.optimizer, rank.loader, seat, reporter, recent, rank.outer
        )
        restored, together = restore_newest(mine, tier)
    saver = CheckpointSaver(
        store,
        job.name,
        job_document(job),
        seat,
        announcements,
        reporter,
        job.checkpoint.keep,
        keep_every=job.checkpoint.keep_every,
        pace=pace,
    )
    stack.callback(saver.close)
    if injection is not None:
        injection.watch(rank.built.modules)
    first = replace(rank.groups.coordinates, dp_replicate=0) == Coordinates()
    leads = seat.rank == 0 or (first and rank.outer is not None)
    runner = StepRunner(
        rank,
        tell=reporter.event if leads else lambda event: None,
        saving=lambda: saver.busy,
        snapshots=tier.signals if tier is not None else None,
        pace=Pace(rank, restored) if job.recovery.straggler_factor and seat.world_size > 1 else None,
        injection=injection,
    )
    tracer = StepTracer(runner, store, reporter.event)
    stack.callback(tracer.close)
    replicas = _replica_check(rank)
    if replicas is not None and rank.outer is not None:
        replicas.run()  # replicas far apart may have read other stores
    between = BetweenSteps(rank, runner, store, reporter)
    try:
        spikes = SpikeWatch(job.recovery.spike_factor)
        gathered = None
        if rank.outer is not None and rank.outer.replicas > 1 and leads:
            gathered = ReplicaReports(rank.groups.mesh["dp_replicate"].get_group())
        run = Training(
            job, reporter, runner, tracer, replicas, between, saver, tier, recent, spikes, gathered, together
        )
        return train(run, restored, start)
    except BaseException as error:
        kind = error.failure_kind if isinstance(error, RayppError) else None
        try:
            if kind is not None and kind.traits.in_numbers:
                check_groups()  # numbers computed after a communicator was aborted say nothing
        finally:
            abort_groups()  # before all else: saver and snapshots wait for the device, and it may wait for a peer
        if tier is not None and kind is not None and kind.traits.taints_snapshots:
            tier.close(delete=True)  # the snapshots may be bad; only earlier commits are trusted
        if out_of_device_memory(error):
            raise device_memory_error(error, job, seat, rank.built.modules, rank.optimizer) from error
        raise


def _assembled(
    job: Job, seat: Seat, reporter: Reporter, rendezvous: TCPStore | None, start: Stopwatch
) -> AbstractContextManager[AssembledRank]:
    """Assembles the rank without initial weights; reports and times its phases."""

    def part(name: str) -> AbstractContextManager[None]:
        if name != "data":
            reporter.phase(name)
        return start.part(name)

    return assemble(
        job,
        seat,
        hang_timeout_s=job.recovery.hang_timeout_s,
        rendezvous=rendezvous,
        draw=False,
        part=part,
        mark=device_marks(reporter.phase, "step", torch.device(seat.device, seat.device_index)),
        tell=reporter.event,
    )


def _replica_check(rank: AssembledRank) -> ReplicaCheck | None:
    """Builds the check of weights that several ranks hold; None if there are none or it is off.

    Collective over the world.
    """
    job = rank.job
    if job.recovery.check_replicas and has_replicas(job.mesh.dp_replicate, job.mesh.pp, job.model.tie_embeddings):
        return ReplicaCheck(rank.built.modules, parameter_names(job.model), Mesh.of(job.mesh).labels())
    return None
