"""How many tokens' logits the last stage holds at once. The numbers depend on it.

It depends on the vocabulary and the kind of device alone, so the same microbatch gives the same
bits on every mesh that does not split its rows.
"""

from __future__ import annotations

MIB = 2**20
CPU_BYTES, CUDA_BYTES = 128 * MIB, 1024 * MIB
"""Largest size of the fp32 logits of a chunk.

Each chunk adds to the whole gradient of the projection once, so small chunks are slow: much slower
on CUDA, which computes faster relative to its memory.
"""
_MULTIPLE, _FP32 = 16, 4


def chunk_tokens(vocab_size: int, device_type: str) -> int:
    """Returns the largest number of tokens in a chunk, a multiple of 16.

    A microbatch of this many tokens or fewer is not cut.

    Args:
        vocab_size: Columns of the logits.
        device_type: cpu or cuda.
    """
    fit = (CPU_BYTES if device_type == "cpu" else CUDA_BYTES) // (_FP32 * vocab_size)
    return max(_MULTIPLE, fit // _MULTIPLE * _MULTIPLE)


def chunk_size(tokens: int, vocab_size: int, device_type: str) -> int:
    """Returns the tokens of the largest of these chunks."""
    return -(-tokens // max(1, -(-tokens // chunk_tokens(vocab_size, device_type))))


def chunk_sizes(tokens: int, vocab_size: int, device_type: str) -> list[int]:
    """Returns the tokens of each chunk of a microbatch: as few chunks as possible, of one size.

    The last chunk may be smaller.
    """
    size = chunk_size(tokens, vocab_size, device_type)
    return [min(size, tokens - start) for start in range(0, tokens, max(1, size))]
