"""What a model family declares: its options, its parameters, and its Hugging Face format. A family
is one file in `raypp/job/families/` with one `FAMILY = Family(…)`. All else reads that entry and
refers to no family by name. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from raypp.job.models import DecoderOptions
from raypp.job.rope import Rotary
from raypp.registry import Kind

if TYPE_CHECKING:
    from raypp.job.decoder_layer import Layer

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Weight:
    """One parameter.

    Attributes:
        name: Name within its layer (`self_attn.q_proj.weight`), or the model if it is of no layer.
        shape: Shape of the whole parameter: `[out, in]` for a matrix, `[E, out, in]` for a stack of
            experts' matrices, `[E, out]` for one of their biases.
        part: The block that it belongs to. Each token is multiplied by all matrices, but only by
            `experts_per_token` entries of a stack of experts. `state` is no parameter: a buffer
            without a gradient, in fp32, that checkpoints and files hold.
        residual: It writes into the residual stream. Its initial values shrink with the depth of
            the model, and its `in` is the inner width of its block.
        transposed: Its last two dims are in and out.
        initial: All its initial values. `decay`: logarithms of numbers uniform in 0.01 to 16. None:
            1 for gains, 0 for biases, else random.
        fp32: Trained in fp32 with `bf16_pure`, too: few, and bf16 is too coarse for updates.
        joins: The rows of each of the parts that follow each other in it. The ranks of a tp group
            divide every part; with `residual` its columns. (): each has it whole.
    """

    name: str
    shape: Shape
    part: Literal["embedding", "attention", "feed_forward", "experts", "norm", "state"]
    residual: bool = False
    initial: float | Literal["decay"] | None = None
    transposed: bool = False
    fp32: bool = False
    joins: Shape = ()

    @property
    def parameters(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Only:
    """The values of a config.json key that raypp supports. Any other value is refused by name.
    `values`: None also stands for a missing key. `written`: whether export writes the last
    of them to config.json."""

    values: tuple[Any, ...]
    written: bool = True


NO = Only((None, False))
SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "ffn_size": "intermediate_size",
    "vocab_size": "vocab_size",
}
EXPERT_SIZES = {
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_ffn_size": "moe_intermediate_size",
}
"""Sizes of families with experts, in addition to `SIZES`."""
SETTINGS = {
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "tie_embeddings": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
}
DEFAULTS: dict[str, Any] = {"tie_embeddings": False, "norm_eps": 1e-6, "rope_theta": 10000.0}
BIASES = {"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"}
"""Settings of families whose projections may have biases; missing keys mean none."""
EXACT = {
    "hidden_act": Only((None, "silu")),
    "attention_dropout": Only((None, 0, 0.0)),
    "partial_rotary_factor": Only((None, 1, 1.0), written=False),
    "quantization_config": Only((None,), written=False),
}


@dataclass(frozen=True)
class HfFormat:
    """A family's config.json: every key that is read or written and affects results.

    Most families share most keys, and override others: `{**SIZES, "num_layers": "n_layers"}`.

    Attributes:
        model_type: The family's name in config.json.
        architecture: The model class in transformers.
        sizes: Fields of the `model:` section and their keys, which are required.
        settings: Fields and their keys, which are optional.
        newer: Keys of `sizes` and `settings` that files may have under other names, which count if
            both are there. Export writes the former.
        rope_types: Types of layers that have parameters of their own in `rope_parameters`, and the
            keys of their bases that transformers 4 has. Only those of `rope_theta` are scaled.
        rope_keys: Keys of the rotary scaling that `read` and `write` translate.
        defaults: Value of each field of `settings` whose key is missing: transformers' own default.
            A field that is not listed is null.
        exact: Keys and the only values that raypp supports for them.
        within: model_types of multimodal models whose text is of this family.
        text_defaults: Values of keys that the config of a text within such a model may lack.
        peft_names_experts: Whether PEFT knows what transformers 5 calls the experts' matrices.
        training: Fields about training. Export writes them for the reader, import ignores them.
        read: Returns further fields of the section from a config.json whose location is the second
            argument. Raises JobError.
        write: Returns further keys of config.json; they replace others.
    """

    model_type: str
    architecture: str
    sizes: Mapping[str, str] = field(default_factory=lambda: SIZES)
    settings: Mapping[str, str] = field(default_factory=lambda: SETTINGS)
    defaults: Mapping[str, Any] = field(default_factory=lambda: DEFAULTS)
    exact: Mapping[str, Only] = field(default_factory=lambda: EXACT)
    training: Mapping[str, str] = field(default_factory=dict)
    newer: Mapping[str, str] = field(default_factory=dict)
    rope_types: Mapping[str, str] = field(default_factory=dict)
    rope_keys: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    text_defaults: Mapping[str, Any] = field(default_factory=dict)
    peft_names_experts: bool = True
    read: Callable[[Mapping[str, Any], str], dict[str, Any]] | None = None
    write: Callable[[Any], dict[str, Any]] | None = None


def whole_heads(options: DecoderOptions, index: int) -> Rotary | None:
    """Returns the rotary encoding of a layer as most families have it: whole heads, all layers."""
    return Rotary(options.dim_per_head, options.rope_theta, options.rope)


@dataclass(frozen=True, kw_only=True)
class Family(Kind):
    """One decoder family: a value of `model.kind`.

    Attributes:
        layer: Returns what the layer with a global index is made of.
        rotary: Returns what the queries and keys of the layer with a global index are rotated by,
            None for no rotation. A stage computes each distinct one once per microbatch.
        first_weights: Returns what the first stage has besides its layers and the embedding.
        builder: Builds a stage of these layers (`package.module:function`), see
            `raypp.stages.models.stage`.
    """

    layer: Callable[[Any, int], Layer]
    hf: HfFormat
    options: type[DecoderOptions] = DecoderOptions
    rotary: Callable[[Any, int], Rotary | None] = whole_heads
    first_weights: Callable[[Any], list[Weight]] = lambda options: []
    builder: str | Callable[..., Any] = "raypp.stages.models.stage:build_decoder"

    def weights(self, options: DecoderOptions, index: int) -> list[Weight]:
        """Returns the parameters of the layer with a global index, in export order. Planning
        derives parameters, FLOPs and memory from them; import and export take names and shapes."""
        return self.layer(options, index).weights(options, index)

    def stage_weights(self, options: DecoderOptions, layers: range, *, first: bool, last: bool) -> dict[str, Weight]:
        """Returns the parameters of a stage by global name. `layers`: global indices of the stage's
        layers. `first`: the stage holds the embedding. `last`: the stage holds the final norm and
        the output projection. With tied embeddings, the latter is the embedding."""
        weights: dict[str, Weight] = {}
        if first or (last and options.tie_embeddings):
            weights |= _named(embedding(options))
        if first:
            weights |= {weight.name: weight for weight in self.first_weights(options)}
        for index in layers:
            prefix = f"model.layers.{index}."
            weights |= {prefix + weight.name: weight for weight in self.weights(options, index)}
        if last:
            weights |= {weight.name: weight for weight in final_norm(options)}
        if last and not options.tie_embeddings:
            weights |= _named(projection(options))
        return weights

    def state_names(self, options: DecoderOptions) -> frozenset[str]:
        """Returns the global names of the model's `state`."""
        return frozenset(name for name, weight in self.model_weights(options).items() if weight.part == "state")

    def fp32_names(self, options: DecoderOptions) -> frozenset[str]:
        """Returns the global names of parameters that are trained in fp32 in every precision."""
        return frozenset(name for name, weight in self.model_weights(options).items() if weight.fp32)

    def model_weights(self, options: DecoderOptions) -> dict[str, Weight]:
        """Returns the parameters of the whole model in order. Tied embeddings appear once."""
        return self.stage_weights(options, range(options.num_layers), first=True, last=True)


def embedding(options: DecoderOptions) -> Weight:
    return Weight("model.embed_tokens.weight", (options.vocab_size, options.hidden_size), "embedding")


def final_norm(options: DecoderOptions) -> list[Weight]:
    """Returns the gain of the norm before the projection, and its bias if it has one."""
    ends, shape = options.stage_ends(), (options.hidden_size,)
    weights = [Weight(f"model.{ends.norm_name}.weight", shape, "norm", initial=0.0 if ends.gain_from_zero else None)]
    return [*weights, Weight(f"model.{ends.norm_name}.bias", shape, "norm")] if ends.layer_norm else weights


def projection(options: DecoderOptions) -> Weight:
    """Returns the output projection of a model with untied embeddings."""
    return Weight("lm_head.weight", (options.vocab_size, options.hidden_size), "embedding")


def _named(weight: Weight) -> dict[str, Weight]:
    return {weight.name: weight}
