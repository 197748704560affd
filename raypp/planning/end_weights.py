"""Cost of the two ends of the model in decoder layers, computed from FLOPs and bytes.

The time of each part is its FLOPs, plus the bytes it moves outside of matrix products times
`FLOPS_PER_BYTE`. The norm, projection and loss of the last stage are expressed as a number of
layers, and so is the embedding. The ratios depend little on `FLOPS_PER_BYTE`, because layers move
bytes too.
"""

from __future__ import annotations

from raypp.planning.flops import head_backward, head_flops, layer_flops, recompute_factor
from raypp.planning.sizes import declared_sizes
from raypp.spec.job import Job
from raypp.spec.precision import FP32

FLOPS_PER_BYTE = 10.0
"""FLOPs that a processor computes in the time it moves a byte: about 5 on a CPU core, about 15 on a
GPU in fp32. Constant, because the cut must not depend on the machine that reads the job."""

# Tensor reads and writes of elementwise work, forward and backward together.
_PASSES_OVER_RESIDUAL = 26  # two norms, two residual additions
_PASSES_OVER_QKV = 12  # rotary encoding, layout changes
_PASSES_OVER_INNER = 16  # silu, product
_PASSES_OVER_LOGITS = 8  # cast, maximum, exponentials, sum, and back
_PASSES_OVER_EMBEDDING = 6  # read a row, write it; add the gradient back
_PASSES_OVER_DENSE_GRADIENT = 3  # each microbatch makes the whole gradient of the embedding: zeroes it, then adds


def end_weights(job: Job) -> tuple[float, float]:
    """Returns `pipeline.input_weight` and `output_weight` in decoder layers, "auto" resolved."""
    pipeline = job.pipeline
    first = input_weight(job) if pipeline.input_weight == "auto" else float(pipeline.input_weight)
    last = output_weight(job) if pipeline.output_weight == "auto" else float(pipeline.output_weight)
    return first, last


def layer_cost(job: Job) -> float:
    """Returns the cost of one layer's forward and backward per token, in FLOPs, bytes included."""
    model, sizes = job.model, declared_sizes(job.model)
    inner = sizes.mean("inner")
    heads = model.dim_per_head * (model.num_heads + 2 * model.kv_heads)
    moved = _PASSES_OVER_RESIDUAL * model.hidden_size + _PASSES_OVER_QKV * heads + _PASSES_OVER_INNER * inner
    flops = layer_flops(model, sizes, job.data.seq_len) * (1 + recompute_factor(job))
    return flops + moved * activation_bytes(job) * FLOPS_PER_BYTE


def input_weight(job: Job) -> float:
    """Returns the cost of the embedding in layers: a lookup, and a dense gradient per microbatch.

    Nearly free. Frozen, it has no gradient.
    """
    model, tokens = job.model, job.train.micro_batch_size * job.data.seq_len
    lookup = _PASSES_OVER_EMBEDDING * model.hidden_size * activation_bytes(job)
    dense = _PASSES_OVER_DENSE_GRADIENT * model.vocab_size * model.hidden_size * FP32.bytes / tokens
    if model.lora is not None:
        dense = 0.0
    return round((lookup + dense) * FLOPS_PER_BYTE / layer_cost(job), 4)


def output_weight(job: Job) -> float:
    """Returns the cost of norm, projection and loss in layers.

    Counts the projection's FLOPs and the bytes of the softmax (fp32).
    """
    flops = head_flops(job.model) * (1 + head_backward(job.model))
    moved = _PASSES_OVER_LOGITS * job.model.vocab_size * FP32.bytes
    return round((flops + moved * FLOPS_PER_BYTE) / layer_cost(job), 4)


def activation_bytes(job: Job) -> int:
    """Returns the bytes of one value of the activations."""
    return job.train.dtypes.compute.bytes


def sum_bytes(job: Job) -> int:
    """Returns the bytes of one value of a gradient that sharded stages reduce."""
    return job.train.dtypes.reduce.bytes
