"""A tensor of a Hugging Face model's files."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from raypp.untrusted.safetensors_header import ELEMENT_BYTES


@dataclass(frozen=True)
class HfTensor:
    """One tensor of a safetensors file.

    Attributes:
        name: Its name in the file.
        dtype: safetensors' name of its dtype.
        shape: Its shape.
        key: The file's key.
        begin: Offset of its first byte in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    key: str
    begin: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of dim 0; a tensor without dims is one row."""
        return prod(self.shape[1:]) * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True)
class GrownTensor(HfTensor):
    """An embedding or a head with more rows than in its file: each of them is the mean of those.

    Attributes:
        stored: Rows in the file.
    """

    stored: int
