"""Dropout of what adapters take, with masks that no mesh changes.

Whether a number is dropped is a function of the run's seed, the step, the token's row in the step's
batch and its place there, the matrix, and the feature. So every mesh, a recomputed forward and a
resumed run drop the same numbers. There is no generator state.

A token's part of this is one 64-bit hash, its key. Keys are computed with the microbatch
(`pipeline.collate`), are cut with its rows, and reach a layer as `PackedDocuments.keys_S`.

Legend: B rows, t this rank's tokens of each, S tokens of the microbatch on this rank, C width of
what an adapter takes.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

_STEPS = 1 << 16
"""A probability is a number of these."""


@dataclass(frozen=True)
class StepKeys:
    """The keys of the tokens of one step. `seed`: train.seed. `first_row`: number of the replica's
    first row, counted through all rows of the step."""

    seed: int
    step: int
    first_row: int

    def of(self, first: int, rows: int, columns: NDArray[np.int64]) -> Tensor:
        """Returns the keys of some rows of the replica, int64 `[B * t]`, on the host. `first`:
        number of the first of them, counted through the replica's rows. `columns`: the places of
        this rank's tokens in a whole row, int64 `[t]`."""
        numbers = np.arange(self.first_row + first, self.first_row + first + rows, dtype=np.int64)
        places = (numbers[:, None] << 32) + columns
        return splitmix(torch.from_numpy(places.reshape(-1)), hash_key(f"dropout:{self.seed}:{self.step}"))


class CurrentTokens:
    """The tokens that a layer computes now. `keys_S`: int64 `[S]`; None: nothing is dropped."""

    keys_S: Tensor | None = None


@torch.library.custom_op("raypp::kept", mutates_args=())
def _kept(keys_S: Tensor, key: Tensor, width: int, lowest: int) -> Tensor:
    """Returns what is not dropped, bool `[S, C]`. An operator: if the compiler fused code with the
    hash, other functions would round differently, depending on what is recomputed."""
    words = torch.arange(-(-width // LANES), device=keys_S.device)
    return lanes(splitmix(keys_S[:, None] + words, key))[:, :width] >= lowest


@_kept.register_fake
def _(keys_S: Tensor, key: Tensor, width: int, lowest: int) -> Tensor:
    return keys_S.new_empty((keys_S.shape[0], width), dtype=torch.bool)


class AdapterDropout(nn.Module):
    """Drops numbers of what the adapter of one matrix takes, and scales the others. `probability`:
    that of a number to be dropped, rounded to `_STEPS`. Rounded to 0, the bits are those without
    dropout. `tokens`: the tokens of its layer."""

    def __init__(self, probability: float, matrix: str, tokens: CurrentTokens) -> None:
        super().__init__()
        dropped = min(round(probability * _STEPS), _STEPS - 1)
        self.lowest, self.factor = dropped - _STEPS // 2, _STEPS / (_STEPS - dropped)
        self.tokens = tokens
        self.columns: tuple[int, int] | None = None
        """Of a tp group: this rank's first feature, and how many the matrix takes."""
        # Not an int: compiled code would be compiled again for that of every layer.
        self.key = torch.tensor(hash_key(f"dropout:{matrix}"), device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        """Returns `[..., C]` for `[..., C]`, of S tokens in the order of their keys."""
        keys_S = self.tokens.keys_S
        if keys_S is None:
            return x
        first, width = self.columns or (0, x.shape[-1])
        kept = _kept(keys_S, self.key, width, self.lowest)[:, first : first + x.shape[-1]].reshape(x.shape)
        return torch.where(kept, x * self.factor, 0)


# Random bits without a state: a hash of what they are for, and of a counter.
#
# All operations are on integers, so every device gives the same bits.

LANES = 4
"""16-bit numbers in a 64-bit hash."""
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The increment and multipliers of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""


def hash_key(purpose: str) -> int:
    """Returns the 64-bit key of the random bits for a purpose, as a signed number."""
    return int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "little", signed=True)


def splitmix(counters: Tensor, key: int | Tensor) -> Tensor:
    """Hashes counters int64 `[...]` in place; products wrap around. `counters`: int64 `[...]`.
    `key`: from `hash_key`, also as int64 `[]`."""
    z = counters.add_(1).mul_(_signed(_GOLDEN)).add_(key)
    z.bitwise_xor_(_shifted(z, 30)).mul_(_signed(_FIRST))
    z.bitwise_xor_(_shifted(z, 27)).mul_(_signed(_SECOND))
    return z.bitwise_xor_(_shifted(z, 31))


def lanes(hashes: Tensor) -> Tensor:
    """Returns the 16-bit numbers of hashes int64 `[..., n]`: int16 `[..., 4 n]`, a view."""
    return hashes.view(torch.int16)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _shifted(z: Tensor, by: int) -> Tensor:
    """Shifts int64 `[...]` right and fills with zeros; torch's shift copies the sign."""
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)
