"""The dtypes and precisions that a job can choose, in tables that everything else reads. A new
precision is a row of `PRECISIONS` and a word of `PrecisionName`; a new dtype is also a row of
`DTYPES` and a word of `DtypeName`, and needs rates in `raypp.planning.costs`."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

DtypeName = Literal["fp32", "bf16", "fp16"]
PrecisionName = Literal["fp32", "bf16", "bf16_pure", "fp16", "fp8"]

GROUPS_FP8 = (9, 0)
"""Compute capability of the cards for which torch has products in fp8 of all experts at once."""
LARGEST_FP8 = 448.0
"""The largest number of e4m3."""
SINCE_FP8 = (8, 9)
"""Compute capability of the first cards with products in fp8."""


@dataclass(frozen=True)
class Dtype:
    """A dtype of weights, activations, sums or messages.

    Attributes:
        saved: Its name in safetensors files.
        since: Compute capability of the first cards with fast products and attention kernels in it.
        tolerance: Largest relative error between two meshes. bf16 keeps 8 bits (4e-3); two steps of
            rounding changed a small gradient by up to 2e-2, as measured. fp16 keeps 11.
    """

    name: DtypeName
    bytes: int
    torch: str
    saved: str
    since: tuple[int, int]
    tolerance: float


FP32 = Dtype("fp32", 4, "float32", "F32", since=(0, 0), tolerance=1e-5)
BF16 = Dtype("bf16", 2, "bfloat16", "BF16", since=(8, 0), tolerance=5e-2)
FP16 = Dtype("fp16", 2, "float16", "F16", since=(7, 0), tolerance=1e-2)
DTYPES: dict[str, Dtype] = {dtype.name: dtype for dtype in (FP32, BF16, FP16)}


@dataclass(frozen=True)
class Precision:
    """What `train.precision` means.

    Attributes:
        compute: The dtype of activations and products.
        summary: What it means, in words for `raypp plan`.
        reduce: The dtype in which gradients are summed over ranks: `train.reduce_dtype`.
        fp8: Products with the matrices of layers are in fp8 (`job.fp8`).
    """

    name: PrecisionName
    weights: Dtype
    compute: Dtype
    summary: str
    reduce: Dtype = FP32
    fp8: bool = False

    @property
    def since(self) -> tuple[int, int]:
        """Compute capability of the first cards that compute in it fast."""
        return SINCE_FP8 if self.fp8 else self.compute.since

    @property
    def copies_weights(self) -> bool:
        """Whether products need copies of the weights, in another dtype."""
        return self.weights is not self.compute

    @property
    def gradients(self) -> Dtype:
        """The dtype in which gradients are summed over microbatches: never narrower than either."""
        return max(self.weights, self.reduce, key=lambda dtype: dtype.bytes)

    @property
    def narrow_weights(self) -> bool:
        """Whether updates are rounded stochastically, because the weights have fewer bits."""
        return self.weights is not FP32

    @property
    def scales_loss(self) -> bool:
        """Whether small gradients would be rounded to 0, unless the loss is scaled."""
        return self.compute is FP16

    @property
    def sums_in_place(self) -> bool:
        """Whether a gradient summed over ranks is the weight's own, not a copy in another dtype."""
        return self.reduce is self.weights is FP32


PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("fp32", FP32, FP32, "fp32"),
        Precision("bf16", FP32, BF16, "bf16: weights and gradients in fp32, compute in bf16"),
        Precision("bf16_pure", BF16, BF16, "bf16_pure: weights in bf16 only, stochastic rounding"),
        Precision("fp16", FP32, FP16, "fp16: weights and gradients in fp32, compute in fp16, loss scaling"),
        Precision("fp8", FP32, BF16, "fp8: weights and gradients in fp32, products of layers in e4m3", fp8=True),
    )
}


@lru_cache(maxsize=16)
def precision_of(name: str, reduce: str) -> Precision:
    """Returns the precision of a name, with gradients summed in the dtype `reduce`."""
    return replace(PRECISIONS[name], reduce=DTYPES[reduce])


def whole_precision(dtype: str) -> Precision:
    """Returns the precision whose weights and products have this dtype. fp16's is fp32: no weights
    are kept in fp16."""
    return next((row for row in PRECISIONS.values() if row.weights is row.compute is DTYPES[dtype]), PRECISIONS["fp32"])


def auto_on(capability: tuple[int, int]) -> DtypeName:
    """Returns what `train.precision: auto` is on a card of this compute capability."""
    return next(dtype.name for dtype in (BF16, FP16, FP32) if capability >= dtype.since)
