"""Bytes and seconds of what is kept in host memory instead of on the device.

`train.optimizer.offload` keeps the optimizer's state there and, with precision bf16, the fp32
weights; `train.activation_checkpointing: offload` the inputs of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raypp.planning.end_weights import activation_bytes
from raypp.schedules.action import Action
from raypp.spec.job import Job

BLOCK = 2**25
"""Parameters of a block that is updated at once, unless a single one is larger."""
BLOCKS_ON_DEVICE = 3
"""One block arrives, one is updated, one leaves. A parameter larger than all three comes alone."""

AHEAD = 2
"""Inputs of layers that are on their way back, or not sent away because their backward follows."""
LEAVING = 2
"""Inputs of layers whose copy to host memory is under way."""
ON_DEVICE = 2 * AHEAD + LEAVING + 1
"""Most inputs of layers on the device: those that wait to be sent, that leave, that arrive, and the
one that is used."""


def blocks_of(elements: Sequence[int]) -> list[range]:
    """Groups consecutive parameters into blocks of at most `BLOCK` elements, or a single one."""
    blocks: list[range] = []
    start = size = 0
    for index, count in enumerate(elements):
        if index > start and size + count > BLOCK:
            blocks.append(range(start, index))
            start, size = index, 0
        size += count
    return [*blocks, range(start, len(elements))] if elements else []


def offload_in_words(job: Job, cpu: bool) -> str:
    """Returns what this job offloads, and that this saves nothing on a CPU; else "".

    Args:
        job: The job.
        cpu: Whether its ranks compute on CPUs.
    """
    parts = []
    if job.train.optimizer.offload:
        masters = " and fp32 weights" if job.train.dtypes.copies_weights else ""
        parts.append(f"optimizer state{masters} in host memory, on the device block by block in the update")
    if job.train.activation_checkpointing == "offload":
        parts.append("inputs of layers in host memory between forward and backward")
    if parts and cpu:
        parts.append("ranks compute on CPUs, so this copies within host memory and saves none")
    return "; ".join(parts)


def offload_assumption(job: Job, gbps: float) -> list[str]:
    """Returns the assumed rate between host memory and a device, if the job uses it."""
    if not offload_in_words(job, cpu=False):
        return []
    return [f"{gbps:g} Gbit/s each way between host memory and a device (a PCIe 4.0 slot of 16 lanes has 252)"]


# The optimizer's state -------------------------------------------------------------------------


@dataclass(frozen=True)
class HeldState:
    """Bytes of a rank's weights and optimizer state, by where they are between two updates.

    Attributes:
        weights: On the device.
        optimizer: On the device.
        saved: What a checkpoint saves of it.
        passing: On the device during an update.
        host: In host memory.
    """

    weights: int
    optimizer: int
    saved: int
    passing: int = 0
    host: int = 0


def held_state(job: Job, parameters: int, largest: int, weights: int, optimizer: int, kind: str) -> HeldState:
    """Returns where a rank's state is.

    On a CPU, host memory is the device's: nothing is saved, and blocks are copied within it.

    Args:
        job: The job.
        parameters: The rank's share of its stages' parameters.
        largest: Its share of the largest of them.
        weights: Bytes of its weights, wherever they are.
        optimizer: Bytes of its optimizer state, wherever it is.
        kind: cpu or cuda.
    """
    if not job.train.optimizer.offload:
        return HeldState(weights, optimizer, weights + optimizer)
    masters = job.train.dtypes.copies_weights
    moved = optimizer + (weights if masters else 0)
    each = -(-moved // max(1, parameters))
    passing, gathered = min(moved, each * max(BLOCKS_ON_DEVICE * BLOCK, largest)), 2 * parameters if masters else 0
    if kind == "cpu":
        return HeldState(weights + gathered, optimizer, weights + optimizer, passing)
    return HeldState(gathered if masters else weights, 0, weights + optimizer, passing, moved)


def update_seconds(job: Job, moved: int, gbps: float) -> float:
    """Returns the seconds that an update takes longer because state passes through the device.

    Both directions copy at the same time.

    Args:
        job: The job.
        moved: Bytes of `HeldState.host`.
        gbps: Rate between host memory and device, in Gbit/s per direction.
    """
    return moved * 8 / (gbps * 1e9) if job.train.optimizer.offload else 0.0


# Inputs of layers ------------------------------------------------------------------------------


def moved_per_token(job: Job, stage: int, cut: Sequence[int]) -> int:
    """Returns the bytes per token of a microbatch that a stage's forward sends to host memory.

    The inputs of its layers, and on the last stage those of the final norm and the projection.
    """
    if job.train.activation_checkpointing != "offload":
        return 0
    ends = 2 if stage == len(cut) - 1 else 0
    return (cut[stage] + ends) * job.model.hidden_size * activation_bytes(job)


def freed_per_token(job: Job, stage: int, cut: Sequence[int]) -> int:
    """Returns the bytes per token that the device need not keep for a microbatch in flight.

    All that moves, but for a stage's input that another stage sent: torch's pipelining keeps it.
    """
    moved = moved_per_token(job, stage, cut)
    return moved - (stage > 0) * job.model.hidden_size * activation_bytes(job) if moved else 0


def passing_per_token(job: Job) -> int:
    """Returns the bytes per token of a microbatch that pass through the device at a time."""
    offloads = job.train.activation_checkpointing == "offload"
    return ON_DEVICE * job.model.hidden_size * activation_bytes(job) if offloads else 0


def host_activation_bytes(job: Job, actions: Sequence[Action], cut: Sequence[int], tokens: int) -> int:
    """Returns the most bytes of layers' inputs in a rank's host memory at a time.

    torch rounds each page-locked tensor up to a power of two.

    Args:
        job: The job.
        actions: The rank's actions.
        cut: Layers of every stage.
        tokens: Tokens of a microbatch on one rank.
    """
    if job.train.activation_checkpointing != "offload":
        return 0
    one = tokens * job.model.hidden_size * activation_bytes(job)
    rounded = 1 << (one - 1).bit_length()
    most = held = 0
    for action in actions:
        size = moved_per_token(job, action.stage, cut) * tokens // one * rounded
        held += {"F": size, "I": 0}.get(action.kind, -size)
        most = max(most, held)
    return most
