"""Weights and FLOPs of a decoder, by part.

A multiplication with a matrix costs 2 FLOPs per weight and token in the forward, twice that in the backward (PaLM,
arXiv:2204.02311, appendix B). Causal attention over T tokens reads T/2 keys on average: scores and values together
are 2 · 2 · heads · head width · T/2 per token. Norms, activations and the softmax are counted as bytes (`weights.py`).
"""

from __future__ import annotations

from raypp.spec.job import Job
from raypp.spec.models import DecoderOptions, MoeOptions

BACKWARD_PER_FORWARD = 2.0
"""The backward's two products (gradient of the input, gradient of the weights) for each one of the forward."""


def attention_weights(model: DecoderOptions) -> int:
    """Weights of the q, k, v and o matrices of one layer."""
    head = model.dim_per_head
    return model.hidden_size * head * (2 * model.num_heads + 2 * model.kv_heads)


def expert_weights(model: DecoderOptions) -> int:
    """Weights of one layer's experts, without the router; 0 where there are none."""
    return 3 * model.hidden_size * model.expert_ffn_size * model.num_experts if isinstance(model, MoeOptions) else 0


def feed_forward_weights(model: DecoderOptions) -> int:
    """Weights of one layer's feed-forward block; with experts, of all of them and the router."""
    if isinstance(model, MoeOptions):
        return expert_weights(model) + model.hidden_size * model.num_experts
    return 3 * model.hidden_size * model.ffn_size


def active_feed_forward_weights(model: DecoderOptions) -> int:
    """The part of them that one token is multiplied with."""
    if isinstance(model, MoeOptions):
        used = 3 * model.hidden_size * model.expert_ffn_size * model.experts_per_token
        return used + model.hidden_size * model.num_experts
    return feed_forward_weights(model)


def layer_parameters(model: DecoderOptions) -> int:
    """Parameters of one decoder layer, norms and biases included."""
    head, bias = model.dim_per_head, 0
    if model.kind == "qwen2":
        bias = head * (model.num_heads + 2 * model.kv_heads)
    norms = 2 * model.hidden_size + (2 * head if model.kind.startswith("qwen3") else 0)
    return attention_weights(model) + feed_forward_weights(model) + norms + bias


def embedding_parameters(model: DecoderOptions) -> int:
    return model.vocab_size * model.hidden_size


def head_parameters(model: DecoderOptions) -> int:
    """Parameters of the last norm and the output projection, as the last stage holds them (tied or not)."""
    return model.vocab_size * model.hidden_size + model.hidden_size


def model_parameters(model: DecoderOptions) -> int:
    """Parameters of the whole model; tied embeddings count once."""
    head = model.hidden_size if model.tie_embeddings else head_parameters(model)
    return embedding_parameters(model) + model.num_layers * layer_parameters(model) + head


def layer_flops(model: DecoderOptions, seq_len: int) -> float:
    """FLOPs of one layer's forward, per token of a row of `seq_len` tokens."""
    matrices = 2.0 * (attention_weights(model) + active_feed_forward_weights(model))
    return matrices + 2.0 * seq_len * model.num_heads * model.dim_per_head


def head_flops(model: DecoderOptions) -> float:
    """FLOPs of the output projection's forward, per token."""
    return 2.0 * model.hidden_size * model.vocab_size


def recompute_factor(job: Job) -> float:
    """Cost of a layer's backward with recomputation, in forwards."""
    return BACKWARD_PER_FORWARD + (1.0 if job.train.activation_checkpointing == "full" else 0.0)


def flops_per_token(job: Job) -> float:
    """FLOPs of forward and backward of the whole model, per token; recomputation is not counted as useful work."""
    forward = job.model.num_layers * layer_flops(job.model, job.data.seq_len) + head_flops(job.model)
    return forward * (1 + BACKWARD_PER_FORWARD)
