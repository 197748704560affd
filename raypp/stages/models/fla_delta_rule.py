"""The gated delta rule by the kernels of flash-linear-attention (the package fla-core), on CUDA.

They compute products in the dtype of their inputs and round what is between them to it, where
`delta_rule` has fp32 throughout. The package measures the sizes of its tiles when it first meets a
number of heads, and keeps them in Triton's cache: on another host the bits may be others.
"""

import torch
from torch import Tensor

from raypp.job.layer_rules import CHUNK
from raypp.stages.models.documents import PackedDocuments


def chunked(
    documents: PackedDocuments, q_SHD: Tensor, k_SHD: Tensor, v_SHV: Tensor, decay_SH: Tensor, beta_SH: Tensor
) -> Tensor:
    """Returns the delta rule's output for whole documents, `[S, H, V]`; never waits for the device.
    Takes queries and keys `[S, key heads, D]`, before their norm, values `[S, H, V]`, and in fp32
    the logarithms of what the state is multiplied by."""
    # Imported here: it needs Triton, and takes seconds.
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    # A copy for each call: the package takes the same tensor for the same lengths.
    borders, chunks = documents.cu_seqlens.long(), sum(-(-length // CHUNK) for length in documents.lengths)
    given = (one[None] for one in (q_SHD, k_SHD, v_SHV, decay_SH, beta_SH))
    places: dict[str, Tensor] = {"cu_seqlens": borders, "chunk_indices": _chunks(borders, chunks)}
    out: Tensor = chunk_gated_delta_rule(*given, use_qk_l2norm_in_kernel=True, **places)[0]
    return out[0]


def _chunks(borders: Tensor, total: int) -> Tensor:
    """Returns the document of each chunk and its place there, `[total, 2]`. The package would read
    their number from the device."""
    counts = (borders.diff() + CHUNK - 1) // CHUNK
    documents = torch.arange(len(counts), device=borders.device).repeat_interleave(counts, output_size=total)
    places = torch.arange(total, device=borders.device) - (counts.cumsum(0) - counts)[documents]
    return torch.stack((documents, places), dim=1)
