"""`run_rank`: the whole life of a rank in one attempt, in order; the loop is in `train.loop`."""

from __future__ import annotations

import os
import secrets
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from raypp.errors import RayppError
from raypp.job.job import Job
from raypp.job.load import job_document
from raypp.planning.decision import Decision
from raypp.rank.assemble import AssembledRank, assemble
from raypp.rank.build import forget_frozen
from raypp.rank.joining.abort import abort_groups
from raypp.rank.joining.abort import cut_connections as cut_connections
from raypp.rank.joining.device_memory import device_memory_error, out_of_device_memory
from raypp.rank.joining.device_memory import free_cache as free_cache
from raypp.rank.joining.lost_peer import LostPeerError, explained, lost_peer, origin
from raypp.rank.step.loop import Restored, Training, train
from raypp.rank.step.reports import RecentReports
from raypp.rank.step.resume import Restorable, check_shared, restore_newest
from raypp.rank.step.step import Stopwatch
from raypp.records import RankResult, Reporter, Seat
from raypp.stages.parallel.rank_groups import check_groups
from raypp.stages.pipeline.device_clock import device_marks
from raypp.state.checkpoint.announce import Announcements
from raypp.state.checkpoint.retention import look_after_store
from raypp.state.checkpoint.save import CheckpointSaver
from raypp.state.memory.fetch import from_rank_zero
from raypp.state.memory.restore import open_memory_tier
from raypp.state.memory.tier import Apart, MemoryTier
from raypp.storage import open_store
from raypp.storage.rate_limit import OtherTraffic, Pace
from raypp.storage.store import LONG_S, patience_from_environment
from raypp.torch_private import flight_record as flight_record

if TYPE_CHECKING:
    from raypp.rank.fault_injection import Injection


def run_rank(decision: Decision, seat: Seat, reporter: Reporter, rendezvous: TCPStore | None = None) -> RankResult:
    """Trains until the job's steps are done or the operator requests a stop.

    Collective over the attempt: every rank of the mesh must call it with its own seat.

    Args:
        rendezvous: The store the ranks meet at. None: rank 0 serves one at the seat's address.

    Raises:
        LostPeerError: Another rank died; this rank did not fail.
        DeviceMemoryError: The device is out of memory; says what held it and what would fit.
        DeviceTakenError: It is, because other processes hold memory of it.
        NcclError: NCCL failed because of this rank's card, node or settings; says what helps.
        NotSavedError: The checkpoint after the last step, or before a stop, could not be saved.
        RayppError: Data, checkpoint or store are at fault; the user can fix it.
    """
    try:
        with ExitStack() as stack:
            return _run_attempt(decision, seat, reporter, stack, rendezvous)
    except Exception as error:
        if out_of_device_memory(error):
            raise device_memory_error(error, decision, seat) from error
        if lost_peer(error):
            raise LostPeerError(f"rank {seat.rank} ({seat.label}) lost a peer: {origin(error)}") from error
        if own := explained(error):
            raise own from error
        raise


def _run_attempt(
    decision: Decision, seat: Seat, reporter: Reporter, stack: ExitStack, rendezvous: TCPStore | None
) -> RankResult:
    start, job = Stopwatch(), decision.job
    injection = None
    if faults := os.environ.get("RAYPP_FAULTS"):
        from raypp.rank.fault_injection import Injection, parse_faults

        injection = Injection(parse_faults(faults), seat, job.train.steps)
        reporter = injection.reporter(reporter)

    def part(name: str) -> AbstractContextManager[None]:
        """Reports and times a phase of the start; the data is part of the build."""
        if name != "data":
            reporter.phase(name)
        return start.part(name)

    rank = stack.enter_context(
        assemble(
            decision,
            seat,
            hang_timeout_s=job.recovery.hang_timeout_s,
            rendezvous=rendezvous,
            draw=False,
            part=part,
            mark=device_marks(reporter.phase, "step", torch.device(seat.device, seat.device_index)),
            tell=reporter.event,
        )
    )
    with part("load"):
        restored = _restored(job, rank, reporter, stack, injection)
    if injection is not None:
        injection.watch(rank.built.modules)
    run = Training(rank, restored, reporter, injection)
    stack.callback(run.close)
    try:
        return train(run, start)
    except BaseException as error:
        _let_go(error, restored.tier)
        if out_of_device_memory(error):
            raise device_memory_error(error, decision, seat, rank.built.modules, rank.optimizer) from error
        raise


def _let_go(error: BaseException, tier: MemoryTier | None) -> None:
    """Frees a rank that fails from its peers, and removes snapshots that may be bad."""
    kind = error.failure_kind if isinstance(error, RayppError) else None
    try:
        if kind is not None and kind.traits.in_numbers:
            check_groups()  # numbers computed after a communicator was aborted say nothing
    finally:
        abort_groups()  # before all else: saver and snapshots wait for the device, and it may wait for a peer
    if kind is not None and kind.traits.taints_snapshots:
        forget_frozen()
        if tier is not None:
            tier.close(delete=True)  # only earlier commits are trusted


def _restored(
    job: Job, rank: AssembledRank, reporter: Reporter, stack: ExitStack, injection: Injection | None
) -> Restored:
    """Opens store and memory tier, and restores the newest state. Collective over the world."""
    seat = rank.seat
    if not seat.secret:  # under torchrun there is no other channel than the process group
        seat = replace(seat, secret=from_rank_zero(secrets.token_hex(32) if seat.rank == 0 else None))
    announcements = Announcements(rank.rendezvous, seat.attempt, seat.secret)
    store = open_store(job.checkpoint.url, patience=patience_from_environment(unreachable_s=LONG_S))
    if injection is not None:
        store = injection.store(store)
    check_shared(store, job.name, seat)
    if seat.rank == 0:
        look_after_store(store, job.name, seat, reporter)
    rate = job.checkpoint.max_upload_mbps * 1e6 / 8 / max(1, seat.local_world_size)
    pace = Pace(rate, gives_way=OtherTraffic().is_under_way)
    apart = None if rank.outer is None else Apart(job, rank.outer, rank.groups.replica)
    tier = open_memory_tier(job, seat, store, reporter, pace, apart)
    if tier is not None:
        stack.push(tier.leave)
    recent = RecentReports()
    step, together = restore_newest(Restorable(store, rank, reporter, recent), tier)
    keep, keep_every, document = job.checkpoint.keep, job.checkpoint.keep_every, job_document(job)
    best = job.checkpoint.best.keep if job.checkpoint.best is not None else 0
    saver = CheckpointSaver(
        store, job.name, document, seat, announcements, reporter, keep, keep_every=keep_every, best=best, pace=pace
    )
    if best and seat.rank == 0:
        from raypp.state.run_records.reader import RunReader  # no other rank reads records

        saver.eval_losses |= RunReader(store, job.name).eval_losses()
    stack.callback(saver.close)
    return Restored(store, saver, tier, recent, step, together)
