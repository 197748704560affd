"""Memory of the loss, and how many tokens' logits the last stage holds at once.

It follows `stages/models/loss.py` and changes with it. The numbers depend on the size of the
chunks. That depends on the vocabulary and the kind of device alone, so the same microbatch gives
the same bits on every mesh that does not split its rows.
"""

from dataclasses import dataclass

from raypp.job.family import embedding
from raypp.job.job import Job
from raypp.job.known_families import family_of
from raypp.job.lora import trains_part
from raypp.job.precision import FP32
from raypp.job.tensor_parts import end_on_rank
from raypp.planning.decision import Kind

MIB = 2**20
CPU_BYTES, CUDA_BYTES = 128 * MIB, 1024 * MIB
"""Largest size of the fp32 logits of a chunk.

Each chunk adds to the whole gradient of the projection once, so small chunks are slow: much slower
on CUDA, which computes faster relative to its memory.
"""
_MULTIPLE = 16


def chunk_tokens(vocab_size: int, device_type: str) -> int:
    """Returns the largest number of tokens in a chunk, a multiple of 16. A microbatch of this many
    tokens or fewer is not cut. `device_type`: cpu or cuda."""
    fit = (CPU_BYTES if device_type == "cpu" else CUDA_BYTES) // (FP32.bytes * vocab_size)
    return max(_MULTIPLE, fit // _MULTIPLE * _MULTIPLE)


def chunk_size(tokens: int, vocab_size: int, device_type: str) -> int:
    """Returns the tokens of the largest of these chunks."""
    return -(-tokens // max(1, -(-tokens // chunk_tokens(vocab_size, device_type))))


def chunk_sizes(tokens: int, vocab_size: int, device_type: str) -> list[int]:
    """Returns the tokens of each chunk of a microbatch: as few chunks as possible, of one size. The
    last chunk may be smaller."""
    size = chunk_size(tokens, vocab_size, device_type)
    return [min(size, tokens - start) for start in range(0, tokens, max(1, size))]


@dataclass(frozen=True)
class LossMemory:
    """Bytes of the loss on the last stage, for one microbatch. `kept`: from its forward to its
    backward. `forward`, `backward`: in addition to that, while they compute."""

    kept: int
    forward: int
    backward: int


def loss_memory(job: Job, tokens: int, kind: Kind) -> LossMemory:
    """Returns the memory of the cross-entropy of a microbatch of `tokens` tokens on one rank.

    From whole logits: the log-softmax in fp32 and the logits in the compute dtype are kept for the
    backward, by the stage or by the heap of a CPU. The backward has two fp32 gradients at once: of
    the log-softmax and of its input. The forward also has, in bf16, an fp32 copy of the logits.

    In chunks, on CUDA also in one: the gradient of the projection's input is kept. Meanwhile there
    are the logits of a chunk, in the compute dtype and in fp32, their log-softmax (fp32), and the
    gradient of a trained projection (of several chunks in fp32, and in the end a copy in the
    compute dtype). On CUDA one kernel makes the logits' gradients of them, in the compute dtype;
    without Triton it is as on CPUs.

    The ranks of a tp group each have a part of every token's logits, always in chunks and without
    that kernel: a chunk's logits are in fp32 twice.

    A soft cap of the logits keeps its tanh in the compute dtype; in chunks, its slope in fp32, but
    nothing in that kernel.
    """
    model, compute = job.model, job.train.dtypes.compute.bytes
    capped = model.stage_ends().logit_cap is not None
    tp = job.mesh.tp
    vocabulary = -(-model.vocab_size // tp)
    chunk = chunk_size(tokens, vocabulary, kind)
    narrow = compute if compute < FP32.bytes else 0
    if family_of(model) is None or (tp == 1 and kind == "cpu" and chunk == tokens):
        values = tokens * model.vocab_size
        return LossMemory(
            kept=values * (compute + FP32.bytes + (compute if capped else 0)),
            forward=values * (FP32.bytes if narrow else 0),
            backward=values * 2 * FP32.bytes,
        )
    each = 2 * compute if kind == "cuda" else (3 if capped else 2) * FP32.bytes + narrow
    if tp > 1:
        each = 2 * FP32.bytes + 2 * narrow + (compute + FP32.bytes if capped else 0)
    logits = each * chunk * vocabulary
    projection = end_on_rank(embedding(model), tp).parameters if trains_part(model, "lm_head") else 0
    summed, copied = (compute, 0) if chunk == tokens else (FP32.bytes, narrow)
    working = projection * summed + max(logits, projection * copied)
    backward = working if projection else 0  # of the projection, from logits that it computes again
    return LossMemory(kept=tokens * model.hidden_size * compute, forward=working, backward=backward)
