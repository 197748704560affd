"""The messages between stages."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from raypp.planning.choices import wire_bytes, wire_of
from raypp.planning.resolve import ResolvedPipeline
from raypp.spec.job import Job


@dataclass(frozen=True)
class Boundary:
    """The boundary between two neighbouring stages.

    Attributes:
        stage: The stage before the boundary; the other one is `stage + 1`.
        from_rank: Pipeline rank of the stage before it.
        to_rank: Pipeline rank of the stage after it.
        crosses_ranks: False if one rank holds both stages, so that nothing is sent.
        bytes_per_microbatch: Bytes of an activation. The gradient that comes back has the same
            size.
        bytes_per_step: Bytes of both directions and all microbatches of one pipeline.
    """

    stage: int
    from_rank: int
    to_rank: int
    crosses_ranks: bool
    bytes_per_microbatch: int
    bytes_per_step: int


def message_bytes(job: Job) -> int:
    """Returns the bytes of the larger message between two ranks, activations or gradients.

    A message has micro_batch_size · seq_len · hidden_size values, divided over cp ranks. Rows are
    assumed to be data.seq_len long; negotiated lengths are shorter.
    """
    wire = wire_of(job)
    return max(wire_bytes(job, wire.activations), wire_bytes(job, wire.gradients))


def boundaries(job: Job, pipeline: ResolvedPipeline) -> list[Boundary]:
    """All borders of a pipeline, from the first stage to the last."""
    found = []
    for stage, (upper, lower) in enumerate(pairwise(pipeline.rank_of_stage)):
        size = message_bytes(job) if upper != lower else 0
        found.append(Boundary(stage, upper, lower, upper != lower, size, 2 * size * pipeline.microbatches))
    return found
