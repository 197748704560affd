"""Decompresses .gz and .zst files piece by piece, within limits."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

from raypp.errors import DataError, Problem
from raypp.untrusted.text import visible

ENDINGS = (".gz", ".zst")
MOST_RATIO = 200
"""A file may become this many times as large, beyond the first 64 MiB."""
_FREE = 64 << 20
_PIECE = 4096  # of zstd, at most 128 MiB of text
_YIELDED = 1 << 20
_WINDOW = 128 << 20


def is_compressed(name: str) -> bool:
    """Whether a file's name says that it is compressed."""
    return name.lower().endswith(ENDINGS)


def decompressed(chunks: Iterator[bytes], name: str, place: str) -> Iterator[bytes]:
    """Yields the content of a compressed file: several members or frames follow each other.

    Args:
        chunks: The file.
        name: Its name, which tells the format; for errors, too.
        place: The key of the job file that names it.

    Raises:
        DataError: It is damaged, ends too early, becomes too large, or zstandard is not installed.
    """
    new = _decoder(name, place)
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
                        what = f"{name} becomes more than {MOST_RATIO} times as large"
                        raise DataError(Problem(place, what, "decompress it, if it is what you expect"))
                    ready.append(text)
                    piece = b""
                    if decoder.eof:
                        piece, decoder = decoder.unused_data, None
                if size >= _YIELDED:
                    yield b"".join(ready)
                    ready, size = [], 0
    except (zlib.error, ValueError, MemoryError, _zstd_error()) as error:
        what = f"{name} cannot be decompressed: {visible(error)}"
        raise DataError(Problem(place, what, "copy it again, or check that its ending is right")) from error
    if decoder is not None:
        raise DataError(Problem(place, f"{name} ends too early", "copy it again: a part is missing"))
    if ready:
        yield b"".join(ready)


def _decoder(name: str, place: str) -> Callable[[], Any]:
    if name.lower().endswith(".gz"):
        return lambda: zlib.decompressobj(wbits=31)
    try:
        import zstandard
    except ImportError as error:
        what = f"{name}: zstandard is not installed, so .zst cannot be read"
        raise DataError(Problem(place, what, "pip install zstandard on every node, or use .gz")) from error
    return lambda: zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj()


def _zstd_error() -> type[Exception]:
    try:
        import zstandard
    except ImportError:
        return zlib.error
    return zstandard.ZstdError
