"""Hugging Face datasets: parquet and arrow files, read a few rows at a time."""

import io
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from pathlib import Path, PurePosixPath
from typing import Any

from raypp.errors import DataError, Problem, RayppError, in_words
from raypp.job.job import DataSection
from raypp.job.paths import is_glob, is_hub_name
from raypp.kinds import SourceKind
from raypp.rank.data.chat_files import row_encoder
from raypp.rank.data.conversations import READ, Names, kind_of, shape_of, without_nulls
from raypp.rank.data.corpus import Corpus
from raypp.rank.data.faults import RowFault, Skipped
from raypp.rank.data.source_files import MOST_TEXT_BYTES, SourceFile, find_files, too_long, watched
from raypp.rank.data.tokenised import Record, Request, Text, tokenise
from raypp.untrusted.files import open_file
from raypp.untrusted.text import visible

KIND = SourceKind(
    "hf",
    "a Hugging Face dataset: parquet or arrow files, or org/name on the hub",
    position=4,
    endings=(".parquet", ".arrow"),
    keys=("text_key", "columns", "roles", "split", "config", "chat_template", "template_date", "loss"),
    hub=True,
    first_rows=True,
)

_KNOWN_SPLITS = {"train", "test", "validation", "valid", "val", "dev", "eval"}
_SHARD = re.compile(r"(?:.*[^\w.])?([\w.]+)-\d{5}-of-\d{5}")
"""The name of a shard on the hub or of `save_to_disk`, with its split."""
log = logging.getLogger(__name__)
_SHOWN = 12
_PATIENCE_S = 20.0
"""Seconds that the hub may take to list a dataset's files."""


def read(request: Request) -> Corpus:
    """Reads one column of text, or the columns of conversations, of all rows of a split. Rows whose
    text is empty or null are skipped, and counted. Raises DataError: no such dataset, split,
    configuration or column; a damaged file; no pyarrow; or the hub does not answer."""
    path = _downloaded(request) if is_hub_name(request.path) else request.path
    files = _chosen(find_files(path, KIND.endings, request.place), path, request)
    there, names = columns_of(files[0]), Names.of(request.data)
    key = names.columns.get("text", request.data.text_key)
    shape = shape_of(dict.fromkeys(there, True), names)
    if _is_text(key, shape, there, request):
        if there[key] is False:
            fault = f"{files[0].name}: the column {key!r} holds no text"
            texts = [name for name, text in there.items() if text]
            fix = f"set data.text_key to one of {_listed(texts)}" if texts else "use other files"
            raise DataError(Problem(request.place, fault, fix))
        return tokenise(request, files, lambda: (text for file in files for text in _texts(file, key)))
    if shape is None:
        fault = f"{files[0].name} has no column {key!r}, but {_listed(there)}"
        fix = "set data.text_key to the column that holds the text, or data.columns to those of a conversation"
        raise DataError(Problem(request.place, fault, fix))
    columns = {names.columns.get(one, one) for one in READ} & set(there)
    needed = [names.columns.get(one, one) for one in shape]
    encoder = row_encoder(request, lambda: next((row for file in files for row in rows_of(file, needed)), None))
    return tokenise(
        request,
        files,
        lambda: (row for file in files for row in _records(file, sorted(columns), needed, names)),
        encoder,
    )


def _is_text(key: str, shape: Sequence[str] | None, there: Mapping[str, bool | None], request: Request) -> bool:
    """Whether the rows are the texts of a column."""
    data = request.data
    if key not in there or shape == ("text",) or shape is None:
        text = key in there
    elif any(one in data.columns for one in shape):
        text = False
    elif data.text_key == DataSection.model_fields["text_key"].default:  # perhaps nobody chose it
        if data.chat_template is None and data.loss == "assistant" and not data.roles:
            fault = f"the data have a column {key!r}, and {' and '.join(shape)}: either could be trained on"
            fix = f"write data.columns: {{{shape[0]}: {shape[0]}}} for conversations, or {{text: {key}}} for the text"
            raise DataError(Problem(request.place, fault, fix))
        text = False
    else:
        text = True
    if text and (data.loss != "assistant" or data.chat_template is not None or data.roles):
        option = "chat_template" if data.chat_template is not None else "roles" if data.roles else "loss"
        fault = f"has no effect: the data are the texts of the column {key!r}"
        raise DataError(Problem(f"data.{option}", fault, "remove it, or name the conversations in data.columns"))
    return text


def _texts(file: SourceFile, key: str) -> Iterator[Text | Record]:
    unused = columns_of(file).keys() - {key}
    for number, row in enumerate(rows_of(file, [key])):
        text, place = row[key], f"{file.name}[{number}]"
        if not text:
            yield Record(place, Skipped(f"{key!r} is {'null' if text is None else 'empty'}", ""))
            continue
        if not isinstance(text, str):
            fault = RowFault(f"{key!r} is {kind_of(text)}, not a text", "write all files with the same columns")
            yield Record(place, fault)
            continue
        if len(text) > MOST_TEXT_BYTES:
            raise too_long(file.place, place, "text")
        yield Text(place, text, unused)


def _records(file: SourceFile, columns: Sequence[str], needed: Sequence[str], names: Names) -> Iterator[Record]:
    """Yields the rows of a file with the columns that it has, and those that all files need."""
    there = columns_of(file)
    nothing = all(there.get(name, False) is None for name in needed)
    mine = sorted({*needed, *(set(columns) & set(there))})
    unused = frozenset(set(there) - set(mine))
    for number, row in enumerate(rows_of(file, mine)):
        present = without_nulls(row, names) or RowFault("all its columns are null", "remove the row")
        if nothing:
            present = Skipped(f"{' and '.join(needed)} are null in all rows", "")
        yield Record(f"{file.name}[{number}]", present, unused)


def _chosen(files: Sequence[SourceFile], path: str, request: Request) -> list[SourceFile]:
    """Returns the files of the configuration and the split that the job asks for."""
    data = request.data
    usual = [file for file in files if not PurePosixPath(file.key).name.startswith("cache-")] or list(files)
    names = {file.name: PurePosixPath(file.name[len(path.rstrip("/")) :].lstrip("/")) for file in usual}
    if len(usual) == 1 and (is_glob(path) or not names[usual[0].name].name):
        return usual  # the path names the file
    if data.config is not None:
        chosen = [file for file in usual if data.config in names[file.name].parts[:-1]]
        if not chosen:
            there = sorted({names[file.name].parts[0] for file in usual if len(names[file.name].parts) > 1})
            fault = f"{path} has no configuration (folder) {data.config!r}"
            fix = f"set data.config to one of {_listed(there)}" if there else "leave out data.config"
            raise DataError(Problem(request.place, fault, fix))
        usual = chosen
    mine = _of_split(usual, names, data.split.lower())
    if not mine:
        splits = set().union(*(_splits(names[file.name]) for file in usual))
        known = {split for split in splits if _words(split) & _KNOWN_SPLITS} or splits
        fault = f"{path} has no split {data.split!r}"
        fix = f"set data.split to one of {_listed(sorted(known))}" if known else "leave out data.split"
        if len(usual) == 1:
            fix += ", or name the file itself"
        raise DataError(Problem(request.place, fault, fix))
    folders = {names[file.name].parts[0] for file in mine if len(names[file.name].parts) > 1}
    configs = folders - {"data", data.split.lower()}
    if data.config is None and len(configs) > 1:
        fault = f"{path} has several configurations (folders)"
        raise DataError(Problem(request.place, fault, f"set data.config to one of {_listed(sorted(configs))}"))
    return mine


def _of_split(files: list[SourceFile], names: Mapping[str, PurePosixPath], split: str) -> list[SourceFile]:
    """Returns the files of a split; if no name has a split, those of `train` are all. Returns none
    if there are none, or if the word is in the names of several splits."""
    there = [names[file.name] for file in files]
    exact = [split in _splits(name) or split in str(name.parent).lower().split("/") for name in there]
    if any(exact):
        return list(compress(files, exact))
    words = [_words(str(name)) for name in there]
    if split == "train" and not any(splits & _KNOWN_SPLITS for splits in words):
        return files
    loose = [split in splits for splits in words]
    return list(compress(files, loose)) if len({_shard_split(name) for name in compress(there, loose)}) == 1 else []


def _splits(name: PurePosixPath) -> set[str]:
    split = _shard_split(name)
    return {split} if split is not None else _words(str(name)) & _KNOWN_SPLITS


def _shard_split(name: PurePosixPath) -> str | None:
    """Returns the split in the name of a shard, or of its folder if the file is `data`."""
    match = _SHARD.match(name.name.lower())
    split = name.parent.name.lower() if match is not None and match[1] == "data" else match and match[1]
    return split if split and split != "data" else None


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", name.lower()))


def _downloaded(request: Request) -> str:
    """Returns the folder to which Hugging Face's library downloads a dataset of the hub. If the hub
    does not answer within `_PATIENCE_S`, it is what was downloaded earlier."""
    name = request.path
    fix = (
        f"where there is a network, run `hf download --repo-type dataset {name} --local-dir DIR`, "
        "copy DIR here or to a store, and use its path"
    )
    here = f"{name} is not a folder on this node"
    try:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        fault = f"{here}, and huggingface_hub, which would download it, is not installed"
        raise DataError(Problem(request.place, fault, f"pip install 'raypp[hf]'; or {fix}")) from None
    silent: Exception | None = None
    try:
        try:  # snapshot_download itself would wait for an answer without end
            HfApi().dataset_info(name, timeout=_PATIENCE_S)
        except HfHubHTTPError:
            raise
        except Exception as error:  # noqa: BLE001  its errors are those of several HTTP libraries
            silent = error
        patterns = [f"*{ending}" for ending in KIND.endings]
        folder = snapshot_download(
            name, repo_type="dataset", allow_patterns=patterns, local_files_only=silent is not None
        )
    except Exception as error:
        reason = visible(in_words(silent or error).splitlines()[0][:_LONGEST_REASON])
        cached = ", and it is not among what was downloaded earlier" if silent is not None else ""
        fault = f"{here}, and the hub does not provide it: {reason}{cached}"
        raise DataError(Problem(request.place, fault, fix)) from error
    if silent is not None:
        log.warning("%s: the hub does not answer; reading what was downloaded of %s earlier", request.place, name)
    return folder


def _listed(names: Sequence[str] | Mapping[str, bool | None]) -> str:
    shown = ", ".join(visible(name[:60]) for name in list(names)[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


MOST_COLUMNS = 10_000
_BATCH, _ROWS = 1024, 64
_BUFFER = 1 << 20
_MOST_METADATA = 64 << 20
_MOST_ITEMS = 1_000_000
_LONGEST_REASON = 300


def columns_of(file: SourceFile) -> dict[str, bool | None]:
    """Returns the columns of a file, and whether each holds text; None: all its values are null.
    Raises DataError: pyarrow is not installed, or the file is damaged."""
    pa = _pyarrow(file)
    with _damage_named(file), _opened(file, pa) as source:
        schema = _parquet(source, []).schema_arrow if _is_parquet(file) else _arrow_reader(source, pa).schema
        if len(schema) > MOST_COLUMNS:
            raise DataError(Problem(file.place, f"{file.name} has {len(schema):,} columns", "keep only the text"))
        return {field.name: _holds_text(field.type, pa) for field in schema}


def rows_of(file: SourceFile, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields some columns of all rows. Holds about a thousand rows in memory. Raises DataError:
    pyarrow is not installed, a column is missing, or the file is damaged."""
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


def _holds_text(kind: Any, pa: Any) -> bool | None:
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
        fault = f"{file.name} cannot be read as {kind}: {visible(in_words(error)[:_LONGEST_REASON])}"
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
