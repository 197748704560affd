"""What a decoder layer is made of. Its parameters follow from it, and `models.stage` builds it.

Legend: C residual width, Q width of all query heads, K width of all key/value heads, F inner width,
E experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from raypp.job.family import Shape, Weight
from raypp.job.layer_rules import DeltaRule, ShortConvolution
from raypp.job.models import DecoderOptions, LatentOptions, MoeOptions

_Part = Literal["attention", "feed_forward"]


@dataclass(frozen=True)
class Router:
    """How a router scores experts.

    Attributes:
        sigmoid: Each score is the sigmoid of its logit. False: the softmax of all.
        bias: The name, within the feed-forward block, of what is added to the scores for the choice
            alone, and its shape. None: nothing is.
        least: The sum that weights are divided by is at least this. None: `added` is added to it.
    """

    sigmoid: bool = False
    bias: tuple[str, Shape] | None = None
    least: float | None = None
    added: float = 1e-20


@dataclass(frozen=True)
class Layer:
    """A decoder layer. The defaults are those of Llama without biases.

    `stage_ends` of the options says which class the norms have, `attention_rule` whether attention
    has sinks, `state_rule` whether there is something else instead of attention.

    Attributes:
        head_norms: Queries and keys are normalised per head, with one gain for all heads.
        whole_norms: Queries and keys are normalised over all heads together.
        head_norm_names: The family's names of these norms, of queries and keys.
        out_name: Its name of the projection of attention's output.
        latent: Keys and values come from a latent (`LatentOptions`).
        fused_qkv: One matrix, `qkv_proj`, projects to queries, keys and values, in this order.
        output_gate: Attention's output is multiplied by the sigmoid of a gate, which `q_proj`
            projects to beside each query head.
        split_delta: The delta rule's projections are four matrices, not two with key heads outside.
        neighbours: The rotary encoding turns pairs of neighbouring dims, not dims of two halves.
        norms: The family's names of the norms before and after attention, before and after the
            feed-forward block. None: there is none at this place.
        residual_scale: What both blocks' outputs are multiplied by before they are added.
        mlp_name: The family's name of the feed-forward block.
        mlp: `gated`: SwiGLU; `gelu`: the same with GELU. `fused`: SwiGLU with one matrix for gate
            and up. `plain`: without a gate, with GELU. `experts`; `joined`: experts whose stacks
            are one tensor in the files, gate and up together; `clamped`: those of gpt-oss.
        mlp_bias: The projections of a gated or plain feed-forward block have biases.
        matrices: The family's names of the gate, up and down matrices of a gated feed-forward
            block, or of experts' stacks.
        shared: Inner width of the expert that all tokens share; None: there is none.
        shared_gate: Its output is multiplied by a gate.
        router: How experts are scored.
    """

    qkv_bias: bool = False
    out_bias: bool = False
    head_norms: bool = False
    whole_norms: bool = False
    head_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    out_name: str = "o_proj"
    latent: bool = False
    fused_qkv: bool = False
    output_gate: bool = False
    split_delta: bool = False
    neighbours: bool = False
    norms: tuple[str | None, str | None, str | None, str | None] = (
        "input_layernorm", None, "post_attention_layernorm", None,
    )  # fmt: skip
    residual_scale: float = 1.0
    mlp_name: str = "mlp"
    mlp: Literal["gated", "gelu", "fused", "plain", "experts", "joined", "clamped"] = "gated"
    mlp_bias: bool = False
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: int | None = None
    shared_gate: bool = True
    router: Router = Router()

    def weights(self, options: Any, index: int) -> list[Weight]:
        """Returns the parameters of the layer with a global index, in export order."""
        attention: Iterator[Weight]
        if isinstance(rule := options.state_rule(index), DeltaRule):
            attention = _delta_rule(options, self, rule)
        elif rule is not None:
            attention = _convolution(options, rule)
        elif self.latent:
            attention = _latent_attention(options, self)
        else:
            attention = _attention(options, self, sinks=options.attention_rule(index).sinks)
        norms = [weight for name in self.norms if name for weight in _norm(options, name, options.hidden_size)]
        return [*attention, *norms, *(_experts if self.routes else _feed_forward)(options, self)]

    @property
    def shared_name(self) -> str:
        """The name of the expert that all tokens share."""
        return "shared_expert" if self.shared_gate else "shared_experts"

    @property
    def routes(self) -> bool:
        """Whether the feed-forward block has experts."""
        return self.mlp in ("experts", "joined", "clamped")


PLAIN = Layer()


def _linear(
    name: str,
    rows: int,
    columns: int,
    part: _Part,
    *,
    bias: bool = False,
    residual: bool = False,
    joins: Shape = (),
    shared: bool = False,
) -> Iterator[Weight]:
    if not residual and not shared:
        joins = joins or (rows,)
    yield Weight(f"{name}.weight", (rows, columns), part, residual=residual, joins=joins)
    if bias:
        yield Weight(f"{name}.bias", (rows,), part, joins=joins)


def _norm(options: DecoderOptions, name: str, size: int, joins: Shape = ()) -> Iterator[Weight]:
    ends = options.stage_ends()
    yield Weight(f"{name}.weight", (size,), "norm", initial=0.0 if ends.gain_from_zero else None, joins=joins)
    if ends.layer_norm:
        yield Weight(f"{name}.bias", (size,), "norm", joins=joins)


def _attention(options: DecoderOptions, layer: Layer, *, sinks: bool) -> Iterator[Weight]:
    """Yields q `[Q, C]`, k and v `[K, C]`, or qkv `[Q + 2K, C]`; o `[C, Q]`; norms and sinks."""
    width, head = options.hidden_size, options.dim_per_head
    queries, keys = options.num_heads * head, options.kv_heads * head
    projected = 2 * queries if layer.output_gate else queries
    parts = {"q_proj": projected, "k_proj": keys, "v_proj": keys}
    joins: Shape = ()
    if layer.fused_qkv:
        joins = (queries, keys, keys)
        parts = {"qkv_proj": sum(joins)}
    for name, rows in parts.items():
        yield from _linear(f"self_attn.{name}", rows, width, "attention", bias=layer.qkv_bias, joins=joins)
    yield from _linear(f"self_attn.{layer.out_name}", width, queries, "attention", bias=layer.out_bias, residual=True)
    if layer.head_norms or layer.whole_norms:
        whole = layer.whole_norms
        for name, rows in zip(layer.head_norm_names, (queries, keys), strict=True):
            yield from _norm(options, f"self_attn.{name}", rows if whole else head, (rows,) if whole else ())
    if sinks:
        heads = (options.num_heads,)
        yield Weight("self_attn.sinks", heads, "attention", initial=0.0, joins=heads)


def delta_projections(rule: DeltaRule, layer: Layer) -> dict[str, int]:
    """Returns the rows of a delta rule's projections: queries, keys, values, gate, beta, decay."""
    if not layer.split_delta:
        return {"in_proj_qkvz": rule.channels + rule.values, "in_proj_ba": 2 * rule.value_heads}
    heads = rule.value_heads
    return {"in_proj_qkv": rule.channels, "in_proj_z": rule.values, "in_proj_b": heads, "in_proj_a": heads}


def _delta_rule(options: DecoderOptions, layer: Layer, rule: DeltaRule) -> Iterator[Weight]:
    """Yields the parameters of `raypp.stages.models.delta_rule.GatedDeltaRule`."""
    heads, mixed = (rule.value_heads,), (rule.keys, rule.keys, rule.values)
    yield Weight("linear_attn.dt_bias", heads, "norm", initial=1.0, fp32=True, joins=heads)
    yield Weight("linear_attn.A_log", heads, "norm", initial="decay", fp32=True, joins=heads)
    yield Weight("linear_attn.conv1d.weight", (rule.channels, 1, rule.kernel), "norm", fp32=True, joins=mixed)
    for name, rows in delta_projections(rule, layer).items():
        joins = mixed if name == "in_proj_qkv" else ()
        yield from _linear(f"linear_attn.{name}", rows, options.hidden_size, "attention", joins=joins)
    yield Weight("linear_attn.norm.weight", (rule.value_dim,), "norm")
    yield from _linear("linear_attn.out_proj", options.hidden_size, rule.values, "attention", residual=True)


def _convolution(options: DecoderOptions, rule: ShortConvolution) -> Iterator[Weight]:
    """Yields the parameters of `raypp.stages.models.short_convolution.GatedConvolution`."""
    width, channels = options.hidden_size, rule.channels
    yield Weight("conv.conv.weight", (channels, 1, rule.kernel), "norm", fp32=True, joins=(channels,))
    yield from _linear("conv.in_proj", 3 * channels, width, "attention", joins=(channels,) * 3)
    yield from _linear("conv.out_proj", width, channels, "attention", residual=True)


def _latent_attention(options: LatentOptions, layer: Layer) -> Iterator[Weight]:
    """Yields the weights of `raypp.stages.models.latent_attention`, which has their shapes."""
    width, heads, latent = options.hidden_size, options.num_heads, options.kv_lora_rank
    linear = partial(_linear, part="attention")
    if options.q_lora_rank is None:
        yield from linear("self_attn.q_proj", heads * options.qk_head_dim, width)
    else:
        yield from linear("self_attn.q_a_proj", options.q_lora_rank, width, bias=layer.qkv_bias, shared=True)
        yield from _norm(options, "self_attn.q_a_layernorm", options.q_lora_rank)
        yield from linear("self_attn.q_b_proj", heads * options.qk_head_dim, options.q_lora_rank)
    both = latent + options.qk_rope_head_dim
    yield from linear("self_attn.kv_a_proj_with_mqa", both, width, bias=layer.qkv_bias, shared=True)
    yield from _norm(options, "self_attn.kv_a_layernorm", latent)
    yield from linear("self_attn.kv_b_proj", heads * (options.qk_nope_head_dim + options.v_head_dim), latent)
    yield from linear("self_attn.o_proj", width, heads * options.v_head_dim, bias=layer.out_bias, residual=True)


def _feed_forward(options: DecoderOptions, layer: Layer) -> Iterator[Weight]:
    """Yields matrices `[F, C]`, or `[2F, C]` if gate and up are one, and the one back, `[C, F]`."""
    width, inner = options.hidden_size, options.ffn_size
    if layer.mlp == "fused":
        into, back = {"gate_up_proj": 2 * inner}, "down_proj"
    elif layer.mlp == "plain":
        into, back = {"c_fc": inner}, "c_proj"
    else:
        gate, up, back = layer.matrices
        into = {gate: inner, up: inner}
    joins = (inner, inner) if layer.mlp == "fused" else ()
    yield from _projections(layer.mlp_name, into, back, width, inner, bias=layer.mlp_bias, joins=joins)


def _projections(
    block: str, into: dict[str, int], back: str, width: int, inner: int, *, bias: bool = False, joins: Shape = ()
) -> Iterator[Weight]:
    for name, rows in into.items():
        yield from _linear(f"{block}.{name}", rows, width, "feed_forward", bias=bias, joins=joins)
    yield from _linear(f"{block}.{back}", width, inner, "feed_forward", bias=bias, residual=True)


def _experts(options: MoeOptions, layer: Layer) -> Iterator[Weight]:
    """Yields the weights of `raypp.stages.models.moe.MixtureOfExperts`. Router `[E, C]`; gate and
    up `[E, F, C]`, or joined `[E, 2F, C]`, down `[E, C, F]`. Clamped: gate and up `[E, C, 2F]` and
    down `[E, F, C]` with biases. The gate of a shared expert's output is `[1, C]`."""
    count, width, inner = options.num_experts, options.hidden_size, options.expert_ffn_size
    stacks = f"{layer.mlp_name}.experts.fused"
    if layer.mlp == "clamped":
        yield from _linear(f"{layer.mlp_name}.router", count, width, "feed_forward", bias=True)
        yield Weight(f"{stacks}_gate_up_proj", (count, width, 2 * inner), "experts", transposed=True)
        yield Weight(f"{stacks}_gate_up_proj_bias", (count, 2 * inner), "experts", initial=0.0)
        yield Weight(f"{stacks}_down_proj", (count, inner, width), "experts", residual=True, transposed=True)
        yield Weight(f"{stacks}_down_proj_bias", (count, width), "experts", initial=0.0)
        return
    gate, up, down = (f"{layer.mlp_name}.experts.{name}" for name in layer.matrices)
    yield from _linear(f"{layer.mlp_name}.gate", count, width, "feed_forward")
    if layer.router.bias is not None:
        name, shape = layer.router.bias
        yield Weight(f"{layer.mlp_name}.{name}", shape, "state", initial=0.0)
    if layer.mlp == "joined":
        yield Weight(f"{stacks}_gate_up_proj", (count, 2 * inner, width), "experts")
        down = f"{stacks}_down_proj"
    else:
        yield Weight(gate, (count, inner, width), "experts")
        yield Weight(up, (count, inner, width), "experts")
    yield Weight(down, (count, width, inner), "experts", residual=True)
    if layer.shared is not None:
        into = {"gate_proj": layer.shared, "up_proj": layer.shared}
        yield from _projections(f"{layer.mlp_name}.{layer.shared_name}", into, "down_proj", width, layer.shared)
        if layer.shared_gate:
            yield from _linear(f"{layer.mlp_name}.shared_expert_gate", 1, width, "feed_forward")
