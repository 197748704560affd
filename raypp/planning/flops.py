"""FLOPs of a decoder, by part, and the cost of its two ends.

A product with a matrix costs 2 FLOPs per weight and token in the forward, and twice that in the
backward (PaLM, arXiv:2204.02311, appendix B). Causal attention over T tokens reads T/2 keys on
average: scores and values together cost 2 · 2 · heads · head width · T/2 per token. With a window
of W < T tokens a query reads W · (1 - W / 2T) keys. Norms,
activations and the softmax are counted in bytes.

The cost of the two ends of the model is in decoder layers. The time of each part is its FLOPs, plus
the bytes it moves outside of matrix products times `FLOPS_PER_BYTE`. The norm, projection and loss
of the last stage are expressed as a number of layers, and so is the embedding. The ratios depend
little on `FLOPS_PER_BYTE`, because layers move bytes too.
"""

from functools import lru_cache

from raypp.job.job import Job
from raypp.job.lora import layer_adapters, trains_part
from raypp.job.models import DecoderOptions
from raypp.job.precision import FP32
from raypp.planning.sizes import ModelSizes, declared_sizes, mixers, sizes_of

BACKWARD_PER_FORWARD = 2.0
"""Products in the backward (gradients of the input and of the weights) per product in the forward.
"""


def layer_flops(model: DecoderOptions, sizes: ModelSizes, seq_len: int) -> float:
    """Returns the FLOPs of a layer's forward, per token of a row of `seq_len` tokens; the mean over
    layers."""
    return 2.0 * sizes.mean("multiplied") + attention_flops(model, seq_len)


def attention_flops(model: DecoderOptions, seq_len: int) -> float:
    """Returns those of its attention, or of what is in its place."""
    layers = zip(mixers(model), _seen(model, seq_len), strict=True)
    each = (4.0 * keys * queries if rule is None else rule.flops(seq_len) for (rule, queries, _), keys in layers)
    return sum(each) / model.num_layers


@lru_cache(maxsize=64)
def _seen(model: DecoderOptions, seq_len: int) -> tuple[float, ...]:
    """Returns how many keys a query of a row reads on average, by layer; 0 without attention."""
    windows = (model.attention_rule(index).window for index in range(model.num_layers))
    seen = (seq_len if window is None else min(window, seq_len) for window in windows)
    attends = (rule is None for rule, _, _ in mixers(model))
    return tuple(own * keys * (1 - keys / (2 * seq_len)) for own, keys in zip(attends, seen, strict=True))


def head_flops(model: DecoderOptions) -> float:
    """Returns the FLOPs of the output projection's forward, per token."""
    return 2.0 * model.hidden_size * model.vocab_size


def backward_factor(job: Job) -> float:
    """Returns the products in the backward of a layer per product in its forward. A frozen matrix
    has no gradient; the gradient of its input costs as much as its forward."""
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
    return BACKWARD_PER_FORWARD if trains_part(model, "lm_head") else BACKWARD_PER_FORWARD - 1


def recompute_factor(job: Job) -> float:
    """Returns the cost of a layer's backward including recomputation, in forwards."""
    return backward_factor(job) + (1.0 if job.train.activation_checkpointing in ("full", "offload") else 0.0)


def flops_per_token(job: Job, *, attention: bool = True) -> float:
    """Returns the FLOPs of forward and backward per token. Recomputation does not count. Without
    `attention`: 6 N, N the weights that a token is multiplied with; 4 for frozen ones."""
    layers = job.model.num_layers * layer_flops(job.model, sizes_of(job.model), job.data.seq_len)
    whole = layers * (1 + backward_factor(job)) + head_flops(job.model) * (1 + head_backward(job.model))
    left_out = 0.0 if attention else flops_per_key(job.model) * sum(_seen(job.model, job.data.seq_len))
    return whole - left_out


def flops_per_key(model: DecoderOptions) -> float:
    """Returns those of a query and one key in a layer: scores and values, forward and backward."""
    return 4.0 * model.num_heads * model.dim_per_head * (1 + BACKWARD_PER_FORWARD)


FLOPS_PER_BYTE = 10.0
"""FLOPs that a processor computes in the time it moves a byte: about 5 on a CPU core, about 15 on a
GPU in fp32. Constant, because the cut must not depend on the machine that reads the job."""

# Tensor reads and writes of elementwise work, forward and backward together.
_PASSES_OVER_RESIDUAL = 26  # two norms, two residual additions
_PASSES_OVER_QKV = 12  # rotary encoding, layout changes
_PASSES_OVER_INNER = 16  # silu, product
_PASSES_OVER_ROWS = 8  # rows of experts: permuted, weighted and summed, there and back; two gradients' sum
_PASSES_OVER_SENT = 16  # under ep: copied by two exchanges, sorted by expert and unsorted; and back
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
    sizes = declared_sizes(job.model)
    flops = layer_flops(job.model, sizes, job.data.seq_len) * (1 + recompute_factor(job))
    return flops + _moved(job, sizes) * job.train.dtypes.compute.bytes * FLOPS_PER_BYTE


def _moved(job: Job, sizes: ModelSizes) -> float:
    """Returns the values that elementwise work of a layer reads and writes, per token."""
    model = job.model
    heads = model.dim_per_head * (model.num_heads + 2 * model.kv_heads)
    inner = _PASSES_OVER_INNER * sizes.mean("inner")
    return _PASSES_OVER_RESIDUAL * model.hidden_size + _PASSES_OVER_QKV * heads + inner


def elementwise_bytes(job: Job, *, compiled: bool) -> float:
    """Returns the bytes of a layer's forward and backward on a GPU outside of products, per token.
    Counted (benchmarks/kernel_counts): a compiled layer moves 0.63 times as much, and adapters that
    apply to all matrices 3.2 values for each of their results, or 9.7. Rows go to experts and back
    by kernels of their own, never by compiled code."""
    model, sizes = job.model, sizes_of(job.model)
    moved = _moved(job, sizes) * (0.63 if compiled else 1.0)
    if model.lora is not None:
        results = sum(adapter.b.shape[-2] for adapter in layer_adapters(model, 0) if not adapter.stacked)
        moved += (3.2 if compiled else 9.7) * results
    passes = _PASSES_OVER_ROWS + _PASSES_OVER_SENT * (job.mesh.ep > 1)
    moved += passes * max(layer.sent for layer in sizes.kinds) * model.hidden_size
    return moved * job.train.dtypes.compute.bytes


def input_weight(job: Job) -> float:
    """Returns the cost of the embedding in layers: a lookup, and a dense gradient per microbatch.
    Nearly free. Frozen, it has no gradient."""
    model, tokens = job.model, job.train.micro_batch_size * job.data.seq_len
    lookup = _PASSES_OVER_EMBEDDING * model.hidden_size * job.train.dtypes.compute.bytes
    dense = _PASSES_OVER_DENSE_GRADIENT * model.vocab_size * model.hidden_size * FP32.bytes / tokens
    if not trains_part(model, "embed_tokens"):
        dense = 0.0
    return round((lookup + dense) * FLOPS_PER_BYTE / layer_cost(job), 4)


def output_weight(job: Job) -> float:
    """Returns the cost of norm, projection and loss in layers. Counts the projection's FLOPs and
    the bytes of the softmax (fp32)."""
    flops = head_flops(job.model) * (1 + head_backward(job.model))
    moved = _PASSES_OVER_LOGITS * job.model.vocab_size * FP32.bytes
    return round((flops + moved * FLOPS_PER_BYTE) / layer_cost(job), 4)
