"""Maps arrays of files into memory, and reads the index of a cache entry, after checking them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
from annotated_types import MaxLen
from numpy.typing import NDArray
from typing_extensions import TypedDict

from raypp.errors import DataError, Problem, in_words
from raypp.untrusted.documents import Bounds, Count, parse_as
from raypp.untrusted.files import open_file, read_file
from raypp.untrusted.text import visible

_MAGIC, _VERSION_AT, _LENGTH_AT = b"\x93NUMPY", 6, 8
_MOST_HEADER = 1 << 16
_SHOWN = 300
_META = Bounds(size=4096)


class Meta(TypedDict):
    """The document of a cache entry; without `tokens` and `dtype` if it has no tokens.

    With `loss`, another file says which tokens carry loss.
    """

    digest: Annotated[str, MaxLen(64)]
    tokens: NotRequired[Count]
    dtype: NotRequired[Literal["uint8", "uint16", "uint32", "uint64"]]
    loss: NotRequired[bool]
    remarks: NotRequired[list[Annotated[str, MaxLen(8192)]]]


def map_array(path: Path, place: str, name: str = "", fix: str = "write it with numpy.save") -> NDArray[Any]:
    """Maps the array of a .npy file into memory, read-only.

    Args:
        path: The file.
        place: The key of the job file that names it.
        name: What to call it in errors; empty: the path.
        fix: What the user can do.

    Raises:
        DataError: It is not a regular file, or not a whole array of plain numbers.
    """
    with open_file(path, place=place) as file:
        first = file.read(_LENGTH_AT + 4)
    wide = first[_VERSION_AT : _VERSION_AT + 1] > b"\x01"  # the length of the header has 4 bytes, not 2
    length = int.from_bytes(first[_LENGTH_AT : _LENGTH_AT + (4 if wide else 2)], "little")
    fault = f"{name or path} is not a .npy array: "
    if not first.startswith(_MAGIC):
        raise DataError(Problem(place, f"{fault}it does not begin as one", fix))
    if length > _MOST_HEADER:
        raise DataError(Problem(place, f"{fault}its header would have {length:,} bytes", fix))
    try:
        array: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # numpy raises many types, tokenize's among them
        raise DataError(Problem(place, f"{fault}{visible(in_words(error)[:_SHOWN])}", fix)) from error
    return array


def read_offsets(entry: Path, tokens: int, place: str) -> NDArray[np.int64]:
    """Returns where the documents of a cache entry begin, and the end of the last: `[n + 1]`.

    Raises:
        DataError: They are not such offsets of `tokens` tokens.
    """
    path, fix = entry / "offsets.npy", f"delete {entry}"
    offsets = map_array(path, place, fix=fix)
    if offsets.ndim != 1 or offsets.dtype != np.int64 or len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != tokens:
        raise DataError(Problem(place, f"{path} is not the index of {tokens} tokens", fix))
    return offsets


def read_meta(entry: Path, place: str) -> Meta:
    """Returns the document of a cache entry.

    Raises:
        DataError: It cannot be read.
    """
    path, fix = entry / "meta.json", f"delete {entry}"
    return parse_as(Meta, read_file(path, _META.size, place=place, fix=fix), str(path), _META, DataError, fix)
