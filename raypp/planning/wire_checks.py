"""Checks the formats of messages between stages."""

from __future__ import annotations

from collections.abc import Iterator

from raypp.errors import Problem
from raypp.spec.job import Job


def wire_problems(job: Job) -> Iterator[Problem]:
    """Finds settings of `pipeline.wire` that are contradictory or have no effect."""
    wire, precision = job.pipeline.wire, job.train.computes_in
    asked = {wire.of("activations"), wire.of("gradients")}
    if wire.dtype == "fp32" and precision == "bf16":
        what = "fp32 would double the size of messages that are computed in bf16, without gaining precision"
        yield Problem("pipeline.wire.dtype", what, "use auto")
    if wire.dtype != "auto" and "none" not in asked:
        what = f"{wire.dtype} applies to messages that are not compressed, but all are ({' and '.join(sorted(asked))})"
        yield Problem("pipeline.wire.dtype", what, "use auto, or pipeline.wire.compression none")
    if "bf16" in asked and precision == "bf16":
        what = "messages already travel in bf16, because they are computed in bf16 (train.precision)"
        yield Problem("pipeline.wire.compression", what, "use none or int8")
    if "bf16" in asked and wire.dtype == "fp32":
        what = "bf16 contradicts pipeline.wire.dtype fp32"
        yield Problem("pipeline.wire.compression", what, "keep one of the two and remove the other")
