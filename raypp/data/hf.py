"""Hugging Face datasets: parquet and arrow files, read a few rows at a time."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from pathlib import PurePosixPath

from raypp.data.arrow_files import columns_of, rows_of
from raypp.data.chat_files import row_encoder
from raypp.data.conversations import READ, Names, kind_of, shape_of, without_nulls
from raypp.data.corpus import Corpus
from raypp.data.faults import RowFault
from raypp.data.source_files import MOST_TEXT_BYTES, SourceFile, find_files, too_long
from raypp.data.tokenised import Record, Request, Text, tokenise
from raypp.errors import DataError, Problem, in_words
from raypp.kinds import SourceKind
from raypp.spec.job import DataSection
from raypp.spec.paths import is_glob, is_hub_name
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
    """Reads one column of text, or the columns of conversations, of all rows of a split.

    Rows whose text is empty or null are skipped, as blank lines of other kinds are; so are files
    whose column of text is null in all rows.

    Raises:
        DataError: No such dataset, split, configuration or column; a damaged file; pyarrow is not
            installed; or the hub does not answer.
    """
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
        request, files, lambda: (row for file in files for row in _records(file, sorted(columns), needed)), encoder
    )


def _is_text(key: str, shape: Sequence[str] | None, there: Mapping[str, bool | None], request: Request) -> bool:
    """Whether the rows are the texts of a column.

    Raises:
        DataError: They may as well be conversations, or options of conversations are set.
    """
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
    if columns_of(file).get(key, False) is None:
        log.warning("%s: skips %s, whose column %r is null in all rows", file.place, file.name, key)
        return
    for number, row in enumerate(rows_of(file, [key])):
        text = row[key]
        if not text:
            continue
        place = f"{file.name}[{number}]"
        if not isinstance(text, str):
            fault = RowFault(f"{key!r} is {kind_of(text)}, not a text", "write all files with the same columns")
            yield Record(place, fault)
            continue
        if len(text) > MOST_TEXT_BYTES:
            raise too_long(file.place, place, "text")
        yield Text(place, text)


def _records(file: SourceFile, columns: Sequence[str], needed: Sequence[str]) -> Iterator[Record]:
    """Yields the rows of a file with the columns that it has, and those that all files need."""
    there = columns_of(file)
    if all(there.get(name, False) is None for name in needed):
        log.warning("%s: skips %s, where %s are null in all rows", file.place, file.name, " and ".join(needed))
        return
    mine = sorted({*needed, *(set(columns) & set(there))})
    unused = frozenset(set(there) - set(mine))
    for number, row in enumerate(rows_of(file, mine)):
        present = without_nulls(row)
        fault = RowFault("all its columns are null", "remove the row")
        yield Record(f"{file.name}[{number}]", present or fault, unused)


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
    """Returns the files of a split; if no name has a split, those of `train` are all.

    Returns none if there are none, or if the word is in the names of several splits.
    """
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
    """Returns the splits that a file belongs to."""
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
    """Returns the folder to which Hugging Face's library downloads a dataset of the hub.

    If the hub does not answer within `_PATIENCE_S`, it is what was downloaded earlier.
    """
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
        reason = visible(in_words(silent or error).splitlines()[0][:300])
        cached = ", and it is not among what was downloaded earlier" if silent is not None else ""
        fault = f"{here}, and the hub does not provide it: {reason}{cached}"
        raise DataError(Problem(request.place, fault, fix)) from error
    if silent is not None:
        log.warning("%s: the hub does not answer; reading what was downloaded of %s earlier", request.place, name)
    return folder


def _listed(names: Sequence[str] | Mapping[str, bool | None]) -> str:
    shown = ", ".join(visible(name[:60]) for name in list(names)[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
