"""What a model family declares: its options, its parameters, and its format in Hugging Face's files.

A family is one file in `raypp/families/` with one `FAMILY = Family(…)`. Planning, checkpoints, import, export and the
runtime ask that entry and know no family by name. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from raypp.spec.models import DecoderOptions

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Weight:
    """One parameter.

    Attributes:
        name: Within its layer (`self_attn.q_proj.weight`), or within the model where it belongs to no layer.
        shape: Of the whole parameter. A matrix is `[out, in]`; a stack of experts' matrices `[E, out, in]`.
        part: The block it belongs to. Each token is multiplied with all matrices, but only with `experts_per_token`
            entries of a stack of experts.
        residual: It writes into the residual stream: its initial values shrink with the depth of the model, and its
            `in` is the inner width of its block.
    """

    name: str
    shape: Shape
    part: Literal["embedding", "attention", "feed_forward", "experts", "norm"]
    residual: bool = False

    @property
    def parameters(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Only:
    """The values of a config.json key that raypp computes; any other is refused by name.

    Attributes:
        values: None stands for a missing key, too.
        written: The last of them is written to config.json.
    """

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
"""What families with experts have besides `SIZES`."""
SETTINGS = {
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "tie_embeddings": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
}
DEFAULTS: dict[str, Any] = {"tie_embeddings": False, "norm_eps": 1e-6, "rope_theta": 10000.0}
EXACT = {
    "hidden_act": Only((None, "silu")),
    "attention_dropout": Only((None, 0, 0.0)),
    "partial_rotary_factor": Only((None, 1, 1.0), written=False),
    "quantization_config": Only((None,), written=False),
}


@dataclass(frozen=True)
class HfFormat:
    """A family's config.json: every key that is read or written, beside those that no number depends on.

    Most families share most keys. Those that differ say so by `{**SIZES, "num_layers": "n_layers"}`.

    Attributes:
        model_type: As config.json names the family.
        architecture: The class that transformers makes of it.
        sizes: Fields of the `model:` section and their keys, which must be there.
        settings: Fields and keys that may be missing.
        defaults: What a missing key of `settings` means: transformers' own default. A field that is left out here
            is null.
        exact: Keys with the only values that raypp computes.
        training: Fields that say how to train and are written for the reader; they are not read.
    """

    model_type: str
    architecture: str
    sizes: Mapping[str, str] = field(default_factory=lambda: SIZES)
    settings: Mapping[str, str] = field(default_factory=lambda: SETTINGS)
    defaults: Mapping[str, Any] = field(default_factory=lambda: DEFAULTS)
    exact: Mapping[str, Only] = field(default_factory=lambda: EXACT)
    training: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """One decoder family.

    Attributes:
        name: `model.kind`.
        summary: One line of help: what it covers.
        weights: The parameters of the layer of a global index, in the order in which they are exported. Planning
            derives parameters, FLOPs and memory from them; import and export take names and shapes.
        layer: Builds that layer, a module of torch. It imports torch when it is called; its file never does.
        hf: Its Hugging Face format.
        options: The class of its `model:` section.
        position: Families are listed by this number, then by name.
        builder: Builds a stage of these layers (`package.module:function`); see `raypp.models.stage`.
    """

    name: str
    summary: str
    weights: Callable[[Any, int], Sequence[Weight]]
    layer: Callable[[Any, int], Any]
    hf: HfFormat
    options: type[DecoderOptions] = DecoderOptions
    position: int = 100
    builder: str = "raypp.models.stage:build_decoder"

    def stage_weights(self, options: DecoderOptions, layers: range, *, first: bool, last: bool) -> dict[str, Weight]:
        """The parameters that a stage holds, by their global names.

        Args:
            options: The `model:` section.
            layers: Global indices of the stage's layers.
            first: It holds the embedding.
            last: It holds the last norm and the output projection; that is the embedding when they are tied.
        """
        found: dict[str, Weight] = {}
        if first or (last and options.tie_embeddings):
            found |= _named(embedding(options))
        for index in layers:
            prefix = f"model.layers.{index}."
            found |= {prefix + weight.name: weight for weight in self.weights(options, index)}
        if last:
            found |= _named(final_norm(options))
        if last and not options.tie_embeddings:
            found |= _named(projection(options))
        return found

    def model_weights(self, options: DecoderOptions) -> dict[str, Weight]:
        """The parameters of the whole model, in order; tied embeddings once."""
        return self.stage_weights(options, range(options.num_layers), first=True, last=True)


def embedding(options: DecoderOptions) -> Weight:
    return Weight("model.embed_tokens.weight", (options.vocab_size, options.hidden_size), "embedding")


def final_norm(options: DecoderOptions) -> Weight:
    return Weight("model.norm.weight", (options.hidden_size,), "norm")


def projection(options: DecoderOptions) -> Weight:
    """The output projection of a model whose embeddings are not tied."""
    return Weight("lm_head.weight", (options.vocab_size, options.hidden_size), "embedding")


def _named(weight: Weight) -> dict[str, Weight]:
    return {weight.name: weight}
