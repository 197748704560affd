"""The parts of a decoder layer, named as Hugging Face names them.

Legend: B rows, T tokens, S = B · T, H query heads, K key/value heads, D head width, C residual
width.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypp.job.decoder_layer import PLAIN, Layer
from raypp.job.layer_rules import NO_RULE, AttentionRule
from raypp.job.models import DecoderOptions
from raypp.stages.models.attention import packed_attention
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.products import Projection
from raypp.stages.models.rotary import Table, rotated
from raypp.stages.models.tensor_ranks import weight_here


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


def new_norm(options: DecoderOptions, width: int) -> nn.Module:
    """Returns a norm of the kind that the family has, RMSNorm or LayerNorm (arXiv:1607.06450)."""
    ends = options.stage_ends()
    kind = nn.LayerNorm if ends.layer_norm else OffsetRMSNorm if ends.gain_from_zero else RMSNorm
    return kind(width, options.norm_eps)


class Attention(nn.Module):
    """Grouped-query attention by a layer's `rule`, which may have a parameter `sinks`, `[H]`."""

    def __init__(self, options: DecoderOptions, layer: Layer = PLAIN, rule: AttentionRule = NO_RULE) -> None:
        super().__init__()
        self.rule = rule
        self.sinks = nn.Parameter(torch.empty(options.num_heads)) if rule.sinks else None
        width, head = options.hidden_size, options.dim_per_head
        queries, keys = options.num_heads * head, options.kv_heads * head
        self.head_dim = head
        self.widths = (queries, keys, keys)
        self.layer = layer
        projected = 2 * queries if layer.output_gate else queries
        if layer.fused_qkv:
            self.qkv_proj = Projection(width, sum(self.widths), bias=layer.qkv_bias)
        else:
            self.q_proj = Projection(width, projected, bias=layer.qkv_bias)
            self.k_proj = Projection(width, keys, bias=layer.qkv_bias)
            self.v_proj = Projection(width, keys, bias=layer.qkv_bias)
        self.add_module(layer.out_name, Projection(queries, width, bias=layer.out_bias))
        if layer.head_norms or layer.whole_norms:
            for name, size in zip(layer.head_norm_names, (queries, keys), strict=True):
                self.add_module(name, new_norm(options, size if layer.whole_norms else head))

    def forward(self, x_BTC: Tensor, rotary: Table | None, documents: PackedDocuments) -> Tensor:
        """Computes the attention of a microbatch `[B, T, C]`; returns the same shape. `rotary`: the
        layer's table, see `raypp.stages.models.rotary`; None: no rotation."""
        q, k, v = self._projected(x_BTC)
        gate = None
        if self.layer.output_gate:
            by_head = q.view(*q.shape[:-1], -1, 2 * self.head_dim)
            q, gate = (part.flatten(-2) for part in by_head.chunk(2, dim=-1))
        if self.layer.whole_norms:
            q, k = self._normed(q, k)
        q, k, v = (part.view(-1, part.shape[-1] // self.head_dim, self.head_dim) for part in (q, k, v))
        if not self.layer.whole_norms:
            q, k = self._normed(q, k)
        if self.layer.neighbours and rotary is not None:
            # Scores do not depend on the order of dims, as long as queries and keys have the same.
            q, k = in_halves(q, rotary[0].shape[-1]), in_halves(k, rotary[0].shape[-1])
        q, k = rotated(q, rotary), rotated(k, rotary)
        sinks = None if self.sinks is None else weight_here(self, "sinks")
        out_SHD = packed_attention(q, k, v, documents, self.rule, sinks)
        out = out_SHD.reshape(*x_BTC.shape[:-1], -1)
        attended: Tensor = self.get_submodule(self.layer.out_name)(out if gate is None else out * torch.sigmoid(gate))
        return attended

    def _projected(self, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries `[B, T, H · D]`, keys and values `[B, T, K · D]`."""
        if not self.layer.fused_qkv:
            return self.q_proj(x_BTC), self.k_proj(x_BTC), self.v_proj(x_BTC)
        rows = self.qkv_proj.rows_here
        widths = self.widths if rows is None else [stop - start for start, stop in rows]
        q, k, v = self.qkv_proj(x_BTC).split(widths, dim=-1)
        # The rotary encoding copies the others. Messages between ranks need values without gaps.
        return q, k, v.contiguous()

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Normalises queries and keys `[..., width]` over the last dim, if this family does."""
        if not self.layer.head_norms and not self.layer.whole_norms:
            return q, k
        of_queries, of_keys = map(self.get_submodule, self.layer.head_norm_names)
        return of_queries(q), of_keys(k)


def in_halves(x_SHD: Tensor, width: int) -> Tensor:
    """Moves pairs of neighbours in the first `width` dims of `[S, H, D]` apart, to two halves."""
    turned, rest = torch.split(x_SHD, [width, x_SHD.shape[-1] - width], dim=-1)
    return torch.cat((turned[..., ::2], turned[..., 1::2], rest), dim=-1)


class GatedFeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202): down(silu(gate(x)) · up(x)), or with another activation."""

    def __init__(
        self, width: int, inner: int, activation: Callable[[Tensor], Tensor] = F.silu, layer: Layer = PLAIN
    ) -> None:
        super().__init__()
        self.activation, self.names = activation, layer.matrices
        for name in self.names[:2]:
            self.add_module(name, Projection(width, inner, bias=layer.mlp_bias))
        self.add_module(self.names[2], Projection(inner, width, bias=layer.mlp_bias))

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Computes the feed-forward: `[B, T, C]` to `[B, T, C]`."""
        gate, up, down = map(self.get_submodule, self.names)
        out: Tensor = down(self.activation(gate(x_BTC)) * up(x_BTC))
        return out


class FusedFeedForward(nn.Module):
    """SwiGLU with one matrix, `gate_up_proj`, for the gate and the values that it multiplies."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = Projection(width, 2 * inner, bias=False)
        self.down_proj = Projection(inner, width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Computes the feed-forward: `[B, T, C]` to `[B, T, C]`."""
        gate, up = self.gate_up_proj(x_BTC).chunk(2, dim=-1)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


class PlainFeedForward(nn.Module):
    """A feed-forward block without a gate: c_proj(gelu(c_fc(x))), GELU by its tanh formula."""

    def __init__(self, width: int, inner: int, *, bias: bool = False) -> None:
        super().__init__()
        self.c_fc = Projection(width, inner, bias=bias)
        self.c_proj = Projection(inner, width, bias=bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Computes the feed-forward: `[B, T, C]` to `[B, T, C]`."""
        out: Tensor = self.c_proj(F.gelu(self.c_fc(x_BTC), approximate="tanh"))
        return out


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each added to the residual stream, with norms around them.
    `layer`: the names of the blocks and norms, and the factor of what is added."""

    def __init__(self, options: DecoderOptions, attention: nn.Module, mlp: nn.Module, layer: Layer = PLAIN) -> None:
        super().__init__()
        self.layer = layer
        self.mixer_name: str = getattr(attention, "block_name", "self_attn")
        self.add_module(self.mixer_name, attention)
        self.add_module(layer.mlp_name, mlp)
        for name in layer.norms:
            if name is not None:
                self.add_module(name, new_norm(options, options.hidden_size))

    def forward(
        self, x_BTC: Tensor, rotary: Table | None, documents: PackedDocuments, labelled_BT: Tensor | None = None
    ) -> Tensor:
        """Runs the layer.

        Args:
            x_BTC: Residual stream `[B, T, C]`.
            rotary: The layer's table, see `raypp.stages.models.rotary`; None: no rotation.
            labelled_BT: Tokens with a label, bool `[B, T]`, for losses within the layer. None: no
                such losses.

        Returns:
            The residual stream `[B, T, C]`.
        """
        before_attention, after_attention, before_mlp, after_mlp = self.layer.norms
        mixer = self.get_submodule(self.mixer_name)
        attended = mixer(self._normed(before_attention, x_BTC), rotary, documents)
        x_BTC = x_BTC + self._scaled(self._normed(after_attention, attended))
        fed = self.feed(self._normed(before_mlp, x_BTC), labelled_BT)
        return x_BTC + self._scaled(self._normed(after_mlp, fed))

    def _normed(self, name: str | None, x_BTC: Tensor) -> Tensor:
        """Applies the norm of a name to `[B, T, C]`."""
        if name is None:
            return x_BTC
        out: Tensor = self.get_submodule(name)(x_BTC)
        return out

    def _scaled(self, x_BTC: Tensor) -> Tensor:
        """Returns what is added to the residual stream, `[B, T, C]`."""
        return x_BTC if self.layer.residual_scale == 1 else x_BTC * self.layer.residual_scale

    def feed(self, x_BTC: Tensor, labelled_BT: Tensor | None) -> Tensor:
        """Runs the feed-forward block: `[B, T, C]` to `[B, T, C]`. Layers with experts override it,
        because their losses need the tokens with a label, bool `[B, T]`."""
        out: Tensor = self.get_submodule(self.layer.mlp_name)(x_BTC)
        return out
