"""Bytes and seconds of what is kept in host memory instead of on the device.

`train.optimizer.offload` keeps the optimizer's state there and, with precision bf16, the fp32
weights; `train.activation_checkpointing: offload` the inputs of layers.
"""

from collections.abc import Sequence

from raypp.job.job import Job
from raypp.planning.schedules.action import Action

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
    """Returns what this job offloads, and, with ranks on CPUs, that this saves nothing; else ""."""
    parts = []
    if job.train.optimizer.offload:
        masters = " and fp32 weights" if job.train.dtypes.copies_weights else ""
        parts.append(f"optimizer state{masters} in host memory, on the device block by block in the update")
    if job.train.activation_checkpointing == "offload":
        parts.append("inputs of layers in host memory between forward and backward")
    if parts and cpu:
        parts.append("ranks compute on CPUs, so this copies within host memory and saves none")
    return "; ".join(parts)


def moved_per_token(job: Job, stage: int, cut: Sequence[int]) -> int:
    """Returns the bytes per token of a microbatch that a stage's forward sends to host memory. The
    inputs of its layers, and on the last stage those of the final norm and the projection."""
    if job.train.activation_checkpointing != "offload":
        return 0
    ends = 2 if stage == len(cut) - 1 else 0
    return (cut[stage] * _between(job) + ends * job.model.hidden_size) * job.train.dtypes.compute.bytes


def freed_per_token(job: Job, stage: int, cut: Sequence[int]) -> int:
    """Returns the bytes per token that the device need not keep for a microbatch in flight. All
    that moves, but for a stage's input that another stage sent: torch's pipelining keeps it."""
    moved = moved_per_token(job, stage, cut)
    return moved - (stage > 0) * _between(job) * job.train.dtypes.compute.bytes if moved else 0


def _between(job: Job) -> int:
    """Returns the part of the width of a layer's input that each rank of a tp group has."""
    return -(-job.model.hidden_size // job.mesh.tp)


def passing_per_token(job: Job) -> int:
    """Returns the bytes per token of a microbatch that pass through the device at a time."""
    offloads = job.train.activation_checkpointing == "offload"
    return ON_DEVICE * _between(job) * job.train.dtypes.compute.bytes if offloads else 0


def host_activation_bytes(job: Job, actions: Sequence[Action], cut: Sequence[int], tokens: int) -> int:
    """Returns the most bytes of layers' inputs in a rank's host memory at a time. torch rounds each
    page-locked tensor up to a power of two. `tokens`: of a microbatch on one rank."""
    if job.train.activation_checkpointing != "offload":
        return 0
    one = tokens * _between(job) * job.train.dtypes.compute.bytes
    rounded = 1 << (one - 1).bit_length()
    most = held = 0
    for action in actions:
        size = moved_per_token(job, action.stage, cut) * tokens // one * rounded
        held += {"F": size, "I": 0}.get(action.kind, -size)
        most = max(most, held)
    return most
