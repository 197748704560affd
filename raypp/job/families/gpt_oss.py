"""gpt-oss: attention sinks, windows in every other layer, biases, experts with a clamped SwiGLU."""

from collections.abc import Mapping
from typing import Any

from raypp.errors import JobError, Problem
from raypp.job.decoder_layer import Layer
from raypp.job.families import layer_kinds
from raypp.job.family import DEFAULTS, EXACT, EXPERT_SIZES, SETTINGS, SIZES, Family, HfFormat, Only
from raypp.job.layer_rules import AttentionRule
from raypp.job.models import MoeOptions, WindowOptions
from raypp.job.rope import RopeOptions

_MXFP4, _SHOWN = "mxfp4", 100
_ROPE = RopeOptions(kind="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_context=4096)
"""What transformers takes a config.json without rotary scaling for."""


class GptOssOptions(WindowOptions, MoeOptions):
    """Options of gpt-oss."""

    full_every = 2

    def attention_rule(self, index: int) -> AttentionRule:
        return AttentionRule(self.sliding_window if self.slides(index) else None, sinks=True)


def read(config: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Returns the kinds of layers, and the rotary scaling of a config.json without one. Raises
    JobError: the experts are quantised, but not in MXFP4 (`hf.tensor`)."""
    quantised = config.get("quantization_config")
    if quantised is not None and quantised.get("quant_method") != _MXFP4:
        method = str(quantised.get("quant_method"))[:_SHOWN]
        fault = f"{place}: quantization_config {method!r}: raypp reads quantised experts in {_MXFP4} only"
        raise JobError(Problem("model.from_hf", fault, "use a copy in bf16"))
    scaling = {} if config.get("rope_scaling") else {"rope": _ROPE}
    return {**layer_kinds.read_types(config, GptOssOptions.full_every), **scaling}


def write(options: GptOssOptions) -> dict[str, Any]:
    plain = {"rope_scaling": {"rope_type": "default"}} if options.rope is None else {}
    return {**layer_kinds.write_types(options), **plain}


FAMILY = Family(
    name="gpt_oss",
    summary="gpt-oss: attention sinks, windows, experts with biases",
    layer=lambda options, index: Layer(qkv_bias=True, out_bias=True, mlp="clamped"),
    hf=HfFormat(
        "gpt_oss",
        "GptOssForCausalLM",
        sizes={**SIZES, **EXPERT_SIZES, "num_experts": "num_local_experts", "expert_ffn_size": "intermediate_size"},
        settings={**SETTINGS, "sliding_window": "sliding_window"},
        defaults={**DEFAULTS, "head_dim": 64, "norm_eps": 1e-5, "rope_theta": 150000.0, "sliding_window": 128},
        exact={
            **{key: only for key, only in EXACT.items() if key != "quantization_config"},
            "attention_bias": Only((None, True)),
            "swiglu_alpha": Only((None, 1.702)),
            "swiglu_limit": Only((None, 7.0)),
        },
        training={"aux_loss_weight": "router_aux_loss_coef"},
        read=read,
        write=write,
    ),
    options=GptOssOptions,
    position=70,
)
