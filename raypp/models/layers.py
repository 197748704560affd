"""The parts of a decoder layer, named as Hugging Face names them.

Legend: B rows, T tokens, S = B · T, H query heads, K key/value heads, D head width, C residual
width.
"""

from __future__ import annotations

from collections.abc import Callable

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


class Attention(nn.Module):
    """Grouped-query attention.

    Args:
        options: The `model:` section.
        qkv_bias: The projections of queries, keys and values have biases.
        head_norms: Queries and keys are normalised per head, with one gain for all heads.
        rule: The layer's rule. With sinks, the module has the parameter `sinks`, `[H]`.
        norm: The class of the head norms.
    """

    def __init__(
        self,
        options: DecoderOptions,
        *,
        qkv_bias: bool = False,
        head_norms: bool = False,
        rule: AttentionRule = NO_RULE,
        norm: type[RMSNorm] = RMSNorm,
    ) -> None:
        super().__init__()
        self.rule = rule
        self.sinks = nn.Parameter(torch.empty(options.num_heads)) if rule.sinks else None
        width, head = options.hidden_size, options.dim_per_head
        self.head_dim = head
        self.q_proj = nn.Linear(width, options.num_heads * head, bias=qkv_bias)
        self.k_proj = nn.Linear(width, options.kv_heads * head, bias=qkv_bias)
        self.v_proj = nn.Linear(width, options.kv_heads * head, bias=qkv_bias)
        self.o_proj = nn.Linear(options.num_heads * head, width, bias=False)
        self.q_norm = norm(head, options.norm_eps) if head_norms else None
        self.k_norm = norm(head, options.norm_eps) if head_norms else None

    def forward(self, x_BTC: Tensor, rotary: Table | None, documents: PackedDocuments) -> Tensor:
        """Computes the attention of a microbatch.

        Args:
            x_BTC: Input `[B, T, C]`.
            rotary: The layer's table, see `raypp.models.rotary`; None: no rotation.
            documents: The document boundaries.

        Returns:
            The output `[B, T, C]`.
        """
        q, k, v = (p(x_BTC).view(-1, p.out_features // self.head_dim, self.head_dim) for p in self._projections())
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotated(q, rotary), rotated(k, rotary)
        out_SHD = packed_attention(q, k, v, documents, self.rule, self.sinks)
        attended: Tensor = self.o_proj(out_SHD.reshape(*x_BTC.shape[:-1], -1))
        return attended

    def _projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.q_proj, self.k_proj, self.v_proj


class GatedFeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202): down(silu(gate(x)) · up(x)), or with another activation."""

    def __init__(self, width: int, inner: int, activation: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Computes the feed-forward: `[B, T, C]` to `[B, T, C]`."""
        out: Tensor = self.down_proj(self.activation(self.gate_proj(x_BTC)) * self.up_proj(x_BTC))
        return out


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream.

    Args:
        options: The `model:` section.
        attention: The attention block.
        mlp: The feed-forward block.
        mlp_name: The family's name for the feed-forward block.
    """

    def __init__(self, options: DecoderOptions, attention: nn.Module, mlp: nn.Module, mlp_name: str = "mlp") -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp_name = mlp_name
        self.add_module(mlp_name, mlp)
        self.input_layernorm = RMSNorm(options.hidden_size, options.norm_eps)
        self.post_attention_layernorm = RMSNorm(options.hidden_size, options.norm_eps)

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
        x_BTC = x_BTC + self.self_attn(self.input_layernorm(x_BTC), rotary, documents)
        return x_BTC + self.feed_forward(self.post_attention_layernorm(x_BTC), labelled_BT)

    def feed_forward(self, x_BTC: Tensor, labelled_BT: Tensor | None) -> Tensor:
        """Runs the feed-forward block: `[B, T, C]` to `[B, T, C]`.

        Layers with experts override it, because their losses need the tokens with a label, bool
        `[B, T]`.
        """
        out: Tensor = self.get_submodule(self.mlp_name)(x_BTC)
        return out
