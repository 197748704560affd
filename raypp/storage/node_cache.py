"""A cache of files that one process of a node creates and all map into memory, after checks.

An entry is a directory named by the digest of all it was made from, complete or absent. You may
delete any while nothing runs. It is at `$RAYPP_CACHE_DIR`, else below the user's cache directory.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
from annotated_types import MaxLen
from numpy.typing import NDArray
from typing_extensions import TypedDict

from raypp.errors import DataError, Problem, in_words
from raypp.untrusted.documents import Bounds, Count, parse_as
from raypp.untrusted.files import check_own, expand_home, open_file, read_file
from raypp.untrusted.text import visible


def cache_directory() -> Path:
    """Returns the directory of this node's entries."""
    own = os.environ.get("RAYPP_CACHE_DIR")
    if own:
        return expand_home(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (expand_home(base) if base else Path.home() / ".cache") / "raypp"


def made_once(entry: Path, make: Callable[[Path], None]) -> Path:
    """Returns the directory `entry`; creates it first if it does not exist. If several processes
    ask at once, one creates it and the others wait; if it dies, another can. `entry`: the entry's
    path, below `cache_directory()`. Raises DataError: the cache cannot be written."""
    if entry.is_dir():
        return own_folder(entry)
    try:
        with _locked(own_folder(entry.parent).joinpath(f"{entry.name}.lock")):
            if not entry.is_dir():
                _make(entry, make)
    except OSError as error:
        fault = f"cannot write the cache at {entry.parent}: {error.strerror or error}"
        fix = "free some space there, or set RAYPP_CACHE_DIR (resources.env) to a writable directory"
        raise DataError(Problem("data.path", fault, fix)) from error
    return own_folder(entry)


def own_folder(folder: Path) -> Path:
    """Creates a folder of the cache if there is none, and returns it. Raises DataError: others can
    replace what it holds, as in a shared cache; OSError: it cannot be created."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (folder, *folder.parents):
        check_own(path, DataError, "set RAYPP_CACHE_DIR (resources.env) to a directory of your own")
        if path == cache_directory():
            break
    return folder


def _make(entry: Path, make: Callable[[Path], None]) -> None:
    unfinished = f".{entry.name}-"
    for left_over in entry.parent.glob(f"{unfinished}*"):  # of a dead process: this one holds the lock
        shutil.rmtree(left_over, ignore_errors=True)
    room = Path(tempfile.mkdtemp(prefix=unfinished, dir=entry.parent))
    try:
        make(room)
        for file in filter(Path.is_file, room.rglob("*")):
            with file.open("rb+") as written:
                os.fsync(written.fileno())
        room.chmod(0o755)
        room.rename(entry)
    except BaseException:
        shutil.rmtree(room, ignore_errors=True)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock on the file; the system releases it if the process dies."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


_MAGIC, _VERSION_AT, _LENGTH_AT = b"\x93NUMPY", 6, 8
_MOST_HEADER = 1 << 16
_SHOWN = 300
_META = Bounds(size=4096)


class Meta(TypedDict):
    """The document of a cache entry; without `tokens` and `dtype` if it has no tokens. With `loss`,
    another file says which tokens carry loss."""

    digest: Annotated[str, MaxLen(64)]
    tokens: NotRequired[Count]
    dtype: NotRequired[Literal["uint8", "uint16", "uint32", "uint64"]]
    loss: NotRequired[bool]
    remarks: NotRequired[list[Annotated[str, MaxLen(8192)]]]


def map_array(path: Path, place: str, name: str = "", fix: str = "write it with numpy.save") -> NDArray[Any]:
    """Maps the array of a .npy file into memory, read-only. `name`: for errors; empty: the path.
    Raises DataError: it is no regular file, or no whole array of numbers."""
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
    Raises DataError: they are not such offsets of `tokens` tokens."""
    path, fix = entry / "offsets.npy", f"delete {entry}"
    offsets = map_array(path, place, fix=fix)
    if offsets.ndim != 1 or offsets.dtype != np.int64 or len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != tokens:
        raise DataError(Problem(place, f"{path} is not the index of {tokens} tokens", fix))
    return offsets


def read_meta(entry: Path, place: str) -> Meta:
    """Returns the document of a cache entry. Raises DataError: it cannot be read."""
    path, fix = entry / "meta.json", f"delete {entry}"
    return parse_as(Meta, read_file(path, _META.size, place=place, fix=fix), str(path), _META, DataError, fix)
