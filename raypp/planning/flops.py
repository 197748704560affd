"""FLOPs of a decoder, by part.

A product with a matrix costs 2 FLOPs per weight and token in the forward, and twice that in the
backward (PaLM, arXiv:2204.02311, appendix B). Causal attention over T tokens reads T/2 keys on
average: scores and values together cost 2 · 2 · heads · head width · T/2 per token. Norms,
activations and the softmax are counted in bytes (`weights.py`).
"""

from __future__ import annotations

from raypp.planning.sizes import ModelSizes, sizes_of
from raypp.spec.job import Job
from raypp.spec.models import DecoderOptions

BACKWARD_PER_FORWARD = 2.0
"""Products in the backward (gradients of the input and of the weights) per product in the forward.
"""


def layer_flops(model: DecoderOptions, sizes: ModelSizes, seq_len: int) -> float:
    """Returns the FLOPs of one layer's forward, per token of a row of `seq_len` tokens.

    Averages over layers.
    """
    multiplied = sum(layer.multiplied for layer in sizes.layers) / len(sizes.layers)
    return 2.0 * multiplied + 2.0 * seq_len * model.num_heads * model.dim_per_head


def head_flops(model: DecoderOptions) -> float:
    """Returns the FLOPs of the output projection's forward, per token."""
    return 2.0 * model.hidden_size * model.vocab_size


def recompute_factor(job: Job) -> float:
    """Returns the cost of a layer's backward including recomputation, in forwards."""
    return BACKWARD_PER_FORWARD + (1.0 if job.train.activation_checkpointing in ("full", "offload") else 0.0)


def flops_per_token(job: Job) -> float:
    """Returns the FLOPs of forward and backward of the whole model, per token.

    Recomputation does not count.
    """
    layer = layer_flops(job.model, sizes_of(job.model), job.data.seq_len)
    forward = job.model.num_layers * layer + head_flops(job.model)
    return forward * (1 + BACKWARD_PER_FORWARD)
