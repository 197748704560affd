"""Finds the files of a `data.path`, local or in a store, and reads them in chunks."""

import bz2
import lzma
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from raypp.errors import DataError, Problem
from raypp.kinds import SOURCES, keeps_data_elsewhere
from raypp.storage import NotFound, ObjectStore, StoreError, open_store
from raypp.untrusted.files import expand_home, files_below, matches, open_file, special_kind
from raypp.untrusted.text import visible

MOST_TEXT_BYTES = 512 << 20
"""Longest line, and longest document, in bytes."""
MOST_FILES = 200_000
_CHUNK = 16 << 20
_watch: ContextVar[Callable[[int], None]] = ContextVar("watch", default=lambda count: None)
_left: ContextVar[Counter[str]] = ContextVar("left")
_USUAL_RATIO = 5
_ABOUT = ("readme.md", "license.md", "license.txt", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
"""Files in a folder that are about the data."""
_FORMATS = (
    ".csv", ".tsv", ".parquet", ".arrow", ".jsonl", ".ndjson", ".xlsx", ".pdf", ".html", ".xml", ".pkl", ".pt", ".npy",
    ".zip", ".tar", ".tgz", ".7z", ".rar", ".lz4", ".lzma", ".br", ".z",
)  # fmt: skip
"""Endings that say how a content is written."""
_BEGINNINGS = {
    b"\x1f\x8b": ".gz",
    b"\x28\xb5\x2f\xfd": ".zst",
    b"BZh": ".bz2",
    b"\xfd7zXZ": ".xz",
    b"PK\x03\x04": ".zip",
}
_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True)
class SourceFile:
    """A file or an object that holds data.

    Attributes:
        name: Its path or URL, for errors.
        size: Bytes.
        modified: Seconds since 1970.
        store, key: The object's store and key; None and the path for a local file.
        place: The key of the job file that names it.
    """

    name: str
    size: int
    modified: float
    store: ObjectStore | None
    key: str
    place: str

    def read(self, start: int, end: int) -> bytes:
        """Reads bytes `[start, end)`. Raises DataError: unreadable; StoreError: no answer."""
        try:
            if self.store is not None:
                with _named(self.place):
                    return self.store.get(self.key, start, end)
            with open_file(Path(self.key), place=self.place) as file:
                file.seek(start)
                return file.read(end - start)
        except (OSError, NotFound) as error:
            reason = getattr(error, "strerror", None) or str(error)
            fault, fix = f"cannot read {self.name}: {reason}", "check that it exists and that you may read it"
            raise DataError(Problem(self.place, fault, fix)) from error

    def chunks(self) -> Iterator[bytes]:
        """Yields the content, at most 16 MiB at a time. Reports to `watching`. Raises DataError: it
        is missing or cannot be read; StoreError: the store does not answer."""
        for start in range(0, self.size, _CHUNK):
            chunk = self.read(start, min(self.size, start + _CHUNK))
            watched(len(chunk))
            yield chunk

    def contents(self) -> Iterator[bytes]:
        """Yields the content like `chunks`, decompressed if the name ends in one of `ENDINGS`.
        Raises DataError: as `chunks`; or it cannot be decompressed."""
        return decompressed(self.chunks(), self.name, self.place) if is_compressed(self.name) else self.chunks()

    @property
    def text_bytes(self) -> int:
        """About how many bytes `contents` has."""
        return self.size * _USUAL_RATIO if is_compressed(self.name) else self.size

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yields the number (from 1) and text of each line, without its line end. Raises DataError:
        it cannot be read, or a line is not UTF-8 or longer than `MOST_TEXT_BYTES`."""
        for number, line in enumerate(self._raw_lines(), start=1):
            if number == 1 and line.startswith(_POINTER):
                raise DataError(Problem(self.place, f"{self.name} is a pointer of Git LFS, not data", "git lfs pull"))
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                fault, fix = f"{self.name}:{number} is not UTF-8", "convert the file, for example with iconv"
                if number == 1 and (ending := next((_BEGINNINGS[b] for b in _BEGINNINGS if line.startswith(b)), "")):
                    fault, fix = f"{self.name} begins like a {ending} file", f"name it with {ending}, or unpack it"
                raise DataError(Problem(self.place, fault, fix)) from error

    def _raw_lines(self) -> Iterator[bytes]:
        begun, number = bytearray(), 1
        for chunk in self.contents():
            first, *others = chunk.split(b"\n")
            begun += first
            if len(begun) > MOST_TEXT_BYTES:
                raise too_long(self.place, f"{self.name}:{number}", "line")
            if others:
                yield bytes(begun)
                yield from others[:-1]
                begun, number = bytearray(others[-1]), number + len(others)
        if begun:
            yield bytes(begun)


@contextmanager
def watching(progress: Callable[[int], None]) -> Iterator[None]:
    """Calls `progress` with the number of bytes that this thread reads from source files."""
    before = _watch.set(progress)
    try:
        yield
    finally:
        _watch.reset(before)


@contextmanager
def counting_left_out() -> Iterator[list[str]]:
    """Yields a list that says in the end which files below folders `find_files` has left out."""
    words, left = list[str](), Counter[str]()
    before = _left.set(left)
    try:
        yield words
    finally:
        _left.reset(before)
    if left:
        kinds = ", ".join(f"{count:,} {visible(kind)}" for kind, count in left.most_common(_KINDS))
        more = ", …" if len(left) > _KINDS else ""
        words.append(f"{left.total():,} file{'s are' if left.total() > 1 else ' is'} not read: {kinds}{more}")


def _is_data(name: str, endings: tuple[str, ...]) -> bool:
    """Whether a file is read, by its path below the folder or the prefix. Counts others."""
    path = PurePosixPath(name.lower())
    if any(part.startswith((".", "__", "_temporary")) for part in path.parts):
        return False
    about = path.name in _ABOUT and (path.suffix == ".json" or len(path.parts) == 1)
    if path.name.endswith(endings) and not about:
        return True
    _leave_out(PurePosixPath(name).name if about else path.suffix or "without an ending")
    return False


def _leave_out(kind: str) -> None:
    _left.get(Counter()).update([kind])


def check_format(name: str, endings: tuple[str, ...], place: str) -> None:
    """Refuses a file that the path names, if its ending says that it is of another format."""
    ending = PurePosixPath(name.lower().removesuffix(_packed(name))).suffix
    if ending not in _FORMATS or name.lower().endswith(endings):
        return
    reader = next((kind.name for kind in SOURCES.usable() if ending in kind.endings), "")
    fix = f"set data.kind to {reader}" if reader else "unpack it; or write JSON lines, and set data.kind to jsonl"
    fault = f"{visible(name)} is {ending}, and this kind of data reads {_in_words(endings)}"
    raise DataError(Problem(place, fault, fix))


def watched(count: int) -> None:
    """Reports that bytes of a source file were read, for sources that read through a library."""
    _watch.get()(count)


def find_files(
    path: str, endings: tuple[str, ...], place: str = "data.path", *, compressed: bool = False
) -> list[SourceFile]:
    """Finds the files of a path, a directory or prefix (by ending), or a glob, sorted by name.
    `path`: local, or `scheme://place/key-or-prefix` of a store that holds data (`s3://bucket/…`).
    `compressed`: also those with an ending of `ENDINGS` after it. Raises DataError: no files, all
    empty, or too many; StoreError: the store does not answer or denies access."""
    if compressed:
        endings += tuple(ending + packed for ending in endings for packed in ENDINGS)
    files = _objects(path, endings, place) if keeps_data_elsewhere(path) else _local(path, endings, place)
    if not any(file.size for file in files):
        raise DataError(Problem(place, f"{path} is empty", "use files that contain data"))
    return files


def _local(path: str, endings: tuple[str, ...], place: str) -> list[SourceFile]:
    root = expand_home(path)
    wanted = ""
    paths: Iterable[str]
    if os.path.isdir(root):  # noqa: PTH112 - false where not allowed
        below = len(os.path.join(root, ""))  # noqa: PTH118
        paths = (file for file in files_below(root) if _is_data(file[below:], endings))
        wanted = f" with the ending {_in_words(endings)}"
    elif os.path.lexists(root):
        if kind := special_kind(root):
            raise DataError(Problem(place, f"{visible(root)} is {kind}", "use a regular file"))
        check_format(str(root), endings, place)
        paths = [str(root)]
    else:
        paths = matches(str(root))
    regular = (file for file in paths if _is_regular(file))
    chosen = set(islice(regular, MOST_FILES + 1))
    if len(chosen) > MOST_FILES:
        fault = f"{visible(path)} has more than {MOST_FILES:,} files"
        raise DataError(Problem(place, fault, "join them into fewer files"))
    files = []
    for file in sorted(set(map(Path, chosen))):
        with suppress(FileNotFoundError):  # it disappeared after it was found
            stat = file.stat()
            files.append(SourceFile(str(file), stat.st_size, stat.st_mtime, None, str(file), place))
    if not files:
        fault = f"no file{wanted} at {visible(path)} on this node"
        raise DataError(Problem(place, fault, "use a path that exists on every node"))
    return files


def _is_regular(path: str) -> bool:
    if not os.path.isfile(path) and os.path.islink(path):  # noqa: PTH113, PTH114 - false where not allowed
        _leave_out("broken link")
    return os.path.isfile(path)  # noqa: PTH113


def _objects(path: str, endings: tuple[str, ...], place: str) -> list[SourceFile]:
    scheme, _, rest = path.partition("://")
    root, _, name = rest.strip("/").partition("/")
    with _named(place):
        store = open_store(f"{scheme}://{root}")
        folder = f"{name}/" if name else ""
        wanted = (
            i for i in store.list(name)
            if i.key == name or (i.key.startswith(folder) and _is_data(i.key[len(folder) :], endings))
        )  # fmt: skip
        infos = sorted(islice(wanted, MOST_FILES + 1), key=lambda info: info.key)
    if len(infos) > MOST_FILES:
        raise DataError(Problem(place, f"{path} has more than {MOST_FILES:,} files", "join them into fewer files"))
    for info in infos:
        if info.key == name:
            check_format(name, endings, place)
    if not infos:
        fault = f"no object at {path}, nor below it with the ending {_in_words(endings)}"
        raise DataError(Problem(place, fault, "use the URL of an object, or of a prefix with objects below it"))
    return [SourceFile(f"{scheme}://{root}/{i.key}", i.size, i.modified, store, i.key, place) for i in infos]


def _in_words(endings: tuple[str, ...]) -> str:
    plain = " or ".join(ending for ending in endings if not is_compressed(ending))
    return plain + (f" (or those with {' or '.join(ENDINGS)})" if any(map(is_compressed, endings)) else "")


@contextmanager
def _named(place: str) -> Iterator[None]:
    """Makes errors of the store name the key of the job file."""
    try:
        yield
    except StoreError as error:
        problems = [replace(p, key=place, fault=f"{p.key}: {p.fault}" if p.key else p.fault) for p in error.problems]
        raise type(error)(problems) from error


def too_long(place: str, where: str, noun: str) -> DataError:
    """Returns the error for a line or a document, beginning at `file:line`, that is too long."""
    fault = f"{where}: the {noun} has more than {MOST_TEXT_BYTES:,} bytes"
    return DataError(Problem(place, fault, f"split it into several {noun}s"))


ENDINGS = (".gz", ".bz2", ".xz", ".zst")
_KINDS = 6
MOST_RATIO = 200
"""A file may become this many times as large, beyond the first 64 MiB."""
_FREE = 64 << 20
_PIECE = 4096  # of zstd, at most 128 MiB of text
_YIELDED = 1 << 20
_WINDOW = 128 << 20
_MOST_MEMORY = 512 << 20


def is_compressed(name: str) -> bool:
    """Whether a file's name says that it is compressed."""
    return bool(_packed(name))


def _packed(name: str) -> str:
    return next((ending for ending in ENDINGS if name.lower().endswith(ending)), "")


class _InBlocks:
    """A decoder of bz2 or xz, whose blocks may become very large at once."""

    def __init__(self, decoder: Any) -> None:
        self._decoder, self.unused_data = decoder, b""

    @property
    def eof(self) -> bool:
        return bool(self._decoder.eof)

    def decompress(self, piece: bytes) -> bytes:
        text: bytes = self._decoder.decompress(piece, _FREE)
        if not (self.eof or self._decoder.needs_input):
            raise ValueError(f"a piece of {len(piece):,} bytes becomes more than {_FREE >> 20} MiB")
        self.unused_data = self._decoder.unused_data
        return text


def decompressed(chunks: Iterator[bytes], name: str, place: str) -> Iterator[bytes]:
    """Yields the content of a compressed file: several members or frames follow each other. `name`:
    its name, which tells the format; for errors, too. Raises DataError: it is damaged, ends too
    early, becomes too large, or zstandard is not installed."""
    new, failure = _decoder(name, place)
    decoder: Any = None
    read = written = 0
    ready: list[bytes] = []
    size = 0
    try:
        for chunk in chunks:
            for start in range(0, len(chunk), _PIECE):
                piece = chunk[start : start + _PIECE]
                read += len(piece)
                while piece:
                    if decoder is None:
                        piece = piece.lstrip(b"\0")  # padding between members
                        if not piece:
                            break
                        decoder = new()
                    text = decoder.decompress(piece)
                    written, size = written + len(text), size + len(text)
                    if written > _FREE + MOST_RATIO * read:
                        fault = f"{name} becomes more than {MOST_RATIO} times as large"
                        raise DataError(Problem(place, fault, "decompress it, if it is what you expect"))
                    ready.append(text)
                    piece = b""
                    if decoder.eof:
                        piece, decoder = decoder.unused_data, None
                if size >= _YIELDED:
                    yield b"".join(ready)
                    ready, size = [], 0
    except (failure, ValueError, MemoryError) as error:
        fault = f"{name} cannot be decompressed: {visible(error)}"
        raise DataError(Problem(place, fault, "copy it again, or check that its ending is right")) from error
    if decoder is not None:
        raise DataError(Problem(place, f"{name} ends too early", "copy it again: a part is missing"))
    if ready:
        yield b"".join(ready)


def _decoder(name: str, place: str) -> tuple[Callable[[], Any], type[Exception]]:
    """Returns what makes a decoder of one member, and the error that it raises."""
    if _packed(name) == ".gz":
        return lambda: zlib.decompressobj(wbits=31), zlib.error
    if _packed(name) == ".bz2":
        return lambda: _InBlocks(bz2.BZ2Decompressor()), OSError
    if _packed(name) == ".xz":
        return lambda: _InBlocks(lzma.LZMADecompressor(lzma.FORMAT_XZ, _MOST_MEMORY)), lzma.LZMAError
    try:
        import zstandard
    except ImportError as error:
        fault = f"{name}: zstandard is not installed, so .zst cannot be read"
        raise DataError(Problem(place, fault, "pip install zstandard on every node, or use .gz")) from error
    return lambda: zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj(), zstandard.ZstdError
