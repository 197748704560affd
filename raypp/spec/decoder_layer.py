"""What a decoder layer is made of. Its parameters follow from it, and `models.stage` builds it.

Legend: C residual width, Q width of all query heads, K width of all key/value heads, F inner width,
E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from raypp.spec.family import Weight
from raypp.spec.models import DecoderOptions, MoeOptions

_Part = Literal["attention", "feed_forward"]


@dataclass(frozen=True)
class Layer:
    """A decoder layer. The defaults are those of Llama without biases.

    `stage_ends` of the options says which class the norms have, `attention_rule` whether attention
    has sinks.

    Attributes:
        qkv_bias: The projections of queries, keys and values have biases.
        out_bias: The projection of attention's output has a bias.
        head_norms: Queries and keys are normalised per head, with one gain for all heads.
        whole_norms: Queries and keys are normalised over all heads together.
        fused_qkv: One matrix, `qkv_proj`, projects to queries, keys and values, in this order.
        neighbours: The rotary encoding turns pairs of neighbouring dims, not dims of two halves.
        norms: The family's names of the norms before and after attention, before and after the
            feed-forward block. None: there is none at this place.
        residual_scale: What both blocks' outputs are multiplied by before they are added.
        mlp_name: The family's name of the feed-forward block.
        mlp: `gated`: SwiGLU; `gelu`: the same with GELU. `fused`: SwiGLU with one matrix for gate
            and up. `plain`: without a gate, with GELU. `experts`, or `clamped`: those of gpt-oss.
        mlp_bias: The projections of a gated or plain feed-forward block have biases.
        experts: The family's names for the stacked gate, up and down matrices.
        shared: Inner width of the expert that all tokens share; None: there is none.
    """

    qkv_bias: bool = False
    out_bias: bool = False
    head_norms: bool = False
    whole_norms: bool = False
    fused_qkv: bool = False
    neighbours: bool = False
    norms: tuple[str | None, str | None, str | None, str | None] = (
        "input_layernorm", None, "post_attention_layernorm", None,
    )  # fmt: skip
    residual_scale: float = 1.0
    mlp_name: str = "mlp"
    mlp: Literal["gated", "gelu", "fused", "plain", "experts", "clamped"] = "gated"
    mlp_bias: bool = False
    experts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: int | None = None

    def weights(self, options: Any, index: int) -> list[Weight]:
        """Returns the parameters of the layer with a global index, in export order."""
        attention = _attention(options, self, sinks=options.attention_rule(index).sinks)
        norms = [weight for name in self.norms if name for weight in _norm(options, name, options.hidden_size)]
        return [*attention, *norms, *(_experts if self.routes else _feed_forward)(options, self)]

    @property
    def routes(self) -> bool:
        """Whether the feed-forward block has experts."""
        return self.mlp in ("experts", "clamped")


PLAIN = Layer()


def _linear(
    name: str, rows: int, columns: int, part: _Part, *, bias: bool = False, residual: bool = False
) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (rows, columns), part, residual=residual)
    if bias:
        yield Weight(f"{name}.bias", (rows,), part)


def _norm(options: DecoderOptions, name: str, size: int) -> Iterator[Weight]:
    ends = options.stage_ends()
    yield Weight(f"{name}.weight", (size,), "norm", initial=0.0 if ends.gain_from_zero else None)
    if ends.layer_norm:
        yield Weight(f"{name}.bias", (size,), "norm")


def _attention(options: DecoderOptions, layer: Layer, *, sinks: bool) -> Iterator[Weight]:
    """Yields q `[Q, C]`, k and v `[K, C]`, or qkv `[Q + 2K, C]`; o `[C, Q]`; norms and sinks."""
    width, head = options.hidden_size, options.dim_per_head
    queries, keys = options.num_heads * head, options.kv_heads * head
    parts = {"qkv_proj": queries + 2 * keys} if layer.fused_qkv else {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    for name, rows in parts.items():
        yield from _linear(f"self_attn.{name}", rows, width, "attention", bias=layer.qkv_bias)
    yield from _linear("self_attn.o_proj", width, queries, "attention", bias=layer.out_bias, residual=True)
    if layer.head_norms or layer.whole_norms:
        yield from _norm(options, "self_attn.q_norm", queries if layer.whole_norms else head)
        yield from _norm(options, "self_attn.k_norm", keys if layer.whole_norms else head)
    if sinks:
        yield Weight("self_attn.sinks", (options.num_heads,), "attention", initial=0.0)


def _feed_forward(options: DecoderOptions, layer: Layer) -> Iterator[Weight]:
    """Yields matrices `[F, C]`, or `[2F, C]` if gate and up are one, and the one back, `[C, F]`."""
    width, inner = options.hidden_size, options.ffn_size
    if layer.mlp == "fused":
        into, back = {"gate_up_proj": 2 * inner}, "down_proj"
    elif layer.mlp == "plain":
        into, back = {"c_fc": inner}, "c_proj"
    else:
        into, back = {"gate_proj": inner, "up_proj": inner}, "down_proj"
    yield from _projections(layer.mlp_name, into, back, width, inner, bias=layer.mlp_bias)


def _projections(
    block: str, into: dict[str, int], back: str, width: int, inner: int, *, bias: bool = False
) -> Iterator[Weight]:
    for name, rows in into.items():
        yield from _linear(f"{block}.{name}", rows, width, "feed_forward", bias=bias)
    yield from _linear(f"{block}.{back}", width, inner, "feed_forward", bias=bias, residual=True)


def _experts(options: MoeOptions, layer: Layer) -> Iterator[Weight]:
    """Yields the weights of `raypp.models.moe.MixtureOfExperts`.

    Router `[E, C]`; gate and up `[E, F, C]`, down `[E, C, F]`. Clamped: gate and up `[E, C, 2F]`
    and down `[E, F, C]` with biases. A shared expert has a gate of its output, `[1, C]`.
    """
    count, width, inner = options.num_experts, options.hidden_size, options.expert_ffn_size
    if layer.mlp == "clamped":
        yield from _linear(f"{layer.mlp_name}.router", count, width, "feed_forward", bias=True)
        stacks = f"{layer.mlp_name}.experts.fused"
        yield Weight(f"{stacks}_gate_up_proj", (count, width, 2 * inner), "experts", transposed=True)
        yield Weight(f"{stacks}_gate_up_proj_bias", (count, 2 * inner), "experts", initial=0.0)
        yield Weight(f"{stacks}_down_proj", (count, inner, width), "experts", residual=True, transposed=True)
        yield Weight(f"{stacks}_down_proj_bias", (count, width), "experts", initial=0.0)
        return
    gate, up, down = (f"{layer.mlp_name}.experts.{name}" for name in layer.experts)
    yield from _linear(f"{layer.mlp_name}.gate", count, width, "feed_forward")
    yield Weight(gate, (count, inner, width), "experts")
    yield Weight(up, (count, inner, width), "experts")
    yield Weight(down, (count, width, inner), "experts", residual=True)
    if layer.shared is not None:
        into = {"gate_proj": layer.shared, "up_proj": layer.shared}
        yield from _projections(f"{layer.mlp_name}.shared_expert", into, "down_proj", width, layer.shared)
        yield from _linear(f"{layer.mlp_name}.shared_expert_gate", 1, width, "feed_forward")
