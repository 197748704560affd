"""What the two ends of the model cost, in decoder layers: from FLOPs and bytes.

Every part is given a time: its FLOPs, and the bytes it moves outside of matrix products times `FLOPS_PER_BYTE`. The
last stage's norm, projection and loss are then worth so many layers, the embedding another number. The ratios depend
little on `FLOPS_PER_BYTE`, because layers move bytes, too.
"""

from __future__ import annotations

from raypp.planning.flops import BACKWARD_PER_FORWARD, head_flops, layer_flops, recompute_factor
from raypp.planning.sizes import declared_sizes
from raypp.spec.job import Job

FLOPS_PER_BYTE = 10.0
"""What a processor computes in the time it moves a byte: a CPU core about 5, a GPU in fp32 about 15. Fixed, because
the cut must not depend on the machine a job is read on."""

_FP32 = 4
# Tensor reads and writes of elementwise work, forward and backward together.
_PASSES_OVER_RESIDUAL = 26  # two norms, two residual additions
_PASSES_OVER_QKV = 12  # rotary encoding, layout changes
_PASSES_OVER_INNER = 16  # silu, product
_PASSES_OVER_LOGITS = 8  # cast, maximum, exponentials, sum, and back
_PASSES_OVER_EMBEDDING = 6  # read a row, write it; add the gradient back
_PASSES_OVER_DENSE_GRADIENT = 3  # the embedding's gradient is made whole for each microbatch: zeroed, then added


def end_weights(job: Job) -> tuple[float, float]:
    """`pipeline.input_weight` and `output_weight` with "auto" resolved; in decoder layers, forward and backward."""
    pipeline = job.pipeline
    first = input_weight(job) if pipeline.input_weight == "auto" else float(pipeline.input_weight)
    last = output_weight(job) if pipeline.output_weight == "auto" else float(pipeline.output_weight)
    return first, last


def layer_cost(job: Job) -> float:
    """Cost of one layer's forward and backward per token, in FLOPs; bytes counted in."""
    model, sizes = job.model, declared_sizes(job.model)
    inner = sum(layer.inner for layer in sizes.layers) / len(sizes.layers)
    heads = model.dim_per_head * (model.num_heads + 2 * model.kv_heads)
    moved = _PASSES_OVER_RESIDUAL * model.hidden_size + _PASSES_OVER_QKV * heads + _PASSES_OVER_INNER * inner
    flops = layer_flops(model, sizes, job.data.seq_len) * (1 + recompute_factor(job))
    return flops + moved * activation_bytes(job) * FLOPS_PER_BYTE


def input_weight(job: Job) -> float:
    """What the embedding costs, in layers: a lookup, and a dense gradient per microbatch. Nearly free."""
    model, tokens = job.model, job.train.micro_batch_size * job.data.seq_len
    lookup = _PASSES_OVER_EMBEDDING * model.hidden_size * activation_bytes(job)
    dense = _PASSES_OVER_DENSE_GRADIENT * model.vocab_size * model.hidden_size * _FP32 / tokens
    return round((lookup + dense) * FLOPS_PER_BYTE / layer_cost(job), 4)


def output_weight(job: Job) -> float:
    """What norm, projection and loss cost, in layers: the projection's FLOPs, and the bytes of the softmax (fp32)."""
    flops = head_flops(job.model) * (1 + BACKWARD_PER_FORWARD)
    moved = _PASSES_OVER_LOGITS * job.model.vocab_size * _FP32
    return round((flops + moved * FLOPS_PER_BYTE) / layer_cost(job), 4)


def activation_bytes(job: Job) -> int:
    """Bytes of one number of the activations."""
    return 2 if job.train.precision == "bf16" else _FP32


def sum_bytes(job: Job) -> int:
    """Bytes of one number of a gradient that sharded stages sum."""
    return 2 if job.train.reduce_dtype == "bf16" else _FP32
