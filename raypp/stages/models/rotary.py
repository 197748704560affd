"""Tables of the rotary position encoding, for all kinds of `model.rope`.

Tables are computed in fp32, or in their dtype if that is wider, then cast. In half precision,
angles at high positions would be wrong by whole positions. The formulas are those of transformers,
whose models the frequencies must fit; each document counts as one sequence of theirs.

Legend: S tokens of the microbatch on this rank, H heads, D head width, R ≤ D rotated dims of a
head.
"""

import math

import torch
from torch import Tensor

from raypp.job.rope import RopeOptions, Rotary
from raypp.stages.models.documents import PackedDocuments

Table = tuple[Tensor, ...]
"""Cosines and sines, `[S, 1, R]` each; with `Rotary.growth`, factors of queries, `[S, 1, 1]`."""


def rotary_table(positions_S: Tensor, rotary: Rotary, dtype: torch.dtype, documents: PackedDocuments) -> Table:
    """Computes a table of the rotary encoding (RoFormer, arXiv:2104.09864, half-split layout).
    `positions_S`: position of every token in its document, int64 `[S]`. `documents`: the documents
    of these tokens, for kinds whose frequencies depend on their lengths."""
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, rotary.width, 2, device=positions_S.device, dtype=wide) / rotary.width
    positions = positions_S.to(wide)[:, None]
    scaling = rotary.scaling
    if scaling is None:
        angles = positions * rotary.theta**-exponents
    elif rotary.by_length:
        lengths = documents.lengths_S[:, None]
        angles = positions * _by_length(lengths, exponents, rotary, scaling)
    else:
        angles = positions * _scaled(exponents, rotary, scaling)
    if rotary.turned != 1:
        angles[:, int(rotary.turned * rotary.width // 2) :] = 0
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    factor = 1.0 if scaling is None else attention_factor(scaling)
    cos, sin = angles.cos(), angles.sin()
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    if rotary.growth:
        factors = 1 + rotary.growth * torch.log(1 + torch.floor(positions / rotary.context))
        return cos.to(dtype), sin.to(dtype), factors[:, None].to(dtype)
    return cos.to(dtype), sin.to(dtype)


def grown(q_SHD: Tensor, table: Table | None) -> Tensor:
    """Multiplies queries `[S, H, D]` by the factors of a table, if it has some."""
    return q_SHD if table is None or len(table) == 2 else q_SHD * table[2]


def rotated(x_SHD: Tensor, table: Table | None) -> Tensor:
    """Rotates queries or keys `[S, H, D]` by a table; dims beyond its width stay as they are."""
    if table is None:
        return x_SHD
    cos, sin = table[:2]
    width = cos.shape[-1]
    if width == x_SHD.shape[-1]:
        return _rotate(x_SHD, cos, sin)
    turned, rest = torch.split(x_SHD, [width, x_SHD.shape[-1] - width], dim=-1)
    return torch.cat((_rotate(turned, cos, sin), rest), dim=-1)


def _rotate(x_SHR: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates all dims of `[S, H, R]` by cosines and sines `[S, 1, R]`."""
    low, high = x_SHR.chunk(2, dim=-1)
    return x_SHR * cos + torch.cat((-high, low), dim=-1) * sin


def attention_factor(scaling: RopeOptions) -> float:
    """Returns what cosines and sines are multiplied by, which scales attention's logits twice."""
    if scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    factor = scaling.factor or 1.0
    if factor <= 1.0:
        return 1.0
    if scaling.kind == "yarn":  # arXiv:2309.00071, equation 22
        return 0.1 * math.log(factor) + 1.0
    return math.sqrt(1 + math.log(factor) / math.log(scaling.original_context or 2))  # arXiv:2402.13753


def _scaled(exponents: Tensor, rotary: Rotary, scaling: RopeOptions) -> Tensor:
    """Returns the frequencies `[R / 2]`, given the exponents of the base, `[R / 2]`. For kinds that
    do not depend on the lengths of documents."""
    plain = 1.0 / rotary.theta**exponents
    factor = scaling.factor or 1.0
    if scaling.kind == "linear":
        return plain / factor
    kept = _yarn_kept(plain, rotary, scaling) if scaling.kind == "yarn" else _llama3_kept(plain, scaling)
    return torch.where(kept == 1, plain, plain / factor * (1 - kept) + plain * kept)


def _yarn_kept(plain: Tensor, rotary: Rotary, scaling: RopeOptions) -> Tensor:
    """Returns how much of each frequency stays, `[R / 2]`, 0 to 1: a ramp over the index. YaRN
    (arXiv:2309.00071), section 3.2."""
    context = scaling.original_context or 1

    def index_of(turns: float) -> float:
        return rotary.width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rotary.theta))

    low, high = index_of(scaling.beta_fast or 32), index_of(scaling.beta_slow or 1)
    if scaling.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.width - 1)
    width = high - low if high != low else 0.001
    indices = torch.arange(len(plain), device=plain.device, dtype=plain.dtype)
    return 1 - ((indices - low) / width).clamp(0, 1)


def _llama3_kept(plain: Tensor, scaling: RopeOptions) -> Tensor:
    """Returns how much of each frequency stays, `[R / 2]`, 0 to 1: a ramp over its turns."""
    context, low, high = scaling.original_context or 1, scaling.low_freq_factor or 1, scaling.high_freq_factor or 4
    turns = context / (2 * math.pi / plain)
    return ((turns - low) / (high - low)).clamp(0, 1)


def _by_length(lengths_S1: Tensor, exponents: Tensor, rotary: Rotary, scaling: RopeOptions) -> Tensor:
    """Returns the frequencies `[S, R / 2]` of tokens in documents of int64 `[S, 1]` tokens. The
    exponents of the base are `[R / 2]`."""
    context = scaling.original_context or 1
    if scaling.kind == "longrope":
        # Copied without waiting for the device.
        short, long = (
            torch.tensor(factors, dtype=exponents.dtype).to(exponents.device, non_blocking=True)
            for factors in (scaling.short_factor, scaling.long_factor)
        )
        return 1.0 / (torch.where(lengths_S1 > context, long, short) * rotary.theta**exponents)
    factor, width = scaling.factor or 1.0, rotary.width
    lengths = lengths_S1.clamp(min=context).to(exponents.dtype)
    base = rotary.theta * (factor * lengths / context - (factor - 1)) ** (width / (width - 2))
    return 1.0 / base**exponents
