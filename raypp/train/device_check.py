"""Refuses a device that cannot run the job, before anything is built on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import psutil
import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from raypp.errors import JobError, Problem
from raypp.mesh.geometry import Mesh
from raypp.planning.fit import memory_problems
from raypp.planning.host_memory import offloaded_by_ranks
from raypp.planning.stored_bytes import size_text
from raypp.records import Coordinates, Event, Seat
from raypp.spec.job import Job

BF16_SINCE = (8, 0)
"""Compute capability of the first cards with bf16 matrix units and attention kernels (A100)."""


@dataclass(frozen=True)
class Card:
    """A CUDA device.

    Attributes:
        name: For example `NVIDIA H100 80GB HBM3`.
        capability: Its compute capability, for example (9, 0).
        memory: Its memory in bytes.
    """

    name: str
    capability: tuple[int, int]
    memory: int


def check_device(job: Job, seat: Seat) -> Card | None:
    """Returns the seat's card; None on a CPU.

    Raises:
        JobError: The card is not there, or cannot run the job.
    """
    if seat.device != "cuda":
        return None
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    facts = torch.cuda.get_device_properties(seat.device_index) if seat.device_index < there else None
    card = None if facts is None else Card(facts.name, (facts.major, facts.minor), facts.total_memory)
    problems = device_problems(job, seat, there, card)
    if not problems and seat.local_rank == 0 and seat.attempt <= 1:
        problems = host_problems(job, seat, int(psutil.virtual_memory().available))
    if problems:
        raise JobError(problems)
    return card


def host_problems(job: Job, seat: Seat, available: int) -> list[Problem]:
    """Returns a problem if a node has too little memory for what its ranks offload.

    Args:
        job: The job.
        seat: The seat of the node's first rank; its other ranks are assumed to need as much.
        available: Bytes of host memory that are available, before a rank has allocated any.
    """
    needed = offloaded_by_ranks(job)[seat.coordinates.pp] * seat.local_world_size
    if needed <= available:
        return []
    what = f"{seat.node} has {size_text(available)} of host memory free; {seat.local_world_size} of its ranks offload "
    fix = "use nodes with more memory or fewer ranks on each, or offload less"
    return [Problem("train", f"{what}{size_text(needed)}", fix)]


def device_problems(job: Job, seat: Seat, there: int, card: Card | None) -> list[Problem]:
    """Returns why a seat's card cannot run the job.

    Args:
        job: The job.
        seat: The seat.
        there: Number of CUDA devices that torch sees in this process.
        card: The seat's card; None if it is not among them.
    """
    where = f"rank {seat.rank} on {seat.node}"
    if card is None:
        seen = f"torch {torch.__version__} sees {there or 'no'} CUDA device{'' if there == 1 else 's'}"
        what = f"{where} needs cuda:{seat.device_index}, but {seen} there"
        fix = "install a CUDA build of torch that fits the driver (nvidia-smi), check CUDA_VISIBLE_DEVICES, or use "
        return [Problem("resources.device", what, f"{fix}resources.device cpu")]
    problems = []
    if job.train.computes_in == "bf16" and card.capability < BF16_SINCE:
        major, minor = card.capability
        what = f"{where}: {card.name} has compute capability {major}.{minor}; bf16 needs 8.0 (A100) or newer"
        problems.append(Problem("train.precision", what, "use train.precision fp32, or other cards"))
    return problems + [
        Problem(problem.key, f"{where}, {card.name}: {problem.what}", problem.fix)
        for problem in memory_problems(job, card.memory)
    ]


def tell_of_mixed_cards(card: Card, seat: Seat, mesh: Mesh, store: Store, tell: Callable[[Event], None]) -> None:
    """Tells, on rank 0, which pipeline ranks have cards of different kinds. Collective.

    Args:
        card: This rank's card.
        seat: Its seat.
        mesh: The job's mesh.
        store: The store the ranks met at.
        tell: Called on rank 0 with the event, if there is one.
    """
    key = f"raypp-card/{seat.run}/{seat.attempt}"
    store.set(f"{key}/{seat.rank}", card.name)
    if seat.rank:
        return
    names = [store.get(f"{key}/{rank}").decode() for rank in range(mesh.world)]
    if lines := mixed_cards(names, [mesh.coordinates(rank) for rank in range(mesh.world)], mesh.labels()):
        tell(Event("mixed_devices", "; ".join(lines), attempt=seat.attempt))


def mixed_cards(names: Sequence[str], coordinates: Sequence[Coordinates], labels: Sequence[str]) -> list[str]:
    """Returns one line per pipeline rank whose cards are of different kinds.

    Its ranks wait for the slowest of them in every layer, and its numbers depend on which card
    computes which rows.

    Args:
        names: Name of each rank's card.
        coordinates: Coordinates of each rank.
        labels: Label of each rank, such as `pp0-fsdp1`.
    """
    by_stage: dict[int, dict[str, list[str]]] = {}
    for name, place, label in zip(names, coordinates, labels, strict=True):
        by_stage.setdefault(place.pp, {}).setdefault(name, []).append(label)
    return [
        f"the ranks of pp{pp} have different cards: {_listed(kinds)}"
        for pp, kinds in sorted(by_stage.items())
        if len(kinds) > 1
    ]


def _listed(kinds: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(
        f"{kind} on {', '.join(labels[:4])}{f' and {len(labels) - 4} more' if len(labels) > 4 else ''}"
        for kind, labels in kinds.items()
    )
