"""Attention whose keys and values are projected from one latent per token.

Legend: B rows, T tokens, S = B · T, H heads, C residual width, N and R dims of a query and key head
without and with the rotary encoding, V width of a value head, L width of the latent, Q width
between the two projections to queries.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypp.job.decoder_layer import Layer
from raypp.job.layer_rules import AttentionRule
from raypp.job.models import LatentOptions
from raypp.stages.models.attention import packed_attention
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.layers import RMSNorm, in_halves
from raypp.stages.models.products import Projection
from raypp.stages.models.rotary import Table, grown, rotated

_EPS = 1e-6
"""Of the norms within attention, whatever the other norms have."""


class LatentAttention(nn.Module):
    """Multi-head latent attention (arXiv:2405.04434).

    Matrices: to queries `[H · (N + R), C]`, or `[Q, C]` and `[H · (N + R), Q]` with a norm between;
    to the latent and the rotated part of the key, which all heads share, `[L + R, C]`; from the
    normalised latent to keys and values `[H · (N + V), L]`; out `[C, H · V]`.

    Kernels, meshes and caches take heads of one width: the narrower of keys and values is padded
    with zeros, which change no result. `rule`: the layer's rule, with the scale of the scores.
    """

    def __init__(self, options: LatentOptions, layer: Layer, rule: AttentionRule) -> None:
        super().__init__()
        self.options, self.layer, self.rule = options, layer, rule
        width, heads = options.hidden_size, options.num_heads
        latent, rank = options.kv_lora_rank, options.q_lora_rank
        if rank is None:
            self.q_proj = Projection(width, heads * options.qk_head_dim, bias=False)
        else:
            self.q_a_proj = Projection(width, rank, bias=layer.qkv_bias)
            self.q_a_layernorm = RMSNorm(rank, _EPS)
            self.q_b_proj = Projection(rank, heads * options.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = Projection(width, latent + options.qk_rope_head_dim, bias=layer.qkv_bias)
        self.kv_a_layernorm = RMSNorm(latent, _EPS)
        self.kv_b_proj = Projection(latent, heads * (options.qk_nope_head_dim + options.v_head_dim), bias=False)
        self.o_proj = Projection(heads * options.v_head_dim, width, bias=layer.out_bias)

    def forward(self, x_BTC: Tensor, rotary: Table | None, documents: PackedDocuments) -> Tensor:
        """Computes the attention of a microbatch: `[B, T, C]` to `[B, T, C]`; see `Attention`."""
        options = self.options
        plain, turned, values = options.qk_nope_head_dim, options.qk_rope_head_dim, options.v_head_dim
        if options.q_lora_rank is None:
            q = self.q_proj(x_BTC)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTC)))
        heads = q.shape[-1] // (plain + turned)  # of this rank, with tp
        q_SHN, q_SHR = q.view(-1, heads, plain + turned).split([plain, turned], dim=-1)
        latent_BTL, shared_BTR = self.kv_a_proj_with_mqa(x_BTC).split([options.kv_lora_rank, turned], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent_BTL))
        k_SHN, v_SHV = kv.view(-1, heads, plain + values).split([plain, values], dim=-1)
        k_S1R = self._turned(shared_BTR.reshape(-1, 1, turned), rotary)
        q_SHD = grown(torch.cat((q_SHN, self._turned(q_SHR, rotary)), dim=-1), rotary)
        k_SHD = torch.cat((k_SHN, k_S1R.expand(-1, heads, -1)), dim=-1)
        wide = options.dim_per_head
        q_SHD, k_SHD, v_SHD = (F.pad(part, (0, wide - part.shape[-1])) for part in (q_SHD, k_SHD, v_SHV))
        out_SHV = packed_attention(q_SHD, k_SHD, v_SHD, documents, self.rule)[..., :values]
        attended: Tensor = self.o_proj(out_SHV.reshape(*x_BTC.shape[:-1], -1))
        return attended

    def _turned(self, x_SHR: Tensor, rotary: Table | None) -> Tensor:
        """Rotates `[S, H, R]`."""
        return rotated(in_halves(x_SHR, x_SHR.shape[-1]) if self.layer.neighbours else x_SHR, rotary)
