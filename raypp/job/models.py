"""The `model:` section: every decoder's keys, and experts'. Families: `raypp/job/families/`."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from raypp.job import limits
from raypp.job.layer_rules import NO_RULE, AttentionRule, StateRule
from raypp.job.precision import DtypeName
from raypp.job.rope import RopeOptions
from raypp.job.section import Section

WholePart = Literal["embed_tokens", "lm_head", "norms"]


@dataclass(frozen=True)
class StageEnds:
    """How the first and the last stage of a family differ from a plain decoder's.

    Attributes:
        embedding_factor: Factor of the embeddings.
        logit_cap: Logits l become cap · tanh(l / cap). None: no cap.
        logit_divisor: Logits are divided by it.
        gain_from_zero: Norms multiply by 1 + weight.
        layer_norm: Norms are LayerNorm with biases.
        norm_name: The family's name of the norm before the projection.
    """

    embedding_factor: float = 1.0
    logit_cap: float | None = None
    logit_divisor: float = 1.0
    gain_from_zero: bool = False
    layer_norm: bool = False
    norm_name: str = "norm"


def _words(value: Any) -> Any:
    """Takes a plain word for a list of one, as PEFT does; strict mode takes no list for a tuple."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


class LoraOptions(Section):
    """LoRA (arXiv:2106.09685): trains adapters, W + (alpha / rank) · B · A; W is frozen."""

    rank: int = Field(default=16, ge=1, le=limits.WIDTH)
    """Rows of A and columns of B."""
    alpha: float = Field(default=32.0, gt=0, le=limits.REAL)
    """The adapters' product is multiplied by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability with which a number is dropped before A, rounded to steps of 1/65536. Not for
    experts."""
    targets: Annotated[tuple[str, ...], BeforeValidator(_words, json_schema_input_type=str | tuple[str, ...])] = (
        "all-linear",
    )
    """Matrices that get adapters, by the end of their names: [q_proj, v_proj]. all-linear: every
    matrix of attention, feed-forward blocks and experts, without routers."""
    also_train: Annotated[
        tuple[WholePart, ...], BeforeValidator(_words, json_schema_input_type=str | tuple[WholePart, ...])
    ] = ()
    """Parts that train in full beside the adapters, as PEFT's modules_to_save: [embed_tokens,
    lm_head] to learn new tokens. With tied embeddings either name trains the one matrix."""
    base: Literal["auto", DtypeName, "int8", "nf4", "fp8"] = "auto"
    """How the frozen weights are stored. auto: in what train.precision computes in. bf16, fp16: if
    that is the same. int8, nf4: the matrices of layers in 8 or 4.13 bits per weight (QLoRA,
    arXiv:2305.14314), the rest in train.precision | fp8: in 8 bits (e4m3), products in fp8, with
    any train.precision."""
    base_id: str | None = None
    """Identity of the frozen weights that model.from_hf names. raypp sets it at submission and
    refuses another base later."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class OriginalFiles(Section):
    """The files of the model that `from_hf` or an import named, as texts; an export keeps them."""

    config: str
    """Its config.json."""
    generation_config: str | None = None
    """Its generation_config.json, if it has one."""
    rest: str | None = None
    """Where a multimodal model is, whose tensors beside the text an export puts back."""
    rest_id: str | None = None
    """Identity of its weights."""
    fp32: tuple[str, ...] = ()
    """Which parameters its files have in fp32 beside narrower ones, by their name in a layer, of
    those that are trained in fp32 in every precision."""


class DecoderOptions(Section):
    """Options that every decoder family has."""

    kind: str = "llama"
    """A built-in family, or your own factory as module.path:factory."""
    num_layers: int = Field(default=8, ge=1, le=limits.LAYERS)
    """Number of decoder layers."""
    hidden_size: int = Field(default=256, ge=1, le=limits.WIDTH)
    """Width of the residual stream."""
    num_heads: int = Field(default=4, ge=1, le=limits.WIDTH)
    """Number of query heads."""
    num_kv_heads: int | None = Field(default=None, ge=1, le=limits.WIDTH)
    """Number of key/value heads. null: the number of query heads."""
    head_dim: int | None = Field(default=None, ge=1, le=limits.WIDTH)
    """Width of one head. null: hidden_size / num_heads."""
    ffn_size: int = Field(default=688, ge=1, le=limits.WIDTH)
    """Inner width of the feed-forward block."""
    vocab_size: int = Field(default=4096, ge=1, le=limits.WIDTH)
    """Rows of the embedding. At least the number of ids of the tokenizer."""
    tie_embeddings: bool = False
    """Share the weights of embedding and output projection, even if they are on different stages.
    """
    rope_theta: float = Field(default=10000.0, gt=0, le=limits.REAL)
    """Base of the rotary position encoding."""
    rope: RopeOptions | None = None
    """Scaling of the rotary frequencies for longer contexts. null: none."""
    norm_eps: float = Field(default=1e-5, gt=0, le=limits.REAL)
    """Epsilon of the norms."""
    attention_bias: bool = False
    """Biases on the projections of attention."""
    mlp_bias: bool = False
    """Biases on the projections of the feed-forward block."""
    init_std: float = Field(default=0.02, gt=0, le=limits.REAL)
    """Standard deviation of the initial values of matrices."""
    from_hf: str | None = None
    """A directory or store URL with config.json and safetensors. Weights and sizes are read there.
    """
    from_run: str | None = None
    """Another run: NAME, URL/NAME, or URL/NAME/step-N. Its model, but for keys given here, and its
    weights, of the newest checkpoint or of that step, are this run's first."""
    lora: LoraOptions | None = None
    """Train adapters only: {rank: 16, alpha: 32, targets: [q_proj]}. null: train all weights."""
    max_context: int | None = Field(default=None, ge=1, le=limits.WIDTH)
    """Tokens that the model takes, as its export and `raypp generate` have it; data.seq_len if that
    is more. null: that of from_hf's config.json, else data.seq_len."""
    original: OriginalFiles | None = None
    """Files of the model that from_hf or an import named. raypp sets it at submission, and an
    export keeps what they say."""

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def dim_per_head(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads

    def attention_rule(self, index: int) -> AttentionRule:
        """Returns the attention rule of the layer with a global index."""
        return NO_RULE

    def state_rule(self, index: int) -> StateRule | None:
        """Returns what a layer has instead of attention; None: it has attention."""
        return None

    @property
    def widest_head(self) -> int:
        """Width of the widest head of any layer."""
        return self.dim_per_head

    def of_layer(self, index: int) -> Self:
        """Returns the options with the sizes of one layer."""
        return self

    def uncut(self) -> range:
        """Returns the layers that must be on one stage, because one computes for others."""
        return range(0)

    def stage_ends(self) -> StageEnds:
        """Returns how the family's first and last stage differ from a plain decoder's."""
        return StageEnds()

    @model_validator(mode="after")
    def _one_type_per_layer(self) -> Self:
        kinds = getattr(self, "layer_types", None) if "layer_types" in type(self).model_fields else None
        if kinds is not None and len(kinds) != self.num_layers:
            raise ValueError(f"layer_types has {len(kinds)} entries for num_layers {self.num_layers}")
        return self


class LatentOptions(DecoderOptions):
    """Options of families whose keys and values come from one latent (arXiv:2405.04434)."""

    q_lora_rank: int | None = Field(default=None, ge=1, le=limits.WIDTH)
    """Width between the two projections to queries. null: there is one projection."""
    kv_lora_rank: int = Field(default=64, ge=1, le=limits.WIDTH)
    """Width of the latent that keys and values are projected from."""
    qk_nope_head_dim: int = Field(default=32, ge=1, le=limits.WIDTH)
    """Dims of a query and key head without the rotary encoding."""
    qk_rope_head_dim: int = Field(default=16, ge=2, le=limits.WIDTH, multiple_of=2)
    """Dims of a query and key head with it; all heads share those of the key."""
    v_head_dim: int = Field(default=32, ge=1, le=limits.WIDTH)
    """Width of a value head."""
    rope_interleave: bool = True
    """Neighbouring dims are rotated, not those of two halves."""
    score_mscale: float = Field(default=0.0, ge=0, le=limits.REAL)
    """Scores are multiplied by (0.1 · score_mscale · ln(model.rope.factor) + 1)², as yarn's
    mscale_all_dim has it. 0: they are not."""

    @property
    def kv_heads(self) -> int:
        return self.num_heads

    @property
    def qk_head_dim(self) -> int:
        """Width of a query and key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def dim_per_head(self) -> int:
        """The width with which attention computes: the narrower of keys and values is padded."""
        return max(self.qk_head_dim, self.v_head_dim)

    def attention_rule(self, index: int) -> AttentionRule:
        factor = 1.0 if self.rope is None or self.rope.factor is None else max(self.rope.factor, 1.0)
        return AttentionRule(scale=self.qk_head_dim**-0.5 * (0.1 * self.score_mscale * math.log(factor) + 1) ** 2)

    @model_validator(mode="after")
    def _own_heads(self) -> Self:
        if self.num_kv_heads not in (None, self.num_heads):
            raise ValueError(f"num_kv_heads {self.num_kv_heads}: latent attention has one for each of num_heads")
        if self.head_dim not in (None, self.dim_per_head):
            raise ValueError(f"head_dim {self.head_dim}: it follows from the widths of keys and values")
        return self


class WindowOptions(DecoderOptions):
    """Options of families with a sliding window in some or all layers."""

    sliding_window: int | None = Field(default=None, ge=1, le=limits.WIDTH)
    """Tokens that a query of a layer with a window sees, itself included. null: no layer has one.
    """
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    """The kind of each layer. null: the family's pattern."""

    full_every: ClassVar[int] = 0  # one of so many layers has no window; 0: all have it

    def slides(self, index: int) -> bool:
        """Returns whether a layer has the window."""
        if self.layer_types is None:
            return not self.full_every or (index + 1) % self.full_every != 0
        return self.layer_types[index] == "sliding_attention"

    def attention_rule(self, index: int) -> AttentionRule:
        return AttentionRule(window=self.sliding_window if self.slides(index) else None)


class MoeOptions(DecoderOptions):
    """Options that mixture-of-experts families add."""

    num_experts: int = Field(default=8, ge=1, le=limits.WIDTH)
    """Number of experts per layer."""
    experts_per_token: int = Field(default=2, ge=1, le=limits.WIDTH)
    """Number of experts that each token is routed to."""
    expert_ffn_size: int = Field(default=256, ge=1, le=limits.WIDTH)
    """Inner width of one expert."""
    aux_loss_weight: float = Field(default=0.001, ge=0, le=limits.REAL)
    """Weight of the load-balancing loss."""
    z_loss_weight: float = Field(default=0.0, ge=0, le=limits.REAL)
    """Weight of the router's z-loss."""
    norm_topk_prob: bool = True
    """The weights of the experts of a token sum to 1. false: they are the router's probabilities.
    """
    decoder_sparse_step: int = Field(default=1, ge=1, le=limits.LAYERS)
    """One of this many layers has experts; the others have a plain feed-forward block."""
    mlp_only_layers: tuple[int, ...] = ()
    """Layers, from 0, with a plain feed-forward block."""

    def has_experts(self, index: int) -> bool:
        """Returns whether the layer with a global index has experts."""
        return index not in self._plain_layers and (index + 1) % self.decoder_sparse_step == 0

    @cached_property
    def _plain_layers(self) -> frozenset[int]:
        return frozenset(self.mlp_only_layers)

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return sum(map(self.has_experts, range(self.num_layers)))


def with_experts(options: DecoderOptions) -> MoeOptions | None:
    """Returns the options of a model that has experts; None: it has none."""
    return options if isinstance(options, MoeOptions) and options.num_experts else None


class RouterOptions(MoeOptions):
    """Options of families whose routers choose experts by a corrected score."""

    aux_loss_weight: float = Field(default=0.0, ge=0, le=limits.REAL)
    """Weight of the load-balancing loss."""
    router_bias_rate: float = Field(default=0.0, ge=0, le=limits.REAL)
    """Step of the correction bias, by which experts are chosen, toward an even load: added after
    each step where an expert had less than the mean, else subtracted. 0, for fine-tuning: it stays.
    """
    routed_scale: float = Field(default=1.0, gt=0, le=limits.REAL)
    """Factor of the weights of the chosen experts."""
    expert_groups: int = Field(default=1, ge=1, le=limits.WIDTH)
    """Groups that experts are in, of equal sizes."""
    chosen_groups: int = Field(default=1, ge=1, le=limits.WIDTH)
    """Groups that a token chooses its experts from: those with the largest sum of two scores."""
    shared_experts: int = Field(default=1, ge=0, le=limits.WIDTH)
    """Experts that all tokens share: one block of so many times expert_ffn_size."""
    dense_layers: int = Field(default=0, ge=0, le=limits.LAYERS)
    """Number of first layers with a plain feed-forward block."""

    def has_experts(self, index: int) -> bool:
        return index >= self.dense_layers and super().has_experts(index)

    @property
    def shared_width(self) -> int | None:
        """Inner width of the block that all tokens share; None: there is none."""
        return self.shared_experts * self.expert_ffn_size or None

    @model_validator(mode="after")
    def _whole_groups(self) -> Self:
        each, rest = divmod(self.num_experts, self.expert_groups)
        if rest or (self.expert_groups > 1 and each < 2):
            fault = f"num_experts {self.num_experts} are not expert_groups {self.expert_groups} of two or more each"
            raise ValueError(fault)
        if self.chosen_groups > self.expert_groups:
            raise ValueError(f"chosen_groups {self.chosen_groups} of expert_groups {self.expert_groups}")
        if self.experts_per_token > self.chosen_groups * each:
            fault = f"experts_per_token {self.experts_per_token} are more than chosen_groups {self.chosen_groups} have"
            raise ValueError(fault)
        if self.router_bias_rate and self.lora is not None:
            raise ValueError("router_bias_rate: adapters are trained beside weights that stay, set it to 0")
        return self


class CustomOptions(DecoderOptions):
    """Options of a user's own factory. Further keys are passed on to it."""

    model_config = ConfigDict(extra="allow")
