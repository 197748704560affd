"""What forwards keep for their backwards, and what a backward needs while it runs, per token.

The counts are those of the tensors that autograd saves in the layers of `raypp/stages/models`
(`tests/unit/planning/test_activations.py` counts them in a real layer). The method is that of
Korthikanti et al. (arXiv:2205.05198, section 4).

With `mesh.tp` they are those of one of its ranks, per token of all: it has a part of the tokens
between blocks, and a part of the heads and of F within them. What blocks take is there whole while
they compute (`keeps_parts`).

Legend: C residual width, Q width of all queries, K width of all keys, F inner width of the
feed-forward block that a token passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from raypp.job.job import Job
from raypp.job.known_families import counted_family, layer_rotary
from raypp.job.lora import layer_adapters
from raypp.job.models import DecoderOptions, LatentOptions
from raypp.job.tensor_parts import adapters_on_rank, keeps_parts, key_heads
from raypp.planning.decision import Kind
from raypp.planning.offload import freed_per_token
from raypp.planning.sizes import sizes_of


def microbatch_tokens(job: Job) -> int:
    """Returns the tokens of a microbatch on one rank if every row is data.seq_len long."""
    return job.train.micro_batch_size * -(-job.data.seq_len // job.mesh.cp)


@dataclass(frozen=True)
class _Widths:
    """C, Q, K and F; `between`: C, or the part of it that a rank has between blocks. `taken`: what
    attention and the feed-forward block take together; experts take a rank's own tokens. `kept`:
    what is kept of that, or of what they give. `rows`:
    the widths of the rows that a token sends to experts. `fed`: the width of what the feed-forward
    block projects its input to, F or, with a gate, 2 F. `normed`: the widths of what norms take, in
    values of the compute dtype. `latent`: the widths between the two projections to queries, and to
    keys and values."""

    residual: int
    between: int
    taken: int
    kept: int
    queries: int
    inner: int
    fed: int
    rows: int
    normed: int
    latent: int
    mixed: _Mixed


@dataclass(frozen=True)
class _Mixed:
    """The values per token of attention, or of what is instead: what a forward keeps, with
    "selective" and without recomputation, and what is between the halves of a backward."""

    selective: int
    all: int
    split: int


def _mixed(model: DecoderOptions, index: int, wide: int, tp: int) -> _Mixed:
    """Returns the values of a layer's token mixing; `wide` values of the compute dtype are one in
    fp32. `tp`: ranks that divide the heads."""
    if (rule := model.state_rule(index)) is not None:
        return _Mixed(*(count // tp for count in rule.kept(wide)))
    queries, keys = model.num_heads // tp * model.dim_per_head, key_heads(model, tp) * model.dim_per_head
    both = 2 * queries + 2 * keys
    gate = queries if counted_family(model).layer(model, index).output_gate else 0
    return _Mixed(both + gate, both + 2 * gate, both + gate)


@lru_cache(maxsize=1024)
def _kinds(model: DecoderOptions, layers: range) -> Mapping[int, int]:
    """Returns how many of some layers mix tokens by attention, and by each other rule: by the first
    layer of the model that does."""
    rules = list(map(model.state_rule, range(model.num_layers)))
    return Counter(rules.index(rules[index]) for index in layers)


def _widths(job: Job, index: int) -> _Widths:
    model, tp = job.model, job.mesh.tp
    wide = max(1, 4 // job.train.dtypes.compute.bytes)
    largest = max(sizes_of(model).kinds, key=lambda layer: layer.inner)
    normed = _normed(model, index)
    if model.stage_ends().gain_from_zero:  # computed in fp32
        normed = normed * wide
    between = -(-model.hidden_size // tp)
    taken = model.hidden_size + (between if largest.sent else model.hidden_size)
    return _Widths(
        residual=model.hidden_size,
        between=between,
        taken=taken,
        kept=2 * between if keeps_parts(job) else taken,
        queries=model.num_heads * model.dim_per_head // tp,
        inner=-(-largest.inner // tp),
        fed=-(-largest.inner // tp) * (2 if _gated(model) else 1),
        rows=2 * largest.sent * between,
        normed=-(-normed // tp),
        latent=model.kv_lora_rank + (model.q_lora_rank or 0) if isinstance(model, LatentOptions) else 0,
        mixed=_mixed(model, index, wide, tp),
    )


@lru_cache(maxsize=64)
def _normed(model: DecoderOptions, index: int) -> int:
    """Returns the widths of what the norms of a layer take, but for those within what is instead of
    attention."""
    family, rule = counted_family(model), model.state_rule(index)
    queries, keys = family.layer(model, index).head_norm_names
    known = {queries: model.num_heads * model.dim_per_head, keys: model.kv_heads * model.dim_per_head}
    norms = [weight for weight in family.weights(model, index) if weight.part == "norm"]
    if rule is not None:
        norms = [weight for weight in norms if not weight.name.startswith(f"{rule.block}.")]
    widths = {weight.name.rpartition(".")[0]: weight.shape[0] for weight in norms}
    return sum(known.get(name.rpartition(".")[2], width) for name, width in widths.items())


@lru_cache(maxsize=64)
def _gated(model: DecoderOptions) -> bool:
    """Returns whether feed-forward blocks multiply two projections of what they take."""
    family = counted_family(model)
    blocks = [weight for weight in family.weights(model, 0) if weight.part == "feed_forward" and len(weight.shape) > 1]
    inner = sum(weight.shape[1] for weight in blocks if weight.residual)
    return sum(weight.shape[0] for weight in blocks if not weight.residual) > inner


@lru_cache(maxsize=64)
def _ruled(model: DecoderOptions, seq_len: int) -> bool:
    """Returns whether a layer attends by a special rule."""
    return any(model.attention_rule(index).within(seq_len).special for index in range(model.num_layers))


def layer_activation_numbers(job: Job, index: int, kind: Kind = "cuda") -> int:
    """Returns how many values a layer keeps for its backward, per token.

    Without recomputation: what the blocks take (2 C), what norms take (2 C; more with norms of
    heads or of the blocks' results; on CPUs a norm is not fused and keeps its input divided by its
    root mean square as well; LayerNorm is fused),
    queries, keys and values as attention takes them, its output, and gate, up, silu(gate) and the
    product of the feed-forward block, or without a gate its projection and what it becomes.
    Attention kernels recompute scores. Experts keep each token's
    row once more per expert that it goes to, and that expert's output.

    "selective" keeps the layer's input and the results of its matrix products and of attention,
    "full" the input, and "offload" the same, but elsewhere (`stage_activation_bytes`).
    """
    w = _widths(job, index)
    extent = job.train.activation_checkpointing
    if extent in ("full", "offload"):
        return w.between
    if extent == "selective":
        return w.between + w.kept + w.mixed.selective + w.latent + w.fed + w.rows
    return _everything(job, w, kind) + w.kept - w.taken


@lru_cache(maxsize=64)
def _dropped(model: DecoderOptions, tp: int = 1) -> tuple[int, int]:
    """Returns the widths of what a layer's adapters take, after dropout: their sum, the largest."""
    if model.lora is None or not model.lora.dropout:
        return 0, 0
    adapters = (adapters_on_rank(model, i, layer_adapters(model, i), tp) for i in range(model.num_layers))
    layers = ([adapter.a.shape[-1] for adapter in own] for own in adapters)
    widths = max(layers, key=sum)
    return sum(widths), max(widths, default=0)


def mask_bytes(job: Job) -> int:
    """Returns the bytes per token of the largest mask of adapters' dropout while it is computed.
    Three copies of a hash of 64 bits for four features, and the mask."""
    return 7 * _dropped(job.model, job.mesh.tp)[1]


def _everything(job: Job, w: _Widths, kind: Kind) -> int:
    numbers = w.taken + w.normed + w.mixed.all + w.latent + 2 * w.fed + w.rows
    if kind == "cpu" and not job.model.stage_ends().layer_norm:  # other norms are not one operator
        numbers += w.normed
    if kind == "cpu" and _ruled(job.model, job.data.seq_len):  # the outputs of documents are joined
        numbers += w.queries
    return numbers


def stage_activation_bytes(job: Job, stage: int, cut: Sequence[int], kind: Kind = "cuda") -> int:
    """Returns the bytes that a stage keeps per token of a microbatch in flight. Its layers', the
    tables of the rotary encoding (2 R each), its output if another stage follows, and on the last
    stage what the final norm keeps. On CUDA without what waits in host memory."""
    width, layers, last = job.model.hidden_size, _layers(stage, cut), stage == len(cut) - 1
    rotary = {layer_rotary(job.model, index) for index in layers}
    tables = sum(2 * table.width for table in rotary if table is not None)
    kinds = _kinds(job.model, layers).items()
    numbers = sum(count * layer_activation_numbers(job, index, kind) for index, count in kinds) + tables
    numbers += width if last else -(-width // job.mesh.tp)
    masks = 0
    if job.train.activation_checkpointing == "none" and (dropped := _dropped(job.model, job.mesh.tp)[0]):
        # Each adapter keeps what it takes and a mask, instead of inputs that several share.
        w, masks = _widths(job, 0), cut[stage] * dropped
        numbers += masks - cut[stage] * (w.taken + w.inner)
    if last:
        numbers += width * (2 if kind == "cpu" and not job.model.stage_ends().layer_norm else 1)
    return (
        numbers * job.train.dtypes.compute.bytes + masks - (freed_per_token(job, stage, cut) if kind == "cuda" else 0)
    )


def split_backward_bytes(job: Job, stage: int, cut: Sequence[int]) -> int:
    """Returns the bytes per token that a backward keeps between its two halves. These are the
    inputs of all matrix products of the stage's layers, and the gradients of their results."""
    numbers = 0
    for index, count in _kinds(job.model, _layers(stage, cut)).items():
        w = _widths(job, index)
        inputs = w.taken + w.latent + w.inner + w.rows // 2
        gradients = w.latent + w.residual + w.fed + (w.rows // 2 or w.residual)
        inputs = (_dropped(job.model, job.mesh.tp)[0] or inputs + w.queries) - w.queries
        numbers += count * (inputs + w.mixed.split + gradients)
    return numbers * job.train.dtypes.compute.bytes


def _layers(stage: int, cut: Sequence[int]) -> range:
    first = sum(cut[:stage])
    return range(first, first + cut[stage])


def backward_bytes(job: Job, kind: Kind = "cuda") -> int:
    """Returns the bytes per token of a layer's backward at its largest. The gradients of its output
    and within its feed-forward block, and what the layer recomputes. In the block, that of the
    activation, or with a gate those of both factors of the product, whose own memory is free by
    then; on CPUs one is in holes of the heap. An adapted matrix gives two gradients of its input,
    and their sum is a third tensor. Or what is computed again instead of attention, beside what the
    layer did. The ranks of a tp group gather the gradient of the output."""
    size, found = job.train.dtypes.compute.bytes, []
    gradients = 2 if kind == "cuda" and _gated(job.model) else 1
    gradients = gradients if job.model.lora is None else 3
    for index in _kinds(job.model, range(job.model.num_layers)):
        w, rule = _widths(job, index), job.model.state_rule(index)
        recomputed = size * (_everything(job, w, kind) - layer_activation_numbers(job, index, kind))
        output = w.residual + (w.between if job.mesh.tp > 1 else 0)
        found.append(size * (output + gradients * w.inner) + recomputed)
        if rule is not None:
            found.append(rule.backward_bytes(job.data.seq_len) // job.mesh.tp + recomputed)
    return max(found)
