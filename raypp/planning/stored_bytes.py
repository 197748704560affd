"""Bytes of weights, accumulated gradients and optimizer state."""

from __future__ import annotations

from raypp.job.job import Job
from raypp.job.precision import FP32
from raypp.kinds import OPTIMIZERS
from raypp.planning.sizes import sizes_of

BLOCK = 256
"""Values that share a scale, as in `raypp.rank.optimizers.quantised_moments`."""
_AT_A_TIME = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Values of one turn of `raypp.rank.optimizers.adamw`."""
_TURN_BYTES = 48
"""Bytes per value of a turn: gradient, moments, weight, random bits, codes, and what is computed
from them."""


def state_bytes(job: Job, parameters: int) -> int:
    """Returns the bytes of the optimizer's state of some parameters. In 8 bits each value is a
    byte, and each block of a row has an fp32 scale. Rows are taken to be as long as the hidden
    size."""
    values = OPTIMIZERS.get(job.train.optimizer.kind).states * parameters
    if job.train.optimizer.state == "fp32":
        return FP32.bytes * values
    columns = job.model.hidden_size
    return round(values * (1 + FP32.bytes * -(-columns // BLOCK) / columns))


def update_bytes(job: Job, kind: str) -> int:
    """Returns the bytes that an update by rows needs for itself; 0 with torch's fused AdamW."""
    if not job.train.dtypes.narrow_weights and job.train.optimizer.state == "fp32":
        return 0
    largest = max(layer.largest for layer in sizes_of(job.model).kinds)
    return _TURN_BYTES * min(_AT_A_TIME[kind], max(largest, job.model.vocab_size * job.model.hidden_size))
