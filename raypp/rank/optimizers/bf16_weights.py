"""Updates weights that exist in bf16 only (`train.precision: bf16_pure`).

An update is usually smaller than half the distance of two bf16 numbers, and rounding to nearest
would lose it. Stochastic rounding keeps it on average.
Its random bits are a function of the run's seed, the step, the parameter's global name and the
element's place in the whole parameter. So a resumed run draws the same ones, and so does every
mesh: a shard draws its part of what one process draws, and replicas draw the same.

Legend: R rows of this rank's part of a parameter, L its columns.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from raypp.stages.models.adapter_dropout import LANES, hash_key, lanes, splitmix
from raypp.stages.parallel.shard import LocalRows, local_part, local_rows


class Bf16Weights:
    """Reads gradients and writes weights of an optimizer whose weights may be in bf16.

    Weights of another dtype are written as they are. The caller sets attributes before each step.

    Attributes:
        any: Whether any weight is in bf16.
        step: The number of the current step.
        factor: What gradients are multiplied by, in fp32: a bf16 gradient is not rounded again.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._names = {parameter: name for name, parameter in named}
        self.any = any(parameter.dtype == torch.bfloat16 for parameter in self._names)
        self._rows: dict[nn.Parameter, LocalRows] = {}
        self.seed, self.step, self.factor = 0, 0, 1.0

    def gradient(self, parameter: nn.Parameter, rows: slice = slice(None)) -> Tensor:
        """Returns some rows of this rank's part of the scaled gradient, at least fp32 `[R, L]`. A
        copy, if anything was to be done."""
        gradient = as_rows(local_part(parameter.grad))[rows]  # type: ignore[arg-type]
        gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        return gradient if self.factor == 1.0 else gradient * self.factor

    def values(self, parameter: nn.Parameter, rows: slice = slice(None)) -> Tensor:
        """Returns a copy of some rows of this rank's part of a weight, at least fp32 `[R, L]`."""
        values = as_rows(local_part(parameter))[rows]
        return values.to(torch.promote_types(values.dtype, torch.float32), copy=True)

    def write(self, parameter: nn.Parameter, values: Tensor, rows: slice = slice(None)) -> None:
        """Writes some rows of this rank's part of a weight. `values`: the new values, `[R, L]`,
        contiguous. `rows`: their place among this rank's rows."""
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


def rounding_key(seed: int, step: int, name: str) -> int:
    """Returns the 64-bit key of a parameter's random bits in one step, as a signed number."""
    return hash_key(f"round:{seed}:{step}:{name}")


def random_bits(key: int, rows_R: Tensor, width: int, start: int, columns: int) -> Tensor:
    """Returns 16 random bits for each element of some rows of a matrix.

    A hash of 64 bits serves four neighbouring columns. `key`: from `rounding_key`. `rows_R`:
    numbers of the rows in the whole matrix, int64 `[R]`. Of a stack of matrices, rows are counted
    through all of them. `width`: columns of the whole matrix. Returns int32 `[R, L]`, 0 to 65535,
    on the device of `rows_R`."""
    first, last = start // LANES, -(-(start + columns) // LANES)
    words = torch.arange(first, last, dtype=torch.int64, device=rows_R.device)
    hashes = splitmix((rows_R * -(-width // LANES)).unsqueeze(1) + words, key)
    numbers = lanes(hashes)[:, start - LANES * first :][:, :columns]
    return numbers.to(torch.int32).bitwise_and_(0xFFFF)


def round_to_bf16(values: Tensor, bits: Tensor) -> Tensor:
    """Rounds to one of the two neighbours in bf16, to the nearer one with the higher probability.
    The expected value is the value itself. NaN and infinities stay what they are. `values`: fp32
    `[...]`, contiguous. `bits`: int32 `[...]`, 0 to 65535, uniform. Returns bf16 `[...]`."""
    cut = (values.view(torch.int32) + bits).bitwise_and_(-65536).view(torch.float32)
    return torch.where(values.isfinite(), cut, values).to(torch.bfloat16)
