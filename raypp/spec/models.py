"""The `model:` section: the keys that every decoder has, and those that experts add.

The families themselves are in `raypp/families/`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base class of every section of the job file.

    Unknown keys are errors. Instances are immutable.
    """

    # defer_build: pydantic builds the validators on first use, so that `raypp --help` does not wait
    # for them.
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, defer_build=True, allow_inf_nan=False
    )


class LoraOptions(Section):
    """LoRA (arXiv:2106.09685): trains adapters, W + (alpha / rank) · B · A; W is frozen."""

    rank: int = Field(default=16, ge=1)
    """Rows of A and columns of B."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapters' product is multiplied by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout before A. Only 0 is available."""
    targets: tuple[str, ...] = ("all-linear",)
    """Matrices that get adapters, by the end of their names: [q_proj, v_proj]. all-linear: every
    matrix of attention, feed-forward blocks and experts, without routers."""
    base: Literal["fp32", "bf16", "int8", "nf4"] = "bf16"
    """How the frozen weights are stored. bf16 needs train.precision: bf16. int8, nf4: the matrices
    of layers in 8 or 4.13 bits per weight (QLoRA, arXiv:2305.14314), the rest in train.precision.
    """
    base_id: str | None = None
    """Identity of the frozen weights that model.from_hf names. raypp sets it at submission and
    refuses another base later."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class DecoderOptions(Section):
    """Options that every decoder family has."""

    kind: str = "llama"
    """A built-in family, or your own factory as module.path:factory."""
    num_layers: int = Field(default=8, ge=1)
    """Number of decoder layers."""
    hidden_size: int = Field(default=256, ge=1)
    """Width of the residual stream."""
    num_heads: int = Field(default=4, ge=1)
    """Number of query heads."""
    num_kv_heads: int | None = Field(default=None, ge=1)
    """Number of key/value heads. null: the number of query heads."""
    head_dim: int | None = Field(default=None, ge=1)
    """Width of one head. null: hidden_size / num_heads."""
    ffn_size: int = Field(default=688, ge=1)
    """Inner width of the gated feed-forward block."""
    vocab_size: int = Field(default=4096, ge=1)
    """Rows of the embedding. At least the number of ids of the tokenizer."""
    tie_embeddings: bool = False
    """Share the weights of embedding and output projection, even if they are on different stages.
    """
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base of the rotary position encoding."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Epsilon of RMSNorm."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial values of matrices."""
    from_hf: str | None = None
    """A directory or S3 URL with config.json and safetensors. Weights and sizes are read from it.
    """
    lora: LoraOptions | None = None
    """Train adapters only: {rank: 16, alpha: 32, targets: [q_proj]}. null: train all weights."""

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def dim_per_head(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads


class MoeOptions(DecoderOptions):
    """Options that mixture-of-experts families add."""

    num_experts: int = Field(default=8, ge=1)
    """Number of experts per layer."""
    experts_per_token: int = Field(default=2, ge=1)
    """Number of experts that each token is routed to."""
    expert_ffn_size: int = Field(default=256, ge=1)
    """Inner width of one expert."""
    aux_loss_weight: float = Field(default=0.001, ge=0)
    """Weight of the load-balancing loss."""
    z_loss_weight: float = Field(default=0.0, ge=0)
    """Weight of the router's z-loss."""


class CustomOptions(DecoderOptions):
    """Options of a user's own factory. Further keys are passed on to it."""

    model_config = ConfigDict(extra="allow")
