"""The tokenizer's files of an export, as transformers' `AutoTokenizer` reads them. Without torch.
The `bytes` tokenizer is written as a tokenizer.json with the same ids. A tokenizer.json is copied
with the files beside it, chat template included."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raypp.errors import DataError, JobError, Problem
from raypp.job.job import AddedToken
from raypp.job.models import DecoderOptions
from raypp.job.small_files import SAVED_BESIDE, TEMPLATES
from raypp.job.tokenizer_file import BOUNDS, TOKENIZER, read_tokenizer, tokenizer_path, vocabulary
from raypp.rank.data.chat_files import learnt_ends
from raypp.rank.data.tokenizer import END_NAMES, ByteTokenizer, added_in, open_tokenizer, with_added_tokens
from raypp.state.hf.model_files import GENERATION
from raypp.state.hf.original import (
    default_generation,
    model_context,
    original_ends,
    original_generation,
    section_of,
    trained_length,
)
from raypp.untrusted.documents import Bounds, parse_object
from raypp.untrusted.files import read_file
from raypp.untrusted.text import visible

OPTION = "--tokenizer"
CONFIG = "tokenizer_config.json"
_TEMPLATE, _TEMPLATE_BYTES = "chat_template.jinja", 1 << 20
_MOST_TEMPLATES = 100
_GENERATION_BOUNDS = Bounds(size=1 << 20)
_END = END_NAMES[0]


@dataclass(frozen=True)
class TokenizerFiles:
    """What an export writes for the tokenizer. `files`: content by key. `ids`: arguments of
    `config_from_options`: the ids that end and begin a text, and of the padding, if known."""

    files: dict[str, bytes] = field(default_factory=dict)
    ids: dict[str, int | None] = field(default_factory=lambda: {"eos_id": None})
    remarks: list[str] = field(default_factory=list)


def tokenizer_files(
    job: Mapping[str, Any], asked: str | None, options: DecoderOptions, *, generation: bool = True
) -> TokenizerFiles:
    """Returns the files of a run's tokenizer, or of the one that was asked for. `job`: the run's
    job, for its tokenizer and its chat template. `asked`: another tokenizer, `bytes` or the path of
    a tokenizer.json: what prevents its export is an error. None: the run's, for which it is a
    remark. `generation`: whether to write generation_config.json, which belongs to a whole model.
    Raises DataError: `asked`, and the file is missing or is not a tokenizer.json; JobError:
    `asked`, and the tokenizer has ids that the model does not have."""
    fix = f"name one with {OPTION} FILE"
    original = options if generation and options.original is not None else None
    alone = {} if original is None else _original_files(original, None)
    data = section_of(job, "data")
    named, template = data.get("tokenizer") if asked is None else asked, data.get("chat_template")
    if named is None:
        return TokenizerFiles(alone, remarks=[f"the run names no tokenizer, so none was exported; {fix}"])
    name = str(named)
    path, added = tokenizer_path(name), added_in(data) if asked is None else []
    try:
        content = bytes_tokenizer() if name == "bytes" else read_tokenizer(path)
        if added:
            content = with_added_tokens(content, path, added)
        ids = vocabulary(content, path)
    except DataError as error:
        if asked is not None:
            raise DataError(Problem(OPTION, problem.fault, problem.fix) for problem in error.problems) from error
        why = "; ".join(problem.fault for problem in error.problems)
        remark = f"the tokenizer was not exported: {visible(name)} cannot be read ({why}); {fix}"
        return TokenizerFiles(alone, remarks=[remark])
    turns = _turn_ends(data, name if name == "bytes" else str(path), added)
    count, end = 1 + max(ids.values(), default=-1), _end_of(name, ids, added)
    if count > options.vocab_size and (end is None or ids[end] >= options.vocab_size):
        fault = f"it has {count} ids, but the model has only {options.vocab_size}"
        if asked is not None:
            raise JobError(Problem(OPTION, f"{name} does not fit: {fault}", "name the tokenizer of the run's data"))
        return TokenizerFiles(alone, remarks=[f"the {visible(name)} tokenizer was not exported: {fault}"])
    files = {TOKENIZER: content} | (_beside(path.parent) if path.name == TOKENIZER else {})
    if CONFIG not in files:
        files[CONFIG] = _json(_config(end, model_context(options, trained_length(job)), plain=name == "bytes"))
    files[CONFIG] = _with_decoder(files[CONFIG], ids, added)
    eos_id = None if end is None else ids[end]
    remarks: list[str] = []
    if template is not None:
        try:
            files[_TEMPLATE] = read_file(Path(str(template)), _TEMPLATE_BYTES)
        except DataError as error:
            remarks.append(f"the chat template was not exported: {visible(error.problems[0])}")
    if original is not None:
        files |= _original_files(original, eos_id, turns)
    elif generation and eos_id is not None:
        theirs: dict[str, Any] = {}
        if path.name == TOKENIZER:
            theirs, more = _their_generation(path.parent / GENERATION)
            remarks += more
        files[GENERATION] = _json({"pad_token_id": eos_id, **theirs, "eos_token_id": _ends_with(theirs, eos_id, turns)})
    elif not generation and (missing := set(turns) - set(original_ends(options))):
        names = ", ".join(visible(word) for word, one in ids.items() if one in missing)
        remarks.append(f"turns end with {names}, which is no end of the base: set eos_token_id to it to generate")
    others = _special_ids(files[CONFIG], ids)
    return TokenizerFiles(files, {**others, "eos_id": eos_id}, remarks)


def _special_ids(config: bytes, ids: Mapping[str, int]) -> dict[str, int | None]:
    """Returns the ids before a text and of the padding that tokenizer_config.json names."""
    named_config, named = dict[str, Any](), {}
    with suppress(DataError):
        named_config = parse_object(config, CONFIG, BOUNDS, DataError)
    for name in ("bos", "pad"):
        token = named_config.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        named[f"{name}_id"] = ids.get(token) if isinstance(token, str) else None
    return named


def _with_decoder(config: bytes, ids: Mapping[str, int], added: Sequence[AddedToken]) -> bytes:
    """Returns a tokenizer_config.json that lists the added tokens, too, if it lists any: then
    transformers takes those of no other file."""
    document: dict[str, Any] = {}
    with suppress(DataError):
        document = parse_object(config, CONFIG, BOUNDS, DataError)
    listed = document.get("added_tokens_decoder")
    if not added or not isinstance(listed, dict):
        return config
    for one in added:
        token = {"content": one.text, "normalized": not one.special, "special": one.special}
        listed.setdefault(str(ids[one.text]), {**token, "lstrip": False, "rstrip": False, "single_word": False})
    return _json(document)


def _turn_ends(data: Mapping[str, Any], name: str, added: Sequence[AddedToken]) -> tuple[int, ...]:
    """Returns the ids that end the turns that the run has learnt."""
    with suppress(DataError):
        return learnt_ends({**data, "tokenizer": name}, open_tokenizer(name, added=added))
    return ()


def _original_files(model: DecoderOptions, eos_id: int | None, turns: tuple[int, ...] = ()) -> dict[str, bytes]:
    """Returns the original's generation_config.json, with the ends of the run's texts and turns."""
    assert model.original is not None
    text = model.original.generation_config
    if eos_id is None or {eos_id, *turns} <= set(original_ends(model)):
        return {} if text is None else {GENERATION: text.encode()}
    theirs = original_generation(model) or default_generation(model)
    return {GENERATION: _json({**theirs, "eos_token_id": _ends_with(theirs, eos_id, turns)})}


def _end_of(name: str, ids: Mapping[str, int], added: Sequence[AddedToken]) -> str | None:
    """Returns the token that ends texts, if it is one of the tokenizer.json."""
    try:
        end = open_tokenizer(name, added=added).eos_id
    except DataError:
        return next((word for word in END_NAMES if word in ids), None)
    return next((word for word, one in ids.items() if one == end), None)


def bytes_tokenizer() -> bytes:
    """Returns a tokenizer.json with the ids of `ByteTokenizer`, in both directions."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    added = {"id": ByteTokenizer.eos_id, "content": _END, "normalized": False, "special": True}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**added, "single_word": False, "lstrip": False, "rstrip": False}],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {name: byte for byte, name in enumerate(_byte_names())}, "merges": []},
    }
    return _json(document)


def _byte_names() -> list[str]:
    """Returns the character that stands for each byte in vocabularies of byte-level BPE. Printable
    characters of Latin-1 stand for themselves, the others for those from U+0100 on."""
    others = iter(range(0x100, 0x200))
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _config(end: str | None, context: int, *, plain: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    if end is not None:
        config |= {"eos_token": end, "pad_token": end}
    if plain:
        config["split_special_tokens"] = True  # a text that contains the name of the end token has its bytes
    return config


def _beside(folder: Path) -> dict[str, bytes]:
    names = [name for name in SAVED_BESIDE if (folder / name).is_file()]
    templates = sorted(path.name for path in (folder / TEMPLATES).glob("*.jinja"))
    if len(templates) > _MOST_TEMPLATES:
        raise DataError(Problem(str(folder / TEMPLATES), f"has more than {_MOST_TEMPLATES} templates"))
    names += [f"{TEMPLATES}/{name}" for name in templates]
    return {name: read_file(folder / name, BOUNDS.size) for name in names}


def _their_generation(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns the source's generation_config.json, and a remark if it cannot be used."""
    if not path.is_file():
        return {}, []
    try:
        return parse_object(read_file(path, _GENERATION_BOUNDS.size), str(path), _GENERATION_BOUNDS, DataError), []
    except DataError as error:
        return {}, [f"{GENERATION} was not copied but generated: {visible(error.problems[0])}"]


def _ends_with(generation: Mapping[str, Any], eos_id: int, turns: tuple[int, ...]) -> int | list[int]:
    """Returns the ends of a generation config, with `eos_id` and the ends of turns."""
    ends = generation.get("eos_token_id")
    ends = list(dict.fromkeys([*(ends if isinstance(ends, list) else [] if ends is None else [ends]), eos_id, *turns]))
    return ends[0] if len(ends) == 1 else ends


def _json(document: Any) -> bytes:
    return json.dumps(document, indent=2).encode()
