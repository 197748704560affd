"""What the two ends of the model cost, in decoder layers: from FLOPs and bytes.

FLOPs of a forward, per token: 2 per weight of a matrix (PaLM, arXiv:2204.02311, appendix B), and 4 · T/2 · heads · width for causal
attention over T tokens. The loss reads and writes the logits several times in fp32; a byte is counted as `FLOPS_PER_BYTE`.
"""

from __future__ import annotations

from raypp.spec.job import Job
from raypp.spec.models import DecoderOptions

# Passes over the fp32 logits in forward and backward of the loss, and what a processor computes while it moves a byte
# (about 5 on a CPU core; GPUs have a larger ratio, but there the loss is a smaller part of a larger whole).
_LOGIT_PASSES = 8
_FLOPS_PER_BYTE = 5


def layer_flops(model: DecoderOptions, seq_len: int) -> float:
    """FLOPs of one decoder layer's forward, per token."""
    head = model.dim_per_head
    attention_weights = model.hidden_size * head * (2 * model.num_heads + 2 * model.kv_heads)
    return 2.0 * (attention_weights + 3 * model.hidden_size * model.ffn_size) + 2.0 * seq_len * model.num_heads * head


def end_weights(job: Job) -> tuple[float, float]:
    """input_weight and output_weight of the job, "auto" resolved; in layers."""
    pipeline, model = job.pipeline, job.model
    layer = layer_flops(model, job.data.seq_len)
    logits = 2.0 * model.hidden_size * model.vocab_size + _LOGIT_PASSES * 4.0 * model.vocab_size * _FLOPS_PER_BYTE
    lookup = 3 * 4.0 * model.hidden_size * _FLOPS_PER_BYTE
    first = lookup / layer if pipeline.input_weight == "auto" else pipeline.input_weight
    last = logits / layer if pipeline.output_weight == "auto" else pipeline.output_weight
    return round(first, 4), round(last, 4)
