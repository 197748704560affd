"""Refuses a device that cannot run the job, before anything is built on it."""

import logging
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from raypp.environment import c_compiler
from raypp.errors import JobError, Problem, in_words, size_text
from raypp.job.job import Job
from raypp.job.lora import quantised_base
from raypp.job.precision import GROUPS_FP8, SINCE_FP8, auto_on
from raypp.planning.decision import CERTAIN, CUDA_CONTEXT, Decision, Facts, too_little
from raypp.planning.geometry import Mesh
from raypp.rank.joining.cuda_settings import prepare_allocator, prepare_driver
from raypp.rank.joining.device_memory import DeviceTakenError, card_uuid, changes_that_fit, free_cache, holders
from raypp.rank.joining.network import network_gbps
from raypp.records import Coordinates, Event, Seat
from raypp.retry import Backoff
from raypp.untrusted.sockets import KeyValueStore

log = logging.getLogger(__name__)

_FREED_S = 60.0
"""How long the driver may take to free the memory of a process that was killed."""
_ASK_EVERY_S = 0.5
_SEARCH_S = 20.0
"""Most seconds to look for changes that fit, before training starts."""


@dataclass(frozen=True)
class Card:
    """A CUDA device. `memory`: its memory in bytes. `bus`: its place on the PCI bus, as sysfs names
    it (`0000:1b:00.0`); parts of one card (MIG) have the same. "" if unknown."""

    name: str
    capability: tuple[int, int]
    memory: int
    bus: str = ""


def check_device(decision: Decision, seat: Seat) -> Card:
    """Returns the card of a seat on CUDA. Waits for memory that a dead process still holds. Raises
    JobError: the card is not there, or cannot run the job, or others hold its memory;
    DeviceTakenError: in a later attempt, others hold the memory that the rank had."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    card = card_of(seat.device_index) if seat.device_index < devices else None
    why = "" if devices else why_no_card()
    job, needs = decision.job, decision.needs
    problems = device_problems(job, seat, devices, card, why, torch.cuda.get_arch_list(), c_compiler(), needs)
    if not problems and seat.local_rank == 0 and seat.attempt <= 1:
        problems = host_problems(decision, seat, int(psutil.virtual_memory().available))
    if problems:
        raise JobError(problems)
    assert card is not None
    _wait_for_memory(job, seat, card, needs[seat.coordinates.pp])
    return card


def card_of(index: int) -> Card:
    """Returns the CUDA device of a number."""
    facts: Any = torch.cuda.get_device_properties(index)
    bus = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
    return Card(facts.name, (facts.major, facts.minor), facts.total_memory, bus)


def facts_here(seat: Seat) -> Facts:
    """Returns what decisions take into account, by this process' card and node; others are alike.
    Of a card that is not there only that it is one: `check_device` reports that."""
    if seat.device != "cuda":
        return Facts()
    prepare_driver()
    prepare_allocator()
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if seat.device_index >= devices:
        return Facts("cuda", precision="fp32")
    card, each = card_of(seat.device_index), seat.local_world_size
    return Facts(
        "cuda",
        gpus=(each,) * -(-seat.world_size // each),
        cards=(card.name,),
        memory=card.memory,
        precision=auto_on(card.capability),
        compiler=c_compiler() is not None,
        network_gbps=network_gbps(0),
    )


def why_no_card() -> str:
    """Returns why torch sees no card: no driver, one that is too old, a build without CUDA."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return in_words(error).partition(": ")[2].partition(". ")[0]
    return ""


def _wait_for_memory(job: Job, seat: Seat, card: Card, planned: int) -> None:
    free_cache()
    need = int(CERTAIN * planned) - CUDA_CONTEXT
    reserved = torch.cuda.memory_reserved(seat.device_index)  # frozen weights of the last attempt
    free = wait_for(need, lambda: reserved + free_bytes(lambda: torch.cuda.mem_get_info(seat.device_index)[0]))
    if problem := memory_taken(job, seat, card, need, free, lambda: holders(card_uuid(seat.device_index))):
        raise (JobError if seat.attempt <= 1 else DeviceTakenError)(problem)


def free_bytes(ask: Callable[[], int]) -> int:
    """Returns what `ask` returns; 0 if the device has no room even for a context."""
    try:
        return int(ask())
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        return 0


def wait_for(need: int, ask: Callable[[], int]) -> int:
    """Waits up to a minute until a device has memory free; returns the free bytes then. The driver
    frees the memory of a killed process only after its kernels have ended."""
    free = ask()
    if free < need:
        words = "the device has %s free, %s are needed: waiting for others to end"
        log.warning(words, size_text(free), size_text(need))
    for pause_s in Backoff(_FREED_S, _ASK_EVERY_S, _ASK_EVERY_S).pauses():
        if free >= need:
            break
        time.sleep(pause_s)
        free = ask()
    return free


def memory_taken(
    job: Job, seat: Seat, card: Card, need: int, free: int, held: Callable[[], str] = lambda: ""
) -> Problem | None:
    """Returns a problem if others hold memory of a card that the rank needs."""
    if free >= need:
        return None
    what = (
        f"rank {seat.rank} on {seat.node}, {card.name}: {size_text(need)} are needed, {size_text(free)} of "
        f"{size_text(card.memory)} are free; {held()}"
    )
    fits = changes_that_fit(job, free + CUDA_CONTEXT, patience_s=_SEARCH_S)
    return Problem("resources.device", what, f"end what holds it, or leave this card out; {fits}")


def host_problems(decision: Decision, seat: Seat, available: int) -> list[Problem]:
    """Returns a problem if a node has too little memory for what its ranks offload. `seat`: the
    seat of the node's first rank; its other ranks are assumed to need as much. `available`: bytes
    of host memory that are available, before a rank has allocated any."""
    needed = decision.offloaded[seat.coordinates.pp] * seat.local_world_size
    if needed <= available:
        return []
    what = f"{seat.node} has {size_text(available)} of host memory free; {seat.local_world_size} of its ranks offload "
    fix = "use nodes with more memory or fewer ranks on each, or offload less"
    return [Problem("train", f"{what}{size_text(needed)}", fix)]


def device_problems(
    job: Job,
    seat: Seat,
    there: int,
    card: Card | None,
    why: str = "",
    built_for: Sequence[str] = (),
    compiler: str | None = "cc",
    needs: Sequence[int] = (),
) -> list[Problem]:
    """Returns why a seat's card cannot run the job. `there`: CUDA devices that torch sees.
    `built_for`: architectures of torch's kernels, such as `sm_90`; empty if unknown. `compiler`:
    the node's, for C; None without one. `needs`: planned bytes by pipeline rank."""
    where = f"rank {seat.rank} on {seat.node}"
    if card is None:
        seen = f"torch {torch.__version__} sees {there or 'no'} CUDA device{'' if there == 1 else 's'}"
        what = f"{where} needs cuda:{seat.device_index}, but {seen} there{f' ({why})' if why else ''}"
        fix = "install a CUDA build of torch that fits the driver (nvidia-smi), check CUDA_VISIBLE_DEVICES, or use "
        return [Problem("resources.device", what, f"{fix}resources.device cpu")]
    problems = []
    major, minor = card.capability
    has = f"{where}: {card.name} has compute capability {major}.{minor}"
    if not has_kernels_for(card.capability, built_for):
        what = f"{has}; torch {torch.__version__} has kernels for {', '.join(built_for)} only"
        fix = "install a torch that is built for this card (an older CUDA supports older cards), or use other cards"
        problems.append(Problem("resources.device", what, fix))
    if quantised_base(job.model) == "fp8" and card.capability < SINCE_FP8:
        what = f"{has}; products in fp8 need {SINCE_FP8[0]}.{SINCE_FP8[1]} or newer"
        problems.append(Problem("model.lora.base", what, "use int8 or nf4, or other cards"))
    if job.train.fp8.experts and card.capability != GROUPS_FP8:
        what = f"true, but {has}; torch's products in fp8 of all experts need 9.0"
        problems.append(Problem("train.fp8.experts", what, "use false, or other cards"))
    if card.capability < (since := job.train.dtypes.since):
        what = f"{has}; {job.train.dtypes.name} needs {since[0]}.{since[1]} or newer"
        fix = f"use train.precision {auto_on(card.capability)}, or other cards"
        problems.append(Problem("train.precision", what, fix))
    if job.train.compiles and compiler is None:
        what = f"{where}: torch.compile needs a C compiler, and neither $CC nor cc, gcc or clang is there"
        fix = "install one on that node (apt-get install gcc libc6-dev), or set train.compile false"
        problems.append(Problem("train.compile", what, fix))
    if lack := too_little(needs, card.memory):
        fix = changes_that_fit(job, card.memory, patience_s=_SEARCH_S)
        problems.append(Problem("train", f"{where}, {card.name}: {lack}", fix))
    return problems


def has_kernels_for(capability: tuple[int, int], built_for: Sequence[str]) -> bool:
    """Whether a card can run kernels that were compiled for some architectures. `built_for`: such
    as `sm_86`, which runs on 8.6 to 8.9; `sm_90a`, which runs on 9.0 only; `compute_90`, which the
    driver compiles for 9.0 and newer. Empty: unknown."""
    for name in built_for:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
        if match is None:
            return True
        of = (int(match[2]), int(match[3]))
        if of == capability or (not match[4] and of < capability and (match[1] == "compute" or of[0] == capability[0])):
            return True
    return not built_for


def compare_cards(card: Card, seat: Seat, mesh: Mesh, store: KeyValueStore, tell: Callable[[Event], None]) -> None:
    """Compares the ranks' cards. Collective. Raises JobError: on rank 0, two have the same card."""
    key = f"raypp-card/{seat.run}/{seat.attempt}"
    several = any(os.environ.get(name) for name in ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_HOSTID"))
    place = f"{seat.node} {card.bus}" if card.bus and not several else ""
    store.set(f"{key}/{seat.rank}", f"{card.name}\n{place}")
    if seat.rank:
        return
    answers = [store.get(f"{key}/{rank}").decode().partition("\n") for rank in range(mesh.world)]
    if problems := shared_cards([place for _, _, place in answers], mesh.labels()):
        raise JobError(problems)
    names = [name for name, _, _ in answers]
    if lines := mixed_cards(names, [mesh.coordinates(rank) for rank in range(mesh.world)], mesh.labels()):
        tell(Event("mixed_devices", "; ".join(lines), attempt=seat.attempt))


def shared_cards(places: Sequence[str], labels: Sequence[str]) -> list[Problem]:
    """Returns a problem for each card that several ranks have, which NCCL refuses. `places`: node
    and PCI bus of each rank's card; "" where sharing is allowed or it is unknown."""
    by_place: dict[str, list[str]] = defaultdict(list)
    for place, label in zip(places, labels, strict=True):
        by_place[place].append(label)
    fix = (
        "give each rank a card of its own, by CUDA_VISIBLE_DEVICES or fewer ranks a node; parts of one card (MIG) work "
        "together only from NCCL 2.30 on, with NCCL_MULTI_RANK_GPU_ENABLE=1 in resources.env"
    )
    return [
        Problem(
            "resources.device", f"{', '.join(sharing)} have the same card, {place.replace(' ', ' at PCI bus ')}", fix
        )
        for place, sharing in by_place.items()
        if place and len(sharing) > 1
    ]


def mixed_cards(names: Sequence[str], coordinates: Sequence[Coordinates], labels: Sequence[str]) -> list[str]:
    """Returns one line per pipeline rank whose cards are of different kinds, and one if pipeline
    ranks differ. The ranks of a pipeline rank wait for the slowest of them in every layer, and its
    numbers depend on which card computes which rows. Between pipeline ranks, the layers must be cut
    by speed. `labels`: label of each rank, such as `pp0-fsdp1`."""
    by_stage: dict[int, dict[str, list[str]]] = {}
    for name, place, label in zip(names, coordinates, labels, strict=True):
        by_stage.setdefault(place.pp, {}).setdefault(name, []).append(label)
    lines = [
        f"the ranks of pp{pp} have different cards: {_listed(kinds)}"
        for pp, kinds in sorted(by_stage.items())
        if len(kinds) > 1
    ]
    stages: dict[str, list[str]] = {}
    for pp, kinds in sorted(by_stage.items()):
        stages.setdefault(" and ".join(kinds), []).append(f"pp{pp}")
    if len(stages) > 1:
        lines.append(f"the pipeline has different cards ({_listed(stages)}): `raypp plan --links` cuts layers by speed")
    return lines


def _listed(kinds: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(
        f"{kind} on {', '.join(labels[:4])}{f' and {len(labels) - 4} more' if len(labels) > 4 else ''}"
        for kind, labels in kinds.items()
    )
