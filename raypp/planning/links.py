"""What crosses between stages."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from raypp.planning.choices import wire_of
from raypp.planning.memory import microbatch_tokens
from raypp.planning.resolve import ResolvedPipeline
from raypp.spec.job import Job

_BYTES = {"fp32": 4, "bf16": 2}


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
    wire, tokens, width = wire_of(job), microbatch_tokens(job), job.model.hidden_size
    rows = [width + 4 if kind == "int8" else width * _BYTES[kind] for kind in (wire.activations, wire.gradients)]
    return tokens * max(rows)


def boundaries(job: Job, pipeline: ResolvedPipeline) -> list[Boundary]:
    """All borders of a pipeline, from the first stage to the last."""
    found = []
    for stage, (upper, lower) in enumerate(pairwise(pipeline.rank_of_stage)):
        size = message_bytes(job) if upper != lower else 0
        found.append(Boundary(stage, upper, lower, upper != lower, size, 2 * size * pipeline.microbatches))
    return found
