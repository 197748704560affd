"""Kernels in Triton for what torch computes in many passes over memory: dequantisation and AdamW.
And for the ways of rows to their experts and back, and for products with these' matrices on cards
on which torch's own grouped product loops over the experts on the host.

Those of the first kind give the bits of their reference in torch (`quantised_rows`, `train.adamw`):
products and sums are rounded one by one, quotients and roots correctly. So a rank may use them
while another does not. `fused.kernels` says whether they run here. In the others, a result's row
depends on its own rows and matrix only, and a matrix's gradient adds its rows in order, so no bits
depend on timing. TRITON_INTERPRET=1 runs all on a CPU.

Legend: M rows, C weights in a row, R bytes in a row; N blocks of a row, B values of a block. Of
products: N rows sorted by expert, I columns of a row, O of a result, E experts. S tokens have K
rows each, at places `[S, K]`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_EXACT = {"enable_fp_fusion": False}
"""A product and a sum stay two operations, each rounded."""
_TILE = 4096
"""Values that one program converts or updates."""

ROWS, COLUMNS, DEPTH = 64, 128, 32
"""Rows and columns of the result that a program computes, and how many values it adds at a time."""


def from_int8(bytes_MR: Tensor, out_MC: Tensor) -> None:
    """Writes int8 bytes, uint8 `[M, R]`, as weights `[M, C]`; both contiguous."""
    rows, width = out_MC.shape
    grid = (rows, triton.cdiv(width, _TILE))
    _from_int8[grid](bytes_MR, out_MC, width, bytes_MR.shape[1], TILE=_TILE, num_warps=8, **_EXACT)


def from_nf4(bytes_MR: Tensor, out_MC: Tensor, table: Tensor) -> None:
    """Writes nf4 bytes, uint8 `[M, R]`, as weights `[M, C]`; both contiguous. `out_MC`: where the
    weights go. `table`: the values of 4-bit NormalFloat, fp32 `[16]`."""
    rows, width = out_MC.shape
    grid = (rows, triton.cdiv(width, _TILE))
    _from_nf4[grid](bytes_MR, out_MC, table, width, bytes_MR.shape[1], TILE=_TILE, num_warps=8, **_EXACT)


def adamw(
    weight_RL: Tensor,
    gradient_RL: Tensor,
    moments: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor] | None,
    tables: tuple[Tensor, ...],
    rounding: tuple[Tensor, int, int, int] | None,
    numbers: tuple[float, ...],
) -> None:
    """Updates a weight and its moments in place; everything is contiguous.

    Args:
        moments: Both `[R, L]`: fp32, or codes in uint8 if there are scales.
        scales: Of both moments, fp32 `[R, N]`.
        tables: With scales, for each moment: the numbers fp32 `[256]` of its codes, the borders
            fp32 `[256]` between them, and the lowest code uint8 `[65536]` of each upper half.
        rounding: Of a weight in bf16: the numbers of the rows in the whole weight, int64 `[R]`, its
            width, the first column here, and the 64-bit key of the random bits.
        numbers: The factor of the gradient, β1, 1 - β1, β2, 1 - β2, the inverse of the root of
            1 - β2^t, ε, the rate, and what the weight keeps.
    """
    columns = weight_RL.shape[1]
    size = min(256, columns)
    per_row = triton.cdiv(columns, size)
    blocks = weight_RL.shape[0] * per_row
    side = triton.next_power_of_2(size)
    together = max(1, _TILE // side)
    first, second = scales or moments
    if not tables:
        tables = (weight_RL,) * 6  # not read
    rows, width, start, key = rounding or (weight_RL, 4, 0, 0)
    _adamw[(triton.cdiv(blocks, together),)](
        weight_RL, gradient_RL, *moments, first, second, *tables, rows,
        blocks, per_row, columns, size, triton.cdiv(width, 4), start, key, *numbers,
        SMALL=scales is not None, ROUND=rounding is not None, TOGETHER=together, SIDE=side, num_warps=8, **_EXACT,
    )  # fmt: skip


@triton.jit
def _fp32_at(bytes_pointer):
    """Reads an fp32 number from four bytes at any address."""
    bits = tl.load(bytes_pointer).to(tl.uint32)
    bits |= tl.load(bytes_pointer + 1).to(tl.uint32) << 8
    bits |= tl.load(bytes_pointer + 2).to(tl.uint32) << 16
    bits |= tl.load(bytes_pointer + 3).to(tl.uint32) << 24
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _from_int8(source, out, width, stride, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < width
    scale = _fp32_at(source + row * stride + width)
    codes = tl.load(source + row * stride + column, mask=inside, other=0).to(tl.int8, bitcast=True)
    tl.store(out + row * width + column, (codes.to(tl.float32) * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _from_nf4(source, out, table, width, stride, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = source + row * stride
    pair = tl.program_id(1) * (TILE // 2) + tl.arange(0, TILE // 2)
    inside = pair < width // 2
    step = _fp32_at(start + width // 2 + width // 64)
    k = tl.load(start + width // 2 + pair // 32, mask=inside, other=0).to(tl.float32)
    scale = step * (k * k)
    both = tl.load(start + pair, mask=inside, other=0).to(tl.int32)
    values = tl.interleave(tl.load(table + (both >> 4)) * scale, tl.load(table + (both & 15)) * scale)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    tl.store(out + row * width + column, values.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def _quantised(values, borders, lowest, SIGNED: tl.constexpr):
    """Returns codes `[n, B]` and scales `[n]` of `[n, B]`, as `quantised_moments.quantise`."""
    scale = tl.max(tl.abs(values), axis=1)
    quotient = tl.div_rn(values, tl.where(scale > 0, scale, 1.0)[:, None])
    upper = (quotient.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    code = tl.load(lowest + upper).to(tl.int32)
    code += (quotient > tl.load(borders + code)).to(tl.int32)
    if not SIGNED:
        code = tl.maximum(code, 1)
    return code, scale


@triton.jit
def _random_bits(row, column, words, key):
    """Returns 16 random bits for elements, as `train.bf16_weights.random_bits`."""
    z = (row * words + column // 4 + 1).to(tl.uint64) * 0x9E3779B97F4A7C15 + key.to(tl.int64).to(tl.uint64)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return ((z >> ((column % 4) * 16).to(tl.uint64)) & 0xFFFF).to(tl.int32)


@triton.jit(do_not_specialize=["key", "start"])
def _adamw(
    weight, gradient, average, square, average_scale, square_scale,
    average_numbers, average_borders, average_lowest,
    square_numbers, square_borders, square_lowest, rows,
    blocks, per_row, columns, size, words, start, key,
    factor, beta1, rest1, beta2, rest2, inverse_root, eps, rate, keep,
    SMALL: tl.constexpr, ROUND: tl.constexpr, TOGETHER: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    exists = block < blocks
    row = block // per_row
    column = (block % per_row)[:, None] * size + tl.arange(0, SIDE)[None, :]
    inside = exists[:, None] & (column < columns) & (tl.arange(0, SIDE) < size)[None, :]
    at = row[:, None] * columns + column
    g = tl.load(gradient + at, mask=inside, other=0).to(tl.float32) * factor
    m = tl.load(average + at, mask=inside, other=0)
    v = tl.load(square + at, mask=inside, other=0)
    if SMALL:
        m = tl.load(average_numbers + m.to(tl.int32)) * tl.load(average_scale + block, mask=exists, other=0)[:, None]
        v = tl.load(square_numbers + v.to(tl.int32)) * tl.load(square_scale + block, mask=exists, other=0)[:, None]
        v = v * v
    m = tl.where(inside, m * beta1 + g * rest1, 0.0)
    v = tl.where(inside, v * beta2 + (g * g) * rest2, 0.0)
    root = tl.sqrt_rn(v)
    if SMALL:
        code, scale = _quantised(m, average_borders, average_lowest, True)
        tl.store(average + at, code.to(tl.uint8), mask=inside)
        tl.store(average_scale + block, scale, mask=exists)
        code, scale = _quantised(root, square_borders, square_lowest, False)
        tl.store(square + at, code.to(tl.uint8), mask=inside)
        tl.store(square_scale + block, scale, mask=exists)
    else:
        tl.store(average + at, m, mask=inside)
        tl.store(square + at, v, mask=inside)
    change = tl.div_rn(m, root * inverse_root + eps) * rate
    value = tl.load(weight + at, mask=inside, other=0).to(tl.float32) * keep - change
    if ROUND:
        bits = _random_bits(tl.load(rows + row, mask=exists, other=0)[:, None], column + start, words, key)
        cut = ((value.to(tl.int32, bitcast=True) + bits) & -65536).to(tl.float32, bitcast=True)
        value = tl.where(tl.abs(value) < float("inf"), cut, value)
    tl.store(weight + at, value.to(weight.dtype.element_ty), mask=inside)


def by_expert(rows_NI: Tensor, stack_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Multiplies rows `[N, I]`, sorted by expert, by these' transposed matrices: `[N, O]`."""
    rows, width = rows_NI.shape
    experts, columns, _ = stack_EOI.shape
    out = rows_NI.new_empty(rows, columns)
    # Each expert has at most one tile that is not full. The tiles left over do nothing.
    grid = (triton.cdiv(rows, ROWS) + experts, triton.cdiv(columns, COLUMNS))
    _by_expert[grid](
        rows_NI, stack_EOI, ends_E, out, experts, width, columns, *rows_NI.stride(), *stack_EOI.stride(),
        SIDE=triton.next_power_of_2(experts), ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH, num_warps=4,
    )  # fmt: skip
    return out


def of_matrices(gradient_NO: Tensor, rows_NI: Tensor, ends_E: Tensor) -> Tensor:
    """Returns the gradient `[E, O, I]` of the matrices; that of an expert without rows is zero."""
    experts, columns, width = len(ends_E), gradient_NO.shape[1], rows_NI.shape[1]
    out = torch.empty(experts, columns, width, dtype=rows_NI.dtype, device=rows_NI.device)
    grid = (triton.cdiv(columns, COLUMNS), triton.cdiv(width, COLUMNS), experts)
    _of_matrices[grid](
        gradient_NO, rows_NI, ends_E, out, columns, width, *gradient_NO.stride(), *rows_NI.stride(),
        SIDE=COLUMNS, DEPTH=DEPTH, num_warps=8,
    )  # fmt: skip
    return out


@triton.jit
def _by_expert(
    rows, stack, ends, out, experts, width, columns, row_stride, value_stride, expert_stride, out_stride, in_stride,
    SIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    number = tl.arange(0, SIDE)
    end = tl.load(ends + number, mask=number < experts, other=0)
    begin = tl.load(ends + number - 1, mask=(number > 0) & (number < experts), other=0)
    last = tl.cumsum((end - begin + ROWS - 1) // ROWS, 0)
    before = (last <= tile) & (number < experts)
    expert = tl.sum(before.to(tl.int32), 0)
    if expert < experts:
        own = number == expert
        first = tl.sum(tl.where(own, begin, 0), 0) + (tile - tl.max(tl.where(before, last, 0), 0)) * ROWS
        row = first + tl.arange(0, ROWS)
        exists = row < tl.sum(tl.where(own, end, 0), 0)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        matrix = stack + expert.to(tl.int64) * expert_stride
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for k in range(0, width, DEPTH):
            at = k + tl.arange(0, DEPTH)
            left = tl.load(
                rows + row.to(tl.int64)[:, None] * row_stride + at[None, :] * value_stride,
                mask=exists[:, None] & (at < width)[None, :], other=0,
            )  # fmt: skip
            right = tl.load(
                matrix + column[None, :] * out_stride + at[:, None] * in_stride,
                mask=(column < columns)[None, :] & (at < width)[:, None], other=0,
            )  # fmt: skip
            total = tl.dot(left, right, total, input_precision="ieee")
        place = out + row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=exists[:, None] & (column < columns)[None, :])


@triton.jit
def _of_matrices(
    gradient, rows, ends, out, columns, width, gradient_stride, gradient_value, row_stride, value_stride,
    SIDE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    column = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    at = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    total = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    for first in range(begin, end, DEPTH):
        row = first + tl.arange(0, DEPTH)
        left = tl.load(
            gradient + row.to(tl.int64)[None, :] * gradient_stride + column[:, None] * gradient_value,
            mask=(row < end)[None, :] & (column < columns)[:, None], other=0,
        )  # fmt: skip
        right = tl.load(
            rows + row.to(tl.int64)[:, None] * row_stride + at[None, :] * value_stride,
            mask=(row < end)[:, None] & (at < width)[None, :], other=0,
        )  # fmt: skip
        total = tl.dot(left, right, total, input_precision="ieee")
    place = out + (expert.to(tl.int64) * columns + column)[:, None] * width + at[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(column < columns)[:, None] & (at < width)[None, :])


def spread(
    x_SC: Tensor, places_SK: Tensor, rows_NC: Tensor | None = None, weights_SK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns rows `[N, C]` with every token, times its weights, at its places, and each token's
    product `[S, K]` with the rows that are there. Without `weights_SK`: copies, and no products."""
    (tokens, width), chosen = x_SC.shape, places_SK.shape[1]
    side = triton.next_power_of_2(chosen)
    out = x_SC.new_empty(tokens * chosen, width)
    rows, weights = (x_SC if one is None else one.contiguous() for one in (rows_NC, weights_SK))
    products = x_SC.new_empty(0 if weights_SK is None else places_SK.shape)
    _spread[(tokens,)](
        x_SC.contiguous(), places_SK, rows, weights, out, products, width,
        K=chosen, SIDE=side, TILE=max(16, _TILE // side), WEIGHTED=weights_SK is not None, num_warps=4,
    )  # fmt: skip
    return out, products


def summed(rows_NC: Tensor, places_SK: Tensor, weights_SK: Tensor | None) -> Tensor:
    """Returns each token's sum `[S, C]` of the rows at its places, times weights, if given."""
    (tokens, chosen), width = places_SK.shape, rows_NC.shape[1]
    side = triton.next_power_of_2(chosen)
    out, tile = rows_NC.new_empty(tokens, width), max(16, _TILE // side)
    weights = rows_NC if weights_SK is None else weights_SK.contiguous()
    _summed[(tokens, triton.cdiv(width, tile))](
        rows_NC.contiguous(), places_SK, weights, out, width,
        K=chosen, SIDE=side, TILE=tile, WEIGHTED=weights_SK is not None, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _spread(
    source, places, rows, weights, out, products, width,
    K: tl.constexpr, SIDE: tl.constexpr, TILE: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    token, k = tl.program_id(0).to(tl.int64), tl.arange(0, SIDE)
    place = tl.load(places + token * K + k, mask=k < K, other=0)
    total = tl.zeros((SIDE,), dtype=tl.float32)
    if WEIGHTED:
        weight = tl.load(weights + token * K + k, mask=k < K, other=0).to(tl.float32)
    for start in range(0, width, TILE):
        column = start + tl.arange(0, TILE)
        value = tl.load(source + token * width + column, mask=column < width, other=0).to(tl.float32)[None, :]
        at, inside = place[:, None] * width + column[None, :], (k < K)[:, None] & (column < width)[None, :]
        if WEIGHTED:
            total += tl.sum(tl.load(rows + at, mask=inside, other=0).to(tl.float32) * value, 1)
            value = value * weight[:, None]
        tl.store(out + at, (value + tl.zeros((SIDE, TILE), tl.float32)).to(out.dtype.element_ty), mask=inside)
    if WEIGHTED:
        tl.store(products + token * K + k, total.to(products.dtype.element_ty), mask=k < K)


@triton.jit
def _summed(
    rows, places, weights, out, width,
    K: tl.constexpr, SIDE: tl.constexpr, TILE: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    token, k = tl.program_id(0).to(tl.int64), tl.arange(0, SIDE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    place = tl.load(places + token * K + k, mask=k < K, other=0)
    inside = (k < K)[:, None] & (column < width)[None, :]
    value = tl.load(rows + place[:, None] * width + column[None, :], mask=inside, other=0).to(tl.float32)
    if WEIGHTED:
        value *= tl.load(weights + token * K + k, mask=k < K, other=0).to(tl.float32)[:, None]
    tl.store(out + token * width + column, tl.sum(value, 0).to(out.dtype.element_ty), mask=column < width)
