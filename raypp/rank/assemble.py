"""Assembles a rank that can run steps: groups, stages, optimizer, reducer, loader."""

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from raypp.errors import JobError
from raypp.job.job import Job
from raypp.job.optimizer_groups import group_problems
from raypp.planning.decision import Decision, ResolvedPipeline
from raypp.planning.geometry import Mesh
from raypp.planning.offload import offload_in_words
from raypp.rank.build import BuiltStages, FrozenPart, build_stages, take_frozen
from raypp.rank.data.loader import Loader, open_loader, passes_in_words
from raypp.rank.device_check import Card, check_device, compare_cards
from raypp.rank.joining.abort import cut_connections
from raypp.rank.joining.cuda_settings import (
    bind_near,
    check_allocator,
    cuda_event,
    prepare_allocator,
    prepare_driver,
    set_product_precision,
    share_compile_threads,
)
from raypp.rank.joining.process_group import allow_long_steps, joined, pick_device
from raypp.rank.optimizers.optimizer import build_optimizer
from raypp.rank.optimizers.reduce import GradientReducer
from raypp.records import Event, Seat
from raypp.stages.models import fused
from raypp.stages.models.attention import AttentionKernel
from raypp.stages.models.stage import parameter_names
from raypp.stages.parallel.apply import compute_dtype
from raypp.stages.parallel.attention_choice import choose_attention
from raypp.stages.parallel.delta_rule_choice import with_delta_rule
from raypp.stages.parallel.outer_sync import OuterSync
from raypp.stages.parallel.rank_groups import RankGroups, make_groups
from raypp.untrusted.sockets import SignedKeys

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AssembledRank:
    """Everything a rank needs to compute steps. `rendezvous`: the key-value store the ranks met at.
    `outer`: takes the outer steps; None if replicas do not train apart. `frozen`: the frozen
    weights of this rank that may be kept for the next attempt. `kept`: names of those that were
    kept from the last one, and have their values."""

    decision: Decision
    seat: Seat
    device: torch.device
    rendezvous: TCPStore
    groups: RankGroups
    built: BuiltStages
    optimizer: torch.optim.Optimizer
    reducer: GradientReducer
    loader: Loader
    attention: AttentionKernel
    outer: OuterSync | None = None
    frozen: FrozenPart | None = None
    kept: Collection[str] = ()

    @property
    def job(self) -> Job:
        return self.decision.job

    @property
    def pipeline(self) -> ResolvedPipeline:
        return self.decision.pipeline


@contextmanager
def assemble(
    decision: Decision,
    seat: Seat,
    *,
    hang_timeout_s: float,
    rendezvous: TCPStore | None = None,
    draw: bool = True,
    part: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    mark: Callable[[str], None] = lambda action: None,
    tell: Callable[[Event], None] = lambda event: None,
) -> Iterator[AssembledRank]:
    """Joins the attempt and builds what steps need; cleans up at the end.

    Collective over the world.

    Args:
        hang_timeout_s: Maximum duration of a collective once the run is under way.
        rendezvous: The store the ranks meet at. None: rank 0 serves one at the seat's address.
        draw: True: initialise the weights. False: the caller must set every weight.
        part: Called with `rendezvous`, `build` and `data`; returns a context entered around it.

    Raises:
        UnreachableError: Two nodes cannot reach each other.
        JobError: The rank's device is not there, or cannot run the job.
        DeviceTakenError: Other processes hold the device's memory.
        RayppError: The data or the sizes do not fit; the user can fix it.
    """
    job, pipeline = decision.job, decision.pipeline
    device, card = open_device(decision, seat, tell)
    with ExitStack() as stack:
        with part("rendezvous"):
            store = stack.enter_context(joined(seat, hang_timeout_s, rendezvous, tell))
            if card is not None:
                compare_cards(card, seat, Mesh.of(job.mesh), SignedKeys(store, seat.secret), tell)
            if seat.rank == 0 and decision.ctas_words:
                tell(seat.event("network", decision.ctas_words, ctas=decision.ctas))
            apart = job.outer is not None
            groups = make_groups(seat.mesh_sizes, device.type, job.mesh.ep, apart=apart, ctas=decision.ctas)
        with part("build"):
            attention = _attention(job, seat, device, tell)
            if seat.rank == 0 and (words := decision.remarks.get("train.compile")):
                tell(seat.event("compile", f"train.compile: auto: {words}"))
            place = groups.coordinates
            layers = [pipeline.layers_of_stage[stage] for stage in pipeline.stages_of_rank[place.pp]]
            frozen = None if draw else FrozenPart.of(job, layers, place, str(device))
            kept = take_frozen(frozen)
            built = build_stages(job, pipeline, groups, device, mark, draw=draw, kept=kept)
            optimizer = optimizer_of(job, built, device, stack)
            if seat.rank == 0 and (words := offload_in_words(job, device.type == "cpu")):
                tell(seat.event("offload", words))
            names, outer = parameter_names(job.model, trained=True), None
            if problems := list(group_problems(names, job.train.optimizer.groups)):  # also of models of one's own
                raise JobError(problems)
            if job.outer is not None:
                changed = getattr(optimizer, "weights_changed", lambda: None)
                assert groups.outer is not None
                outer = OuterSync(built.modules, job.outer, job.train.steps, names, groups.outer, changed)
                stack.push(partial(_end_exchanges, outer, seat))
            reducer = GradientReducer(built.modules, names, groups.replica, first=place.tp == 0)
            allow_long_steps(device, hang_timeout_s)  # all groups are there now
            if device.type == "cuda":
                # Connects the ranks, which NCCL would do in the sums of the first step.
                dist.all_reduce(torch.zeros(1, device=device), group=groups.replica)
        with part("data"):
            loader = open_loader(job, seat.replica, job.mesh.replicas)
            if seat.rank == 0 and (words := loader.documents.in_words(job.data)):
                counts = {"documents": loader.documents.total, "too_long": loader.documents.too_long}
                tell(seat.event("data", words, **counts))
            once = seat.rank == 0 and seat.attempt == 1  # later attempts do not wait for the rows to be counted
            passes = passes_in_words(loader.documents, job) if once else ""
            unused = loader.documents.unused_in_words() if once else ""
            for remark in filter(None, (passes, unused)):
                tell(seat.event("data", remark))
        stack.callback(loader.close)
        yield AssembledRank(
            decision, seat, device, store, groups, built, optimizer, reducer, loader, attention, outer, frozen,
            tuple(kept),
        )  # fmt: skip


def open_device(decision: Decision, seat: Seat, tell: Callable[[Event], None]) -> tuple[torch.device, Card | None]:
    """Returns the seat's device, now current, and its card, checked; None on a CPU. On CUDA the
    process is set up before, and rank 0 reports how."""
    share_compile_threads(seat.local_world_size)  # while all CPUs are allowed
    if seat.device != "cuda":
        return pick_device(seat), None
    prepare_driver()  # this and the allocator before CUDA is used
    allocator = prepare_allocator()
    card = check_device(decision, seat)
    if cpus := bind_near(card.bus):
        log.info("rank %d: on %s", seat.rank, cpus)
    device = pick_device(seat)
    allocator = check_allocator(allocator, lambda: torch.empty(1, device=device))
    set_product_precision(tf32=decision.job.train.tf32)
    if seat.rank == 0:
        tell(cuda_event(decision.job.train, seat, allocator, card.name, fused.reason_against(device), cpus))
    return device, card


def optimizer_of(job: Job, built: BuiltStages, device: torch.device, stack: ExitStack) -> torch.optim.Optimizer:
    """Builds the optimizer of a rank's stages; the stack releases its host memory."""
    optimizer = build_optimizer(built.modules, job.train.optimizer, job.train.precision, job.train.seed)
    if not job.train.optimizer.offload:
        return optimizer
    from raypp.rank.optimizers.optimizer_offload import OffloadedOptimizer

    masters = compute_dtype(job) if job.train.dtypes.copies_weights else None
    offloaded = OffloadedOptimizer(optimizer, built.modules, device, masters=masters)
    stack.callback(offloaded.close)
    return offloaded


def _end_exchanges(outer: OuterSync, seat: Seat, _kind: object, error: BaseException | None, _trace: object) -> None:
    """Ends the exchanges beside the compute before groups are destroyed, at once after an error."""
    outer.close(*() if error is None else (partial(cut_connections, seat.master_port),))


def _attention(job: Job, seat: Seat, device: torch.device, tell: Callable[[Event], None]) -> AttentionKernel:
    """Chooses this rank's attention kernel, and reports it if there was a choice: rank 0 for all,
    another rank if a kernel failed there."""
    choice = with_delta_rule(choose_attention(job, device), job, device)
    if device.type == "cuda":
        log.info("rank %d: %s", seat.rank, choice)
        if seat.rank == 0 or choice.failed:
            tell(seat.event("attention", str(choice), kernel=choice.kernel.name, against=choice.against))
    return choice.kernel
