"""What Gemma 2 and 3 share: their options, weights and keys of config.json."""

from pydantic import Field

from raypp.job.decoder_layer import Layer
from raypp.job.family import DEFAULTS, EXACT, NO, SETTINGS, Only
from raypp.job.layer_rules import AttentionRule
from raypp.job.models import StageEnds, WindowOptions


class GemmaOptions(WindowOptions):
    """Options of Gemma 2 and 3."""

    tie_embeddings: bool = True
    """Share the weights of embedding and output projection, even if they are on different stages.
    """
    query_scalar: int = Field(default=256, ge=1)
    """Scores are divided by its square root."""
    logit_soft_cap: float | None = Field(default=None, gt=0)
    """Logits l become cap · tanh(l / cap). null: no cap."""

    def attention_rule(self, index: int) -> AttentionRule:
        window = self.sliding_window if self.slides(index) else None
        return AttentionRule(window, scale=self.query_scalar**-0.5)

    def stage_ends(self) -> StageEnds:
        return StageEnds(self.hidden_size**0.5, self.logit_soft_cap, gain_from_zero=True)


LAYER = Layer(
    norms=("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    mlp="gelu",
)
SETTINGS_OF_BOTH = {
    **SETTINGS,
    "sliding_window": "sliding_window",
    "query_scalar": "query_pre_attn_scalar",
    "logit_soft_cap": "final_logit_softcapping",
}
DEFAULTS_OF_BOTH = {**DEFAULTS, "tie_embeddings": True, "head_dim": 256, "sliding_window": 4096, "query_scalar": 256}
EXACT_OF_BOTH = {
    **{key: only for key, only in EXACT.items() if key != "hidden_act"},
    "hidden_activation": Only((None, "gelu_pytorch_tanh")),
    "attention_bias": NO,
    "use_bidirectional_attention": NO,
}
