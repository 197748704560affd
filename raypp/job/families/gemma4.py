"""Gemma 4, text only: two kinds of heads, layers that take K and V of earlier ones, per-layer
embeddings, experts beside the feed-forward block."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from pydantic import Field, model_validator

from raypp.errors import JobError, Problem
from raypp.job import limits
from raypp.job.decoder_layer import Layer
from raypp.job.families import gemma, layer_kinds
from raypp.job.families.layer_kinds import FULL, SLIDING
from raypp.job.family import DEFAULTS, SETTINGS, Family, HfFormat, Only, Weight
from raypp.job.layer_rules import AttentionRule
from raypp.job.models import MoeOptions, StageEnds, WindowOptions
from raypp.job.rope import Rotary

_GLOBAL, _LOCAL = 1_000_000.0, 10_000.0


class Gemma4Options(WindowOptions, MoeOptions):
    """Options of Gemma 4. Sizes of heads are those of layers with a window."""

    tie_embeddings: bool = True
    """Share the weights of embedding and output projection, even if they are on different stages.
    """
    sliding_window: int | None = Field(default=512, ge=1, le=limits.WIDTH)
    """Tokens that a query of a layer with a window sees, itself included. null: no layer has one.
    """
    rope_theta: float = Field(default=_GLOBAL, gt=0, le=limits.REAL)
    """Base of the rotary position encoding."""
    local_rope_theta: float = Field(default=_LOCAL, gt=0, le=limits.REAL)
    """Base of the rotary position encoding of layers with a window."""
    turned_share: float = Field(default=0.25, gt=0, le=1)
    """Share of the rotary frequencies of layers without a window that turn; the others are 0."""
    full_head_dim: int | None = Field(default=None, ge=2, le=limits.WIDTH)
    """Width of a head in layers without a window. null: head_dim."""
    full_kv_heads: int | None = Field(default=None, ge=1, le=limits.WIDTH)
    """Key/value heads of layers without a window. null: num_kv_heads."""
    keys_as_values: bool = False
    """In layers without a window, values are the keys before their norm."""
    num_kv_shared_layers: int = Field(default=0, ge=0, le=limits.LAYERS)
    """Last layers, which take K and V of the last layer before them with a window, or without."""
    wide_shared: bool = False
    """Feed-forward blocks of these layers are twice as wide."""
    per_layer_width: int = Field(default=0, ge=0, le=limits.WIDTH)
    """Width of an embedding of each token for each layer; 0: there is none."""
    per_layer_vocab: int = Field(default=4096, ge=1, le=limits.WIDTH)
    """Rows of these embeddings."""
    logit_soft_cap: float | None = Field(default=None, gt=0, le=limits.REAL)
    """Logits l become cap · tanh(l / cap). null: no cap."""
    num_experts: int = Field(default=0, ge=0, le=limits.WIDTH)
    """Experts of every layer, in addition to its feed-forward block; 0: there are none."""
    aux_loss_weight: float = Field(default=0.0, ge=0, le=limits.REAL)
    """Weight of the load-balancing loss."""

    full_every = 6

    def slides(self, index: int) -> bool:
        return super().slides(index) and (self.layer_types is not None or index != self.num_layers - 1)

    def attention_rule(self, index: int) -> AttentionRule:
        return AttentionRule(self.sliding_window if self.slides(index) else None, scale=1.0)

    def stage_ends(self) -> StageEnds:
        return StageEnds(self.hidden_size**0.5, self.logit_soft_cap)

    def takes(self, index: int) -> bool:
        """Whether a layer takes K and V of an earlier one."""
        return index >= self.num_layers - self.num_kv_shared_layers

    def giver(self, slides: bool) -> int | None:
        """Returns the layer whose K and V later ones with a window, or without, take."""
        own = range(self.num_layers - self.num_kv_shared_layers)
        return next((index for index in reversed(own) if self.slides(index) == slides), None)

    def uncut(self) -> range:
        if self.per_layer_width:
            return range(self.num_layers)
        givers = (self.giver(self.slides(index)) for index in range(self.num_layers) if self.takes(index))
        return range(min((one for one in givers if one is not None), default=self.num_layers), self.num_layers)

    @property
    def widest_head(self) -> int:
        return max(self.dim_per_head, self.full_head_dim or 0)

    def of_layer(self, index: int) -> Self:
        own: dict[str, Any] = {}
        if not self.slides(index):
            own = {"head_dim": self.full_head_dim or self.head_dim, "num_kv_heads": self.full_kv_heads or self.kv_heads}
        if self.takes(index) and self.wide_shared:
            own["ffn_size"] = 2 * self.ffn_size
        return self.model_copy(update=own) if own else self

    @model_validator(mode="after")
    def _sharers_have_givers(self) -> Self:
        count = self.num_kv_shared_layers
        if count >= self.num_layers:
            raise ValueError(f"num_kv_shared_layers {count} leaves no layer of num_layers {self.num_layers}")
        for index in range(self.num_layers - count, self.num_layers):
            if self.giver(self.slides(index)) is None:
                raise ValueError(f"layer {index} takes K and V, but no earlier layer of its kind has them")
        if self.per_layer_width and self.vocab_size > self.per_layer_vocab:
            raise ValueError(f"vocab_size {self.vocab_size} is more than the {self.per_layer_vocab} per-layer rows")
        return self


@dataclass(frozen=True)
class Gemma4Layer(Layer):
    """A layer of Gemma 4.

    Attributes:
        takes: It has no K and V, and takes those of an earlier layer.
        gives: Later layers take its K and V.
        keys_as_values: Values are the keys before their norm.
        per_layer: Width of its own embedding of each token; 0: there is none.
        beside: It has experts beside its feed-forward block.
    """

    takes: bool = False
    gives: bool = False
    keys_as_values: bool = False
    per_layer: int = 0
    beside: bool = False

    def weights(self, options: Any, index: int) -> list[Weight]:
        dropped = ("k_proj", "v_proj", "k_norm") if self.takes else ("v_proj",) if self.keys_as_values else ()
        every = super().weights(options.of_layer(index), index)
        weights = [weight for weight in every if weight.name.split(".")[1] not in dropped]
        return [*weights, *self._own(options.hidden_size), *(_experts(options) if self.beside else ())]

    def _own(self, width: int) -> Iterator[Weight]:
        yield Weight("layer_scalar", (1,), "state", initial=1.0)
        if self.per_layer:
            yield Weight("per_layer_input_gate.weight", (self.per_layer, width), "feed_forward")
            yield Weight("per_layer_projection.weight", (width, self.per_layer), "feed_forward", residual=True)
            yield Weight("post_per_layer_input_norm.weight", (width,), "norm")


def _experts(options: Gemma4Options) -> Iterator[Weight]:
    """Yields the weights of `shared_keys.ExpertsBeside`, and the norm of what they are added to."""
    count, width, inner = options.num_experts, options.hidden_size, options.expert_ffn_size
    yield Weight("moe.router.proj.weight", (count, width), "feed_forward")
    yield Weight("moe.router.scale", (width,), "norm")
    yield Weight("moe.router.per_expert_scale", (count,), "norm")
    yield Weight("moe.experts.fused_gate_up_proj", (count, 2 * inner, width), "experts")
    yield Weight("moe.experts.fused_down_proj", (count, width, inner), "experts", residual=True)
    for name in ("post_feedforward_layernorm_1", "moe.pre_feedforward_layernorm_2", "moe.post_feedforward_layernorm_2"):
        yield Weight(f"{name}.weight", (width,), "norm")


def _layer(options: Gemma4Options, index: int) -> Gemma4Layer:
    return Gemma4Layer(
        norms=gemma.LAYER.norms,
        mlp="gelu",
        head_norms=True,
        takes=options.takes(index),
        gives=bool(options.num_kv_shared_layers) and index == options.giver(options.slides(index)),
        keys_as_values=options.keys_as_values and not options.slides(index),
        per_layer=options.per_layer_width,
        beside=options.num_experts > 0,
    )


def _first_weights(options: Gemma4Options) -> list[Weight]:
    """Returns the tables and the projection of per-layer embeddings."""
    if not (width := options.per_layer_width):
        return []
    rows = options.num_layers * width
    return [
        Weight("model.embed_tokens_per_layer.weight", (options.per_layer_vocab, rows), "embedding"),
        Weight("model.per_layer_model_projection.weight", (rows, options.hidden_size), "embedding"),
        Weight("model.per_layer_projection_norm.weight", (width,), "norm"),
    ]


def rotary(options: Gemma4Options, index: int) -> Rotary:
    if options.slides(index):
        return Rotary(options.dim_per_head, options.local_rope_theta)
    width = options.full_head_dim or options.dim_per_head
    return Rotary(width, options.rope_theta, options.rope, options.turned_share)


def _read(config: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Returns the kinds of layers, the sizes of those without a window, and those of experts.
    Raises JobError: layers of one kind have several sizes, or those of experts are missing."""
    count = config["num_hidden_layers"]
    kinds = list(config.get("layer_types") or layer_kinds.pattern(count, Gemma4Options.full_every))
    kinds[-1:] = [FULL]  # transformers takes the last layer for one without a window, whatever it is called
    heads, keys = config.get("global_head_dim", 512), config.get("num_global_key_value_heads")
    keys = keys if config.get("attention_k_eq_v") else None
    if (own := config.get("per_layer_config")) is not None:
        full = {str(index): own.get(str(index), {}) for index, kind in enumerate(kinds) if kind == FULL}
        sizes = full.get(str(count - 1), {})
        if own != dict.fromkeys(full, sizes) or sizes.keys() - {"head_dim", "num_key_value_heads"}:
            fault = f"{place}: per_layer_config with other sizes than those of all layers without a window"
            raise JobError(Problem("model.from_hf", f"{fault} is not supported", "use a model without it"))
        heads, keys = sizes.get("head_dim"), sizes.get("num_key_value_heads")
    heads = None if heads == config.get("head_dim", 256) else heads
    keys = None if keys == config.get("num_key_value_heads", 4) else keys
    every = [
        FULL if index == count - 1 else kind
        for index, kind in enumerate(layer_kinds.pattern(count, Gemma4Options.full_every))
    ]
    window = {"sliding_window": None} if config.get("sliding_window") == limits.WIDTH else {}
    types = {"layer_types": None if kinds == every else tuple(kinds), **window}
    experts: dict[str, Any] = {name: Gemma4Options.model_fields[name].default for name in _EXPERTS}
    if config.get("enable_moe_block"):
        experts = {name: config.get(key) for name, key in _EXPERTS.items()}
        if missing := [key for name, key in _EXPERTS.items() if not isinstance(experts[name], int)]:
            fault = f"{place}: enable_moe_block without {', '.join(missing)}"
            raise JobError(Problem("model.from_hf", fault, "check that this is the config.json of a language model"))
    return {**types, **experts, "full_head_dim": heads, "full_kv_heads": keys}


def _write(options: Gemma4Options) -> dict[str, Any]:
    turned = {"rope_type": "proportional", "partial_rotary_factor": options.turned_share}
    full = {"rope_theta": options.rope_theta, **({"rope_type": "default"} if options.turned_share == 1 else turned)}
    return {
        **layer_kinds.write_types(options),
        **({} if options.num_experts else dict.fromkeys(_EXPERTS.values())),
        "enable_moe_block": options.num_experts > 0,
        "global_head_dim": options.full_head_dim or options.dim_per_head,
        "num_global_key_value_heads": options.full_kv_heads or options.kv_heads,
        "rope_parameters": {FULL: full, SLIDING: {"rope_theta": options.local_rope_theta, "rope_type": "default"}},
    }


_EXPERTS = {
    "num_experts": "num_experts",
    "experts_per_token": "top_k_experts",
    "expert_ffn_size": "moe_intermediate_size",
}
_EXACT = {key: only for key, only in gemma.EXACT_OF_BOTH.items() if key != "partial_rotary_factor"}
FAMILY = Family(
    name="gemma4",
    summary="Gemma 4 (text): two kinds of heads, shared K and V, per-layer embeddings, experts",
    layer=_layer,
    hf=HfFormat(
        "gemma4_text",
        "Gemma4ForCausalLM",
        settings={
            **SETTINGS,
            "sliding_window": "sliding_window",
            "local_rope_theta": "rope_local_base_freq",
            "turned_share": "partial_rotary_factor",
            "keys_as_values": "attention_k_eq_v",
            "num_kv_shared_layers": "num_kv_shared_layers",
            "wide_shared": "use_double_wide_mlp",
            "per_layer_width": "hidden_size_per_layer_input",
            "per_layer_vocab": "vocab_size_per_layer_input",
            "logit_soft_cap": "final_logit_softcapping",
            **_EXPERTS,
        },
        rope_types={"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"},
        defaults={
            **DEFAULTS,
            "tie_embeddings": True,
            "head_dim": 256,
            "num_kv_heads": 4,
            "sliding_window": 512,
            "rope_theta": _GLOBAL,
            "local_rope_theta": _LOCAL,
            "turned_share": 0.25,
            "keys_as_values": False,
            "num_kv_shared_layers": 0,
            "wide_shared": False,
            "per_layer_width": 256,
            "per_layer_vocab": 262_144,
        },
        exact={**_EXACT, "use_bidirectional_attention": Only((None, "vision"), written=False)},
        within=("gemma4",),
        text_defaults={"vocab_size": 262_144, "num_attention_heads": 8, "max_position_embeddings": 131_072},
        read=_read,
        write=_write,
    ),
    options=Gemma4Options,
    rotary=rotary,
    first_weights=_first_weights,
    builder="raypp.stages.models.shared_keys:build_decoder",
    position=62,
)
