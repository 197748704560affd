import hashlib

import pytest
import torch
from torch import Tensor

from raypp.job.lora import BASES, NF4, row_bytes
from raypp.stages.models.quantised_rows import dequantise_rows, quantise_rows


def weights(rows: int = 24, width: int = 192, seed: int = 0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def error(base: str, matrix: Tensor) -> float:
    """Root mean square of the error, relative to that of the weights."""
    back = dequantise_rows(quantise_rows(matrix, base), base, matrix.shape[-1], torch.float32)
    return float((back - matrix).norm() / matrix.norm())


def test_the_nf4_codes_are_those_of_bitsandbytes() -> None:
    """The digest is that of the bytes that bitsandbytes 0.50.2 computed for this matrix with
    `quantize_4bit(blocksize=64, quant_type="nf4", compress_statistics=False)`."""
    n = torch.arange(8 * 192)
    matrix = (((n * n * 7919 + n * 104729) % 2003 - 1001).float() / 1024).view(8, 192)
    codes = quantise_rows(matrix, "nf4")[:, :96].contiguous()
    digest = hashlib.sha256(codes.numpy().tobytes()).hexdigest()
    assert digest == "7edcb64d7b0595616bdd33ca83dbdfe39c9bc6640f1ac1db78d9db13582f0a1d"


def test_the_nf4_values_are_quantiles_of_the_normal_distribution() -> None:
    """arXiv:2305.14314, section 3 and appendix E: the means of neighbouring quantiles, 8 negative
    and 9 positive ones with a shared zero, scaled to 1. The last quantile is bitsandbytes'."""
    offset = 0.9677083
    normal = torch.distributions.Normal(0.0, 1.0)
    positive = normal.icdf(torch.linspace(offset, 0.5, 9)[:-1].double())
    negative = -normal.icdf(torch.linspace(offset, 0.5, 8)[:-1].double())
    values = torch.cat((positive, torch.zeros(1), negative)).sort().values
    torch.testing.assert_close(torch.tensor(NF4).double(), values / values.max(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("base", BASES)
def test_a_part_of_the_rows_has_the_bytes_of_the_whole(base: str) -> None:
    matrix = weights(rows=23)
    whole = quantise_rows(matrix, base)
    assert whole.shape == (23, row_bytes(base, 192))
    for cut in (1, 7, 12):
        parts = [quantise_rows(part, base) for part in matrix.split(cut)]
        assert torch.equal(torch.cat(parts), whole)
    stack = quantise_rows(matrix.view(1, 23, 192).expand(3, -1, -1), base)
    assert all(torch.equal(one, whole) for one in stack)


@pytest.mark.parametrize("base", BASES)
def test_matrices_larger_than_a_chunk_are_quantised_alike(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = weights()
    whole = quantise_rows(matrix, base)
    back = dequantise_rows(whole, base, 192, torch.float32)
    monkeypatch.setattr("raypp.stages.models.quantised_rows._CHUNK", 5 * 192)
    assert torch.equal(quantise_rows(matrix, base), whole)
    assert torch.equal(dequantise_rows(whole, base, 192, torch.float32), back)


@pytest.mark.parametrize(("base", "limit"), [("int8", 0.01), ("nf4", 0.095)])
def test_the_error_of_normal_weights_is_that_of_the_format(base: str, limit: float) -> None:
    assert limit / 2 < error(base, weights(64, 4096)) < limit


def test_a_row_with_an_outlier_keeps_the_scales_of_its_other_blocks() -> None:
    matrix = weights(64, 4096)
    matrix[:, 5] *= 100
    back = dequantise_rows(quantise_rows(matrix, "nf4"), "nf4", 4096, torch.float32)
    others = (back - matrix)[:, 64:].norm() / matrix[:, 64:].norm()
    assert others < 0.1


@pytest.mark.parametrize("base", BASES)
def test_zeros_stay_zeros(base: str) -> None:
    matrix = weights(4, 128)
    matrix[1] = 0
    matrix[2, 64:] = 0
    matrix[3] *= 1e-42  # no normal fp32 number is that small
    back = dequantise_rows(quantise_rows(matrix, base), base, 128, torch.float32)
    assert not back[1].any()
    assert not back[2, 64:].any()
    assert back.isfinite().all()
    assert back[3].abs().max() <= matrix[3].abs().max() * 2


@pytest.mark.parametrize("base", BASES)
def test_other_dtypes_are_roundings_of_fp32(base: str) -> None:
    stored = quantise_rows(weights().bfloat16(), base)
    assert torch.equal(stored, quantise_rows(weights().bfloat16().float(), base))
    exact = dequantise_rows(stored, base, 192, torch.float32)
    for dtype in (torch.bfloat16, torch.float64):
        assert torch.equal(dequantise_rows(stored, base, 192, dtype), exact.to(dtype))
    # FSDP of torch 2.11 gathers them in its compute dtype.
    assert torch.equal(dequantise_rows(stored.bfloat16(), base, 192, torch.float32), exact)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(base: str, value: float) -> None:
    matrix = weights()
    matrix[3, 4] = value
    with pytest.raises(ValueError, match="not a finite number"):
        quantise_rows(matrix, base)


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 64 weights, not 100"):
        quantise_rows(weights(2, 100), "nf4")
    assert quantise_rows(weights(2, 100), "int8").shape == (2, 104)
