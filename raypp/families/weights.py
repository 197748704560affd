"""The parameters of a decoder layer's blocks: names, shapes and parts, as in `raypp.models`.

Legend: C residual width, Q width of all query heads, K width of all key/value heads, F inner width,
E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

from raypp.spec.family import Weight
from raypp.spec.models import DecoderOptions, MoeOptions

Names = tuple[str, str, str]


def attention(
    options: DecoderOptions,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    head_norms: bool = False,
    whole_norms: bool = False,
    fused: bool = False,
) -> list[Weight]:
    """Returns the weights of `raypp.models.layers.Attention` with the same arguments.

    q `[Q, C]`, k and v `[K, C]`, or qkv `[Q + 2K, C]`; o `[C, Q]`.
    """
    width, head = options.hidden_size, options.dim_per_head
    queries, keys = options.num_heads * head, options.kv_heads * head
    declared = []
    parts = [("qkv_proj", queries + 2 * keys)] if fused else [("q_proj", queries), ("k_proj", keys), ("v_proj", keys)]
    for name, rows in parts:
        declared.append(Weight(f"self_attn.{name}.weight", (rows, width), "attention"))
        if qkv_bias:
            declared.append(Weight(f"self_attn.{name}.bias", (rows,), "attention"))
    declared.append(Weight("self_attn.o_proj.weight", (width, queries), "attention", residual=True))
    if out_bias:
        declared.append(Weight("self_attn.o_proj.bias", (width,), "attention"))
    if head_norms or whole_norms:
        sizes = {"q_norm": queries, "k_norm": keys} if whole_norms else {"q_norm": head, "k_norm": head}
        declared += [Weight(f"self_attn.{name}.weight", (size,), "norm") for name, size in sizes.items()]
    return declared


def layer_norms(
    options: DecoderOptions,
    names: Sequence[str | None] = ("input_layernorm", "post_attention_layernorm"),
    *,
    bias: bool = False,
) -> list[Weight]:
    """Returns the norms of `raypp.models.layers.DecoderLayer`, `[C]` each.

    Args:
        options: The `model:` section.
        names: The family's names of its norms; None is skipped.
        bias: They are LayerNorm with biases.
    """
    parts = ("weight", "bias") if bias else ("weight",)
    shape = (options.hidden_size,)
    return [Weight(f"{name}.{part}", shape, "norm") for name in names if name is not None for part in parts]


def gated(
    options: DecoderOptions, block: str = "mlp", *, inner: int | None = None, bias: bool = False, fused: bool = False
) -> list[Weight]:
    """Returns the weights of `raypp.models.layers.GatedFeedForward` or, fused, `FusedFeedForward`.

    Gate and up `[F, C]`, or both `[2F, C]`; down `[C, F]`.

    Args:
        options: The `model:` section.
        block: The family's name of the block.
        inner: F; None: that of the section.
        bias: All three have biases.
        fused: Gate and up are one matrix.
    """
    width, inner = options.hidden_size, inner or options.ffn_size
    if fused:
        return [
            Weight("mlp.gate_up_proj.weight", (2 * inner, width), "feed_forward"),
            Weight("mlp.down_proj.weight", (width, inner), "feed_forward", residual=True),
        ]
    declared = []
    for name, rows, columns in (("gate_proj", inner, width), ("up_proj", inner, width), ("down_proj", width, inner)):
        residual = name == "down_proj"
        declared.append(Weight(f"{block}.{name}.weight", (rows, columns), "feed_forward", residual=residual))
        if bias:
            declared.append(Weight(f"{block}.{name}.bias", (rows,), "feed_forward"))
    return declared


def plain(options: DecoderOptions, *, bias: bool = False) -> list[Weight]:
    """Returns the weights of `raypp.models.layers.PlainFeedForward`: `[F, C]` and `[C, F]`.

    Args:
        options: The `model:` section.
        bias: Both have biases.
    """
    width, inner = options.hidden_size, options.ffn_size
    declared = []
    for name, rows, columns in (("c_fc", inner, width), ("c_proj", width, inner)):
        declared.append(Weight(f"mlp.{name}.weight", (rows, columns), "feed_forward", residual=name == "c_proj"))
        if bias:
            declared.append(Weight(f"mlp.{name}.bias", (rows,), "feed_forward"))
    return declared


def experts(options: MoeOptions, block: str, names: Names) -> list[Weight]:
    """Returns the weights of `raypp.models.moe.MixtureOfExperts`.

    Router `[E, C]`, gate and up `[E, F, C]`, down `[E, C, F]`.

    Args:
        options: The `model:` section.
        block: The family's name of the feed-forward block.
        names: Names of the stacked gate, up and down matrices.
    """
    count, width, inner = options.num_experts, options.hidden_size, options.expert_ffn_size
    gate, up, down = (f"{block}.experts.{name}" for name in names)
    return [
        Weight(f"{block}.gate.weight", (count, width), "feed_forward"),
        Weight(gate, (count, inner, width), "experts"),
        Weight(up, (count, inner, width), "experts"),
        Weight(down, (count, width, inner), "experts", residual=True),
    ]


def shared_expert(options: MoeOptions, block: str, inner: int) -> list[Weight]:
    """Returns the weights that `MixtureOfExperts` has besides if its experts share one of width F.

    Gate and up `[F, C]`, down `[C, F]`, and the gate of its output, `[1, C]`.
    """
    gate = Weight(f"{block}.shared_expert_gate.weight", (1, options.hidden_size), "feed_forward")
    return [*gated(options, f"{block}.shared_expert", inner=inner), gate]
