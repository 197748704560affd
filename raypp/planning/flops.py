"""FLOPs of a decoder, by part.

A product with a matrix costs 2 FLOPs per weight and token in the forward, and twice that in the
backward (PaLM, arXiv:2204.02311, appendix B). Causal attention over T tokens reads T/2 keys on
average: scores and values together cost 2 · 2 · heads · head width · T/2 per token. With a window
of W < T tokens a query reads W · (1 - W / 2T) keys. Norms,
activations and the softmax are counted in bytes (`end_weights.py`).
"""

from __future__ import annotations

from functools import lru_cache

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
    keys = _keys_of_layers(model, seq_len)
    return 2.0 * sizes.mean("multiplied") + 4.0 * (keys / model.num_layers) * model.num_heads * model.dim_per_head


@lru_cache(maxsize=64)
def _keys_of_layers(model: DecoderOptions, seq_len: int) -> float:
    return sum(_keys(model.attention_rule(index).window, seq_len) for index in range(model.num_layers))


def _keys(window: int | None, seq_len: int) -> float:
    """Returns how many keys a query of a row of `seq_len` tokens reads on average."""
    seen = seq_len if window is None else min(window, seq_len)
    return seen * (1 - seen / (2 * seq_len))


def head_flops(model: DecoderOptions) -> float:
    """Returns the FLOPs of the output projection's forward, per token."""
    return 2.0 * model.hidden_size * model.vocab_size


def backward_factor(job: Job) -> float:
    """Returns the products in the backward of a layer per product in its forward.

    A frozen matrix has no gradient; the gradient of its input costs as much as its forward.
    """
    if job.model.lora is None:
        return BACKWARD_PER_FORWARD
    sizes = sizes_of(job.model)
    forward = layer_flops(job.model, sizes, job.data.seq_len)
    frozen = sum(layer.multiplied - layer.adapted for layer in sizes.layers) / len(sizes.layers)
    return BACKWARD_PER_FORWARD - 2.0 * frozen / forward


def weight_share(job: Job) -> float:
    """Returns the part of a layer's backward that computes the gradients of weights."""
    if job.model.lora is None:
        return 0.5
    sizes = sizes_of(job.model)
    adapted = sizes.mean("adapted")
    return 2.0 * adapted / (layer_flops(job.model, sizes, job.data.seq_len) * backward_factor(job))


def head_backward(model: DecoderOptions) -> float:
    """Returns the products in the backward of the output projection per product in its forward."""
    return BACKWARD_PER_FORWARD if model.lora is None else BACKWARD_PER_FORWARD - 1


def recompute_factor(job: Job) -> float:
    """Returns the cost of a layer's backward including recomputation, in forwards."""
    return backward_factor(job) + (1.0 if job.train.activation_checkpointing in ("full", "offload") else 0.0)


def flops_per_token(job: Job) -> float:
    """Returns the FLOPs of forward and backward of the whole model, per token.

    Recomputation does not count.
    """
    layers = job.model.num_layers * layer_flops(job.model, sizes_of(job.model), job.data.seq_len)
    return layers * (1 + backward_factor(job)) + head_flops(job.model) * (1 + head_backward(job.model))
