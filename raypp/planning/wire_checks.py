"""Which ways of sending between stages make no sense."""

from __future__ import annotations

from collections.abc import Iterator

from raypp.errors import Problem
from raypp.spec.job import Job


def wire_problems(job: Job) -> Iterator[Problem]:
    """Combinations of `pipeline.wire` and the precision that contradict each other or change nothing."""
    wire, precision = job.pipeline.wire, job.train.precision
    asked = {wire.of("activations"), wire.of("gradients")}
    if wire.dtype == "fp32" and precision == "bf16":
        what = "fp32 would double the bytes of what is computed in bf16, and add nothing"
        yield Problem("pipeline.wire.dtype", what, "use auto")
    if wire.dtype != "auto" and "none" not in asked:
        what = f"{wire.dtype} is for messages that are not compressed, and all are ({' and '.join(sorted(asked))})"
        yield Problem("pipeline.wire.dtype", what, "use auto, or pipeline.wire.compression none")
    if "bf16" in asked and precision == "bf16":
        what = "what is computed in bf16 (train.precision) already travels in bf16"
        yield Problem("pipeline.wire.compression", what, "use none or int8")
    if "bf16" in asked and wire.dtype == "fp32":
        what = "bf16 contradicts pipeline.wire.dtype fp32"
        yield Problem("pipeline.wire.compression", what, "keep one of the two, and leave the other out")
