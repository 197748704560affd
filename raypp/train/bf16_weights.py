"""Updates weights that exist in bf16 only (`train.precision: bf16_pure`).

An update is usually smaller than half the distance of two bf16 numbers, and rounding to nearest
would lose it. Stochastic rounding keeps it on average (`train.stochastic_rounding`).

Legend: R rows of this rank's part of a parameter, L its columns.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from raypp.parallel.shard import LocalRows, local_part, local_rows
from raypp.train.stochastic_rounding import random_bits, round_to_bf16, rounding_key


class Bf16Weights:
    """Reads gradients and writes weights of an optimizer whose weights may be in bf16.

    Weights of another dtype are written as they are. The caller sets the attributes before every
    step.

    Args:
        named: Parameters with their global names.

    Attributes:
        any: Whether any weight is in bf16.
        seed: train.seed.
        step: The number of the current step.
        factor: What gradients are multiplied by, in fp32: a bf16 gradient is not rounded again.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._names = {parameter: name for name, parameter in named}
        self.any = any(parameter.dtype == torch.bfloat16 for parameter in self._names)
        self._rows: dict[nn.Parameter, LocalRows] = {}
        self.seed, self.step, self.factor = 0, 0, 1.0

    def gradient(self, parameter: nn.Parameter, rows: slice = slice(None)) -> Tensor:
        """Returns some rows of this rank's part of the scaled gradient, at least fp32 `[R, L]`.

        A copy, if anything was to be done.
        """
        gradient = as_rows(local_part(parameter.grad))[rows]  # type: ignore[arg-type]
        gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        return gradient if self.factor == 1.0 else gradient * self.factor

    def values(self, parameter: nn.Parameter, rows: slice = slice(None)) -> Tensor:
        """Returns a copy of some rows of this rank's part of a weight, at least fp32 `[R, L]`."""
        values = as_rows(local_part(parameter))[rows]
        return values.to(torch.promote_types(values.dtype, torch.float32), copy=True)

    def write(self, parameter: nn.Parameter, values: Tensor, rows: slice = slice(None)) -> None:
        """Writes some rows of this rank's part of a weight.

        Args:
            parameter: The parameter.
            values: The new values, `[R, L]`, contiguous.
            rows: Their place among this rank's rows.
        """
        weight = as_rows(local_part(parameter.detach()))[rows]
        place, key = self.rounding(parameter)
        if place is None:
            weight.copy_(values)
            return
        bits = random_bits(key, place.rows_R[rows], place.width, place.start, weight.shape[1])
        weight.copy_(round_to_bf16(values, bits))

    def rounding(self, parameter: nn.Parameter) -> tuple[LocalRows | None, int]:
        """Returns what the random bits of this step depend on: the place of this rank's part of a
        weight, None unless it is in bf16, and the key."""
        if parameter.dtype != torch.bfloat16:
            return None, 0
        if parameter not in self._rows:
            self._rows[parameter] = local_rows(parameter)
        return self._rows[parameter], rounding_key(self.seed, self.step, self._names[parameter])


def as_rows(tensor: Tensor) -> Tensor:
    """Returns a contiguous tensor `[..., L]` as rows `[R, L]`; a vector as one row."""
    return tensor.view(-1, tensor.shape[-1]) if tensor.numel() else tensor.view(0, 1)
