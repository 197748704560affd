"""Memory of the loss. It follows `train/loss.py` and changes with it."""

from __future__ import annotations

from dataclasses import dataclass

from raypp.planning.end_weights import activation_bytes
from raypp.spec.job import Job

_FP32 = 4


@dataclass(frozen=True)
class LossMemory:
    """Bytes of the loss on the last stage, for one microbatch.

    Attributes:
        kept: From its forward to its backward.
        forward: In addition to that, while the forward computes.
        backward: In addition to that, while the backward computes.
    """

    kept: int
    forward: int
    backward: int


def loss_memory(job: Job, tokens: int) -> LossMemory:
    """Returns the memory of the cross-entropy of `tokens` tokens over whole logits.

    The stage's output, the logits in the compute dtype, is kept, and so is the log-softmax in fp32,
    which the backward needs. The backward has two fp32 gradients at once: of the log-softmax and of
    its input. In bf16 the forward also has an fp32 copy of the logits.
    """
    values, compute = tokens * job.model.vocab_size, activation_bytes(job)
    return LossMemory(
        kept=values * (compute + _FP32),
        forward=values * _FP32 if compute < _FP32 else 0,
        backward=values * 2 * _FP32,
    )
