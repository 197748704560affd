"""The parts of a decoder layer, named as Hugging Face names them.

Legend: B rows, T tokens, S = B · T, H query heads, K key/value heads, D head width, C residual width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypp.models.attention import packed_attention
from raypp.models.documents import PackedDocuments
from raypp.spec.models import DecoderOptions


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned gain, computed in fp32 or the input's own wider dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotary_table(positions_S: Tensor, width: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary encoding, `[S, 1, D]` each (RoFormer, arXiv:2104.09864, half-split layout).

    Computed in fp32 or a wider `dtype`, then cast: a table in half precision is off by whole positions at length.
    """
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, width, 2, device=positions_S.device, dtype=wide) / width
    angles = positions_S.to(wide)[:, None] * theta**-exponents
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_SHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies the rotary encoding to queries or keys."""
    low, high = x_SHD.chunk(2, dim=-1)
    return x_SHD * cos + torch.cat((-high, low), dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention.

    Args:
        options: The `model:` section.
        qkv_bias: Queries, keys and values have biases.
        head_norms: Queries and keys are normed over the width of a head, with one gain for all heads.
    """

    def __init__(self, options: DecoderOptions, *, qkv_bias: bool = False, head_norms: bool = False) -> None:
        super().__init__()
        width, head = options.hidden_size, options.dim_per_head
        self.head_dim = head
        self.q_proj = nn.Linear(width, options.num_heads * head, bias=qkv_bias)
        self.k_proj = nn.Linear(width, options.kv_heads * head, bias=qkv_bias)
        self.v_proj = nn.Linear(width, options.kv_heads * head, bias=qkv_bias)
        self.o_proj = nn.Linear(options.num_heads * head, width, bias=False)
        self.q_norm = RMSNorm(head, options.norm_eps) if head_norms else None
        self.k_norm = RMSNorm(head, options.norm_eps) if head_norms else None

    def forward(self, x_BTC: Tensor, rotary: tuple[Tensor, Tensor], documents: PackedDocuments) -> Tensor:
        q, k, v = (p(x_BTC).view(-1, p.out_features // self.head_dim, self.head_dim) for p in self._projections())
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out_SHD = packed_attention(rotate(q, *rotary), rotate(k, *rotary), v, documents)
        attended: Tensor = self.o_proj(out_SHD.reshape(*x_BTC.shape[:-1], -1))
        return attended

    def _projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.q_proj, self.k_proj, self.v_proj


class GatedFeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202): down(silu(gate(x)) · up(x))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x_BTC)) * self.up_proj(x_BTC))
        return out


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream.

    Args:
        options: The `model:` section.
        attention: The attention block.
        mlp: The feed-forward block.
        mlp_name: What the family calls it.
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
        rotary: tuple[Tensor, Tensor],
        documents: PackedDocuments,
        labelled_BT: Tensor | None = None,
    ) -> Tensor:
        x_BTC = x_BTC + self.self_attn(self.input_layernorm(x_BTC), rotary, documents)
        return x_BTC + self.feed_forward(self.post_attention_layernorm(x_BTC), labelled_BT)

    def feed_forward(self, x_BTC: Tensor, labelled_BT: Tensor | None) -> Tensor:
        """Where families with experts need to know which tokens have a label."""
        out: Tensor = self.get_submodule(self.mlp_name)(x_BTC)
        return out
