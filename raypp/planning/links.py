"""What crosses between stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raypp.planning.memory import microbatch_tokens
from raypp.planning.weights import activation_bytes
from raypp.spec.job import Job


@dataclass(frozen=True)
class Boundary:
    """The border between two neighbouring stages.

    Attributes:
        stage: The upper one; the other is `stage + 1`.
        from_rank: Pipeline rank of the upper stage.
        to_rank: Pipeline rank of the lower stage.
        crosses_ranks: False when one rank holds both: nothing is sent.
        bytes_per_microbatch: Of the activation on its way down; the gradient on its way up has as many.
        bytes_per_step: Of both directions and all microbatches of one pipeline.
    """

    stage: int
    from_rank: int
    to_rank: int
    crosses_ranks: bool
    bytes_per_microbatch: int
    bytes_per_step: int


def message_bytes(job: Job) -> int:
    """Bytes of the larger message between two ranks, activations or gradients: micro_batch_size · seq_len · hidden_size
    numbers, a cp rank's share.

    Rows are as long as data.seq_len; negotiated lengths are shorter. int8 also sends a fp32 scale per token.
    """
    return max(
        _message_bytes(job, job.pipeline.wire.of("activations")), _message_bytes(job, job.pipeline.wire.of("gradients"))
    )


def _message_bytes(job: Job, compression: str) -> int:
    wire, tokens = job.pipeline.wire, microbatch_tokens(job)
    if compression == "int8":
        return tokens * (job.model.hidden_size + 4)
    number = {"auto": activation_bytes(job), "fp32": 4, "bf16": 2}[wire.dtype]
    if compression == "bf16":
        number = min(number, 2)
    return tokens * job.model.hidden_size * number


def boundaries(job: Job, placement: Sequence[Sequence[int]]) -> list[Boundary]:
    """All borders of a pipeline, from the first stage to the last."""
    holder = {stage: rank for rank, stages in enumerate(placement) for stage in stages}
    found = []
    for stage in range(len(holder) - 1):
        upper, lower = holder[stage], holder[stage + 1]
        size = message_bytes(job) if upper != lower else 0
        found.append(Boundary(stage, upper, lower, upper != lower, size, 2 * size * job.pipeline.microbatches))
    return found
