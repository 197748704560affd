"""The parts of a decoder layer, named as Hugging Face names them.

Legend: B rows, T tokens, S = B · T, H query heads, K key/value heads, D head width, C residual
width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypp.models.attention import packed_attention
from raypp.models.documents import PackedDocuments
from raypp.models.rotary import Table, rotated
from raypp.spec.attention_rule import NO_RULE, AttentionRule
from raypp.spec.models import DecoderOptions


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned gain, in fp32, or in the input's dtype if wider."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dim: `[..., width]` to `[..., width]`."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class OffsetRMSNorm(RMSNorm):
    """RMSNorm whose gain is 1 + weight, in fp32, or in the input's dtype if wider."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dim: `[..., width]` to `[..., width]`."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), (x.shape[-1],), 1 + self.weight.to(wide), self.eps).to(x.dtype)


LayerNorm = nn.LayerNorm
"""LayerNorm (arXiv:1607.06450) with a gain and a bias. Families may not import torch."""
NormClass = type[RMSNorm] | type[LayerNorm]


class Attention(nn.Module):
    """Grouped-query attention.

    Args:
        options: The `model:` section.
        qkv_bias: The projections of queries, keys and values have biases.
        out_bias: The projection of the output has a bias.
        head_norms: Queries and keys are normalised per head, with one gain for all heads.
        whole_norms: Queries and keys are normalised over all heads together.
        fused: One matrix, `qkv_proj`, projects to queries, keys and values, in this order.
        neighbours: The rotary encoding turns pairs of neighbouring dims, not dims of two halves.
        rule: The layer's rule. With sinks, the module has the parameter `sinks`, `[H]`.
        norm: The class of these norms.
    """

    def __init__(
        self,
        options: DecoderOptions,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        head_norms: bool = False,
        whole_norms: bool = False,
        fused: bool = False,
        neighbours: bool = False,
        rule: AttentionRule = NO_RULE,
        norm: type[RMSNorm] = RMSNorm,
    ) -> None:
        super().__init__()
        self.rule = rule
        self.sinks = nn.Parameter(torch.empty(options.num_heads)) if rule.sinks else None
        width, head = options.hidden_size, options.dim_per_head
        queries, keys = options.num_heads * head, options.kv_heads * head
        self.head_dim = head
        self.widths = (queries, keys, keys)
        self.whole_norms = whole_norms
        self.fused = fused
        self.neighbours = neighbours
        if fused:
            self.qkv_proj = nn.Linear(width, sum(self.widths), bias=qkv_bias)
        else:
            self.q_proj = nn.Linear(width, queries, bias=qkv_bias)
            self.k_proj = nn.Linear(width, keys, bias=qkv_bias)
            self.v_proj = nn.Linear(width, keys, bias=qkv_bias)
        self.o_proj = nn.Linear(queries, width, bias=out_bias)
        normed = (queries, keys) if whole_norms else (head, head)
        norms = [norm(size, options.norm_eps) if head_norms or whole_norms else None for size in normed]
        self.q_norm, self.k_norm = norms

    def forward(self, x_BTC: Tensor, rotary: Table | None, documents: PackedDocuments) -> Tensor:
        """Computes the attention of a microbatch.

        Args:
            x_BTC: Input `[B, T, C]`.
            rotary: The layer's table, see `raypp.models.rotary`; None: no rotation.
            documents: The document boundaries.

        Returns:
            The output `[B, T, C]`.
        """
        q, k, v = self._projected(x_BTC)
        if self.whole_norms:
            q, k = self._normed(q, k)
        q, k, v = (part.view(-1, part.shape[-1] // self.head_dim, self.head_dim) for part in (q, k, v))
        if not self.whole_norms:
            q, k = self._normed(q, k)
        if self.neighbours and rotary is not None:
            # Scores do not depend on the order of dims, as long as queries and keys have the same.
            q, k = _in_halves(q, rotary[0].shape[-1]), _in_halves(k, rotary[0].shape[-1])
        q, k = rotated(q, rotary), rotated(k, rotary)
        out_SHD = packed_attention(q, k, v, documents, self.rule, self.sinks)
        attended: Tensor = self.o_proj(out_SHD.reshape(*x_BTC.shape[:-1], -1))
        return attended

    def _projected(self, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries `[B, T, H · D]`, keys and values `[B, T, K · D]`."""
        if not self.fused:
            return self.q_proj(x_BTC), self.k_proj(x_BTC), self.v_proj(x_BTC)
        q, k, v = self.qkv_proj(x_BTC).split(self.widths, dim=-1)
        # The rotary encoding copies the others. Messages between ranks need values without gaps.
        return q, k, v.contiguous()

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Normalises queries and keys `[..., width]` over the last dim, if this family does."""
        if self.q_norm is None or self.k_norm is None:
            return q, k
        return self.q_norm(q), self.k_norm(k)


def _in_halves(x_SHD: Tensor, width: int) -> Tensor:
    """Moves pairs of neighbours in the first `width` dims of `[S, H, D]` apart, to two halves."""
    turned, rest = torch.split(x_SHD, [width, x_SHD.shape[-1] - width], dim=-1)
    return torch.cat((turned[..., ::2], turned[..., 1::2], rest), dim=-1)


class GatedFeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202): down(silu(gate(x)) · up(x)), or with another activation."""

    def __init__(
        self, width: int, inner: int, activation: Callable[[Tensor], Tensor] = F.silu, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Computes the feed-forward: `[B, T, C]` to `[B, T, C]`."""
        out: Tensor = self.down_proj(self.activation(self.gate_proj(x_BTC)) * self.up_proj(x_BTC))
        return out


class FusedFeedForward(nn.Module):
    """SwiGLU with one matrix, `gate_up_proj`, for the gate and the values that it multiplies."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(width, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Computes the feed-forward: `[B, T, C]` to `[B, T, C]`."""
        gate, up = self.gate_up_proj(x_BTC).chunk(2, dim=-1)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


class PlainFeedForward(nn.Module):
    """A feed-forward block without a gate: c_proj(gelu(c_fc(x))), GELU by its tanh formula."""

    def __init__(self, width: int, inner: int, *, bias: bool = False) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, inner, bias=bias)
        self.c_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Computes the feed-forward: `[B, T, C]` to `[B, T, C]`."""
        out: Tensor = self.c_proj(F.gelu(self.c_fc(x_BTC), approximate="tanh"))
        return out


NormNames = tuple[str | None, str | None, str | None, str | None]
PRE_NORMS: NormNames = ("input_layernorm", None, "post_attention_layernorm", None)
"""Most families' names of the norms of a layer: before and after attention, before and after the
feed-forward block."""


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each added to the residual stream, with norms around them.

    Args:
        options: The `model:` section.
        attention: The attention block.
        mlp: The feed-forward block.
        mlp_name: The family's name for the feed-forward block.
        norms: The family's names of the norms before and after attention, before and after the
            feed-forward block. None: there is none at this place.
        norm: The class of these norms.
        residual_scale: What both blocks' outputs are multiplied by before they are added.
    """

    def __init__(
        self,
        options: DecoderOptions,
        attention: nn.Module,
        mlp: nn.Module,
        mlp_name: str = "mlp",
        *,
        norms: NormNames = PRE_NORMS,
        norm: NormClass = RMSNorm,
        residual_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp_name = mlp_name
        self.add_module(mlp_name, mlp)
        self.norm_names = norms
        self.residual_scale = residual_scale
        for name in norms:
            if name is not None:
                self.add_module(name, norm(options.hidden_size, options.norm_eps))

    def forward(
        self,
        x_BTC: Tensor,
        rotary: Table | None,
        documents: PackedDocuments,
        labelled_BT: Tensor | None = None,
    ) -> Tensor:
        """Runs the layer.

        Args:
            x_BTC: Residual stream `[B, T, C]`.
            rotary: The layer's table, see `raypp.models.rotary`; None: no rotation.
            documents: The document boundaries.
            labelled_BT: Tokens with a label, bool `[B, T]`, for losses within the layer. None: no
                such losses.

        Returns:
            The residual stream `[B, T, C]`.
        """
        before_attention, after_attention, before_mlp, after_mlp = self.norm_names
        attended = self.self_attn(self._normed(before_attention, x_BTC), rotary, documents)
        x_BTC = x_BTC + self._scaled(self._normed(after_attention, attended))
        fed = self.feed_forward(self._normed(before_mlp, x_BTC), labelled_BT)
        return x_BTC + self._scaled(self._normed(after_mlp, fed))

    def _normed(self, name: str | None, x_BTC: Tensor) -> Tensor:
        """Applies the norm of a name to `[B, T, C]`."""
        if name is None:
            return x_BTC
        out: Tensor = self.get_submodule(name)(x_BTC)
        return out

    def _scaled(self, x_BTC: Tensor) -> Tensor:
        """Returns what is added to the residual stream, `[B, T, C]`."""
        return x_BTC if self.residual_scale == 1 else x_BTC * self.residual_scale

    def feed_forward(self, x_BTC: Tensor, labelled_BT: Tensor | None) -> Tensor:
        """Runs the feed-forward block: `[B, T, C]` to `[B, T, C]`.

        Layers with experts override it, because their losses need the tokens with a label, bool
        `[B, T]`.
        """
        out: Tensor = self.get_submodule(self.mlp_name)(x_BTC)
        return out


_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


class SandwichLayer(DecoderLayer):
    """Attention and a feed-forward block with GELU, each between two norms with gain 1 + weight.

    Args:
        options: The `model:` section.
        head_norms: Queries and keys are normalised per head.
        index: The global index of the layer.
    """

    def __init__(self, options: DecoderOptions, index: int, *, head_norms: bool = False) -> None:
        width, rule = options.hidden_size, options.attention_rule(index)
        attention = Attention(options, head_norms=head_norms, rule=rule, norm=OffsetRMSNorm)
        mlp = GatedFeedForward(width, options.ffn_size, partial(F.gelu, approximate="tanh"))
        super().__init__(options, attention, mlp, norms=_NORMS, norm=OffsetRMSNorm)
