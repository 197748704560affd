"""Layers of Gemma 4: K and V of one layer serve later ones, each has embeddings of its own, or
experts beside its feed-forward block.

K and V, and these embeddings, are arguments and results of layers, so a recomputed or sharded layer
treats them as its other inputs. Layers that share are on one stage (`DecoderOptions.uncut`).

Legend: B rows, T tokens, S = B · T, H query heads, K key/value heads, D head width, C residual
width, L layers, P width of a per-layer embedding, E experts, N experts of a token.
"""

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypp.job.decoder_layer import Layer
from raypp.job.families.gemma4 import Gemma4Layer, Gemma4Options
from raypp.job.known_families import FAMILIES
from raypp.job.layer_rules import AttentionRule
from raypp.job.models import DecoderOptions
from raypp.stages.models.attention import packed_attention
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.experts import JoinedExperts
from raypp.stages.models.layers import Attention, DecoderLayer, GatedFeedForward, new_norm
from raypp.stages.models.moe import MixtureOfExperts
from raypp.stages.models.products import Lookup, Projection
from raypp.stages.models.rotary import Table, rotated
from raypp.stages.models.stage import DecoderStage

_gelu = partial(F.gelu, approximate="tanh")


class SharingAttention(Attention):
    """Attention with normalised values, whose K and V may be those of another layer."""

    o_proj: Projection
    q_norm: nn.Module
    k_norm: nn.Module | None

    def __init__(self, options: DecoderOptions, layer: Gemma4Layer, rule: AttentionRule) -> None:
        super().__init__(options, layer, rule)
        self.gives, self.eps = layer.gives, options.norm_eps
        if layer.takes or layer.keys_as_values:
            self.v_proj = None  # type: ignore[assignment]
        if layer.takes:
            self.k_proj = self.k_norm = None  # type: ignore[assignment]

    def forward(  # type: ignore[override]
        self,
        x_BTC: Tensor,
        rotary: Table,
        documents: PackedDocuments,
        k_SKD: Tensor | None = None,
        v_SKD: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Computes `[B, T, C]` of `[B, T, C]`; with K and V, if later layers take them. `k_SKD` and
        `v_SKD`, `[S, K, D]`, are those that this layer takes."""
        q = rotated(self.q_norm(self._heads(self.q_proj(x_BTC))), rotary)
        if k_SKD is None or v_SKD is None:
            assert self.k_proj is not None and self.k_norm is not None
            keys = self._heads(self.k_proj(x_BTC))
            values = keys if self.v_proj is None else self._heads(self.v_proj(x_BTC))
            k_SKD = rotated(self.k_norm(keys), rotary)
            v_SKD = F.rms_norm(values, (self.head_dim,), None, self.eps)
        out_SHD = packed_attention(q, k_SKD, v_SKD, documents, self.rule)
        out: Tensor = self.o_proj(out_SHD.reshape(*x_BTC.shape[:-1], -1))
        return (out, k_SKD, v_SKD) if self.gives else out

    def _heads(self, x: Tensor) -> Tensor:
        """Splits `[B, T, width]` into heads, `[S, H or K, D]`."""
        return x.view(-1, x.shape[-1] // self.head_dim, self.head_dim)


class ScaledRouter(nn.Module):
    """Logits of experts for normalised and scaled tokens, and a factor of each expert."""

    def __init__(self, options: Gemma4Options) -> None:
        super().__init__()
        self.eps, self.factor = options.norm_eps, options.hidden_size**-0.5
        self.proj = Projection(options.hidden_size, options.num_experts, bias=False)
        self.scale = nn.Parameter(torch.empty(options.hidden_size))
        self.per_expert_scale = nn.Parameter(torch.empty(options.num_experts))

    def forward(self, x_SC: Tensor) -> Tensor:
        """Returns logits `[S, E]` of tokens `[S, C]`."""
        normed = F.rms_norm(x_SC, (x_SC.shape[-1],), None, self.eps)
        out: Tensor = self.proj(normed * self.scale * self.factor)
        return out


class ExpertsBeside(MixtureOfExperts):
    """Experts that take the residual stream beside the feed-forward block, with own norms."""

    def __init__(self, options: Gemma4Options) -> None:
        super().__init__(options, Layer(mlp="joined"))
        del self.gate
        self.router = ScaledRouter(options)
        self.experts = JoinedExperts(options.num_experts, options.hidden_size, options.expert_ffn_size, _gelu)
        self.pre_feedforward_layernorm_2 = new_norm(options, options.hidden_size)
        self.post_feedforward_layernorm_2 = new_norm(options, options.hidden_size)

    def forward(self, x_BTC: Tensor, labelled_BT: Tensor | None = None) -> Tensor:
        """Returns what is added to the result of the feed-forward block, `[B, T, C]`."""
        out: Tensor = self.post_feedforward_layernorm_2(super().forward(x_BTC, labelled_BT))
        return out

    def _scores(self, x_SC: Tensor) -> tuple[Tensor, Tensor]:
        logits_SE = self.router(x_SC)
        return logits_SE, F.softmax(logits_SE, dim=-1, dtype=torch.promote_types(x_SC.dtype, torch.float32))

    def _taken(self, x_SC: Tensor) -> Tensor:
        out: Tensor = self.pre_feedforward_layernorm_2(x_SC)
        return out

    def _weights(self, scores_SN: Tensor, experts_SN: Tensor) -> Tensor:
        return scores_SN / scores_SN.sum(-1, keepdim=True) * self.router.per_expert_scale[experts_SN]


class SharingLayer(DecoderLayer):
    """A layer of Gemma 4, whose result is multiplied by a scalar that is not trained."""

    layer: Gemma4Layer
    layer_scalar: Tensor

    def __init__(self, options: DecoderOptions, attention: nn.Module, mlp: nn.Module, layer: Gemma4Layer) -> None:
        super().__init__(options, attention, mlp, layer)
        self.register_buffer("layer_scalar", torch.empty(1))
        if layer.per_layer:
            self.per_layer_input_gate = Projection(options.hidden_size, layer.per_layer, bias=False)
            self.per_layer_projection = Projection(layer.per_layer, options.hidden_size, bias=False)
            self.post_per_layer_input_norm = new_norm(options, options.hidden_size)
        if layer.beside:
            assert isinstance(options, Gemma4Options)
            self.moe = ExpertsBeside(options)
            self.post_feedforward_layernorm_1 = new_norm(options, options.hidden_size)

    def forward(  # type: ignore[override]
        self,
        x_BTC: Tensor,
        rotary: Table,
        documents: PackedDocuments,
        labelled_BT: Tensor | None = None,
        k_SKD: Tensor | None = None,
        v_SKD: Tensor | None = None,
        own_BTP: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Runs the layer; the further arguments and results are those of its attention, and its
        embeddings `[B, T, P]`."""
        before_attention, after_attention, before_mlp, after_mlp = self.layer.norms
        attention: Any = self.self_attn
        attended = attention(self._normed(before_attention, x_BTC), rotary, documents, k_SKD, v_SKD)
        attended, *given = attended if self.layer.gives else (attended,)
        x_BTC = x_BTC + self._normed(after_attention, attended)
        fed = self.feed(self._normed(before_mlp, x_BTC), labelled_BT)
        if self.layer.beside:
            fed = self.post_feedforward_layernorm_1(fed) + self.moe(x_BTC, labelled_BT)
        x_BTC = x_BTC + self._normed(after_mlp, fed)
        if own_BTP is not None:
            gated = _gelu(self.per_layer_input_gate(x_BTC)) * own_BTP
            x_BTC = x_BTC + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        x_BTC = x_BTC * self.layer_scalar.to(x_BTC.dtype)
        return (x_BTC, *given) if given else x_BTC


class SharingStage(DecoderStage):
    """A stage of Gemma 4. The first has the per-layer embeddings of all layers."""

    options: Gemma4Options

    def __init__(self, options: Gemma4Options, layers: range, first: bool, last: bool) -> None:
        super().__init__(options, layers, first, last, build_layer)
        if first and options.per_layer_width:
            rows = options.num_layers * options.per_layer_width
            self.model.embed_tokens_per_layer = Lookup(options.per_layer_vocab, rows)
            self.model.per_layer_model_projection = Projection(options.hidden_size, rows, bias=False)
            self.model.per_layer_projection_norm = new_norm(options, options.per_layer_width)

    def run_layers(
        self,
        x_BTC: Tensor,
        tokens_BT: Tensor,
        tables: list[Table | None],
        documents: PackedDocuments,
        labelled_BT: Tensor | None,
    ) -> Tensor:
        """Runs the layers of the stage: `[B, T, C]` to `[B, T, C]`."""
        own: tuple[Tensor, ...] | list[None] = [None] * self.options.num_layers
        if self.options.per_layer_width:
            own = self._per_layer(x_BTC, tokens_BT).unbind(2)
        given: dict[bool, tuple[Tensor, Tensor]] = {}
        layers: dict[str, Any] = dict(self.model.layers.items())
        for (index, layer), table in zip(layers.items(), tables, strict=True):
            kind = self.options.slides(int(index))
            taken = given[kind] if layer.layer.takes else (None, None)
            out = layer(x_BTC, table, documents, labelled_BT, *taken, own[int(index)])
            if layer.layer.gives:
                x_BTC, *pair = out
                given[kind] = cast(tuple[Tensor, Tensor], tuple(pair))
            else:
                x_BTC = out
        return x_BTC

    def _per_layer(self, x_BTC: Tensor, tokens_BT: Tensor) -> Tensor:
        """Returns the embeddings of all layers, `[B, T, L, P]`."""
        shape = (self.options.num_layers, self.options.per_layer_width)
        model: Any = self.model
        factor = torch.tensor(shape[1] ** 0.5, dtype=x_BTC.dtype)
        of_tokens = (model.embed_tokens_per_layer(tokens_BT) * factor).unflatten(-1, shape)
        of_stream = (model.per_layer_model_projection(x_BTC) * self.options.hidden_size**-0.5).unflatten(-1, shape)
        out: Tensor = (model.per_layer_projection_norm(of_stream) + of_tokens) * 2**-0.5
        return out


def build_layer(options: DecoderOptions, index: int) -> DecoderLayer:
    """Builds the layer with a global index."""
    layer = FAMILIES[options.kind].layer(options, index)
    assert isinstance(options, Gemma4Options) and isinstance(layer, Gemma4Layer)
    own = options.of_layer(index)
    attention = SharingAttention(own, layer, options.attention_rule(index))
    return SharingLayer(own, attention, GatedFeedForward(own.hidden_size, own.ffn_size, _gelu), layer)


def build_decoder(options: Gemma4Options, layers: range, first: bool, last: bool) -> nn.Module:
    """Builds a stage of Gemma 4."""
    return SharingStage(options, layers, first, last)
