"""Reads the rows of parquet and arrow files, local or in a store, a few at a time, by pyarrow."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raypp.data.source_files import SourceFile, watched
from raypp.errors import DataError, Problem, RayppError, in_words
from raypp.untrusted.files import open_file
from raypp.untrusted.text import visible

MOST_COLUMNS = 10_000
_BATCH, _ROWS = 1024, 64
_BUFFER = 1 << 20
_MOST_METADATA = 64 << 20
_MOST_ITEMS = 1_000_000
_SHOWN = 300


def columns_of(file: SourceFile) -> dict[str, bool | None]:
    """Returns the columns of a file, and whether each holds text; None: all its values are null.

    Raises:
        DataError: pyarrow is not installed, or the file is damaged.
    """
    pa = _pyarrow(file)
    with _damage_named(file), _opened(file, pa) as source:
        schema = _parquet(source, []).schema_arrow if _is_parquet(file) else _arrow_reader(source, pa).schema
        if len(schema) > MOST_COLUMNS:
            raise DataError(Problem(file.place, f"{file.name} has {len(schema):,} columns", "keep only the text"))
        return {field.name: _is_text(field.type, pa) for field in schema}


def rows_of(file: SourceFile, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields some columns of all rows. Holds about a thousand rows in memory.

    Raises:
        DataError: pyarrow is not installed, a column is missing, or the file is damaged.
    """
    pa = _pyarrow(file)
    there = columns_of(file)
    missing = [name for name in columns if name not in there]
    if missing:
        fault = f"{file.name} has no column {', '.join(map(repr, missing))}, which the first file has"
        raise DataError(Problem(file.place, fault, "write all files with the same columns"))
    with _damage_named(file), _opened(file, pa) as source:
        text = [name for name in columns if there[name]]
        for batch in _parquet_batches(source, columns, text, file) if _is_parquet(file) else _arrow_batches(source, pa):
            for start in range(0, batch.num_rows, _ROWS):
                yield from batch.slice(start, _ROWS).select(list(columns)).to_pylist()
        if not _is_parquet(file):
            watched(file.size)


def _parquet_batches(source: Any, columns: Sequence[str], text: Sequence[str], file: SourceFile) -> Iterator[Any]:
    parquet = _parquet(source, text)
    groups = parquet.metadata.num_row_groups
    for group in range(groups):
        yield from parquet.iter_batches(batch_size=_BATCH, row_groups=[group], columns=list(columns), use_threads=False)
        watched(file.size * (group + 1) // groups - file.size * group // groups)


def _parquet(source: Any, text: Sequence[str]) -> Any:
    """Opens parquet. Texts that repeat stay one text in memory, however many rows repeat it."""
    from pyarrow.parquet import ParquetFile

    return ParquetFile(
        source,
        read_dictionary=list(text),
        pre_buffer=False,
        thrift_string_size_limit=_MOST_METADATA,
        thrift_container_size_limit=_MOST_ITEMS,
    )


def _arrow_batches(source: Any, pa: Any) -> Iterator[Any]:
    reader = _arrow_reader(source, pa)
    if hasattr(reader, "num_record_batches"):
        batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
    else:
        batches = iter(reader)
    for batch in batches:
        batch.validate(full=True)  # offsets may lead anywhere
        yield batch


def _arrow_reader(source: Any, pa: Any) -> Any:
    """Opens a file of the IPC format, or of its streams, as `datasets` writes them."""
    magic = source.read(6)
    source.seek(0)
    return pa.ipc.open_file(source) if magic == b"ARROW1" else pa.ipc.open_stream(source)


def _is_parquet(file: SourceFile) -> bool:
    return file.name.lower().endswith(".parquet")


def _is_text(kind: Any, pa: Any) -> bool | None:
    if pa.types.is_null(kind):
        return None
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


@contextmanager
def _opened(file: SourceFile, pa: Any) -> Iterator[Any]:
    if file.store is None:
        open_file(Path(file.key), place=file.place).close()  # no FIFO, and it may be read
        source = pa.memory_map(file.key) if file.size else pa.BufferReader(b"")
    else:
        source = pa.PythonFile(io.BufferedReader(_Ranges(file), _BUFFER), mode="r")
    with source:
        yield source


@contextmanager
def _damage_named(file: SourceFile) -> Iterator[None]:
    try:
        yield
    except RayppError:
        raise
    except Exception as error:  # pyarrow raises many types, of its own and of Python
        if isinstance(error.__context__, RayppError):  # of a store, raised inside pyarrow
            raise error.__context__ from None
        kind = "parquet" if _is_parquet(file) else "arrow"
        fault = f"{file.name} cannot be read as {kind}: {visible(in_words(error)[:_SHOWN])}"
        raise DataError(Problem(file.place, fault, "copy the file again, or write it again")) from error


class _Ranges(io.RawIOBase):
    """An object in a store as a file, read by ranges."""

    def __init__(self, file: SourceFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._file.size)
        if end <= self._at:
            return 0
        data = self._file.read(self._at, end)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _pyarrow(file: SourceFile) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        fault = f"{file.name} is read by pyarrow, which is not installed"
        raise DataError(Problem("data.kind", fault, "pip install 'raypp[hf]' on every node")) from None
    return pyarrow
