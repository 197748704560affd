"""Bytes and seconds of what is kept in host memory instead of on the device.

`train.optimizer.offload` keeps the optimizer's state there and, with precision bf16, the fp32
weights; `train.activation_checkpointing: offload` the inputs of layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from raypp.spec.job import Job

BLOCK = 2**25
"""Parameters of a block that is updated at once, unless a single one is larger."""
BLOCKS_ON_DEVICE = 3
"""One block arrives, one is updated, one leaves."""

AHEAD = 2
"""Inputs of layers that are on their way back, or not sent away because their backward follows."""
LEAVING = 2
"""Inputs of layers whose copy to host memory is under way."""
ON_DEVICE = 2 * AHEAD + LEAVING
"""Most inputs of layers on the device: those that wait to be sent or are used, that leave, and that
arrive."""


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
    """Returns what this job offloads, and on a CPU that it saves nothing; "" if it offloads nothing.

    Args:
        job: The job.
        cpu: Whether its ranks compute on CPUs.
    """
    parts = []
    if job.train.optimizer.offload:
        masters = " and fp32 weights" if job.train.precision == "bf16" else ""
        parts.append(f"optimizer state{masters} in host memory, on the device block by block in the update")
    if job.train.activation_checkpointing == "offload":
        parts.append("inputs of layers in host memory between forward and backward")
    if parts and cpu:
        parts.append("ranks compute on CPUs, so this copies within host memory and saves none")
    return "; ".join(parts)
