"""Reads a `tokenizer.json` of Hugging Face's tokenizers, and who its special tokens are."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NotRequired

from annotated_types import Ge, Lt
from typing_extensions import TypedDict

from raypp.errors import DataError, Problem
from raypp.job.small_files import here
from raypp.untrusted.documents import Bounds, parse_as, parse_object
from raypp.untrusted.files import expand_home, read_file
from raypp.untrusted.text import visible

BOUNDS = Bounds(size=256 << 20, values=4_000_000)
"""Limits of the file. One with 260,000 tokens has 35 MB and 2 million values."""
TOKENIZER, _CONFIG, _MAP = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
OTHER_FORMATS = (
    "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json", "tiktoken.model", "qwen.tiktoken", "added_tokens.json", _CONFIG, _MAP,
)  # fmt: skip
"""Files of tokenizers that raypp does not read without a tokenizer.json."""
MAKE_ONE = "write one with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
_OF_MODEL = ("generation_config.json", "config.json")
BESIDE = (_CONFIG, _MAP, *_OF_MODEL)
"""The files that name special tokens."""
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""What a special token may be for, in the order in which transformers adds them."""
_CONFIG_BOUNDS = Bounds(size=16 << 20, values=2_000_000)
_MOST_IDS = 1000
_KEY = "data.tokenizer"
_FIX = "name a tokenizer.json of the tokenizers library, or use `tokenizer: bytes`"

Id = Annotated[int, Ge(0), Lt(2**32)]


class _Added(TypedDict):
    id: Id
    content: str


class _Model(TypedDict):
    vocab: NotRequired[dict[str, Id] | list[tuple[str, Any]]]


class _File(TypedDict):
    model: _Model
    added_tokens: NotRequired[list[_Added] | None]


def tokenizer_path(name: str) -> Path:
    """Returns the file that `data.tokenizer` names: it, or the tokenizer.json of a folder."""
    path = expand_home(name)
    return here(path / TOKENIZER if os.path.isdir(path) else path)  # noqa: PTH112 - raises for no name


def read_tokenizer(path: Path) -> bytes:
    """Reads `data.tokenizer`'s file. Raises DataError: it is missing, irregular or too large."""
    return read_file(path, BOUNDS.size, DataError, _KEY)


@dataclass(frozen=True)
class SpecialTokens:
    """What the files beside a tokenizer.json say about its special tokens. `names`: the text of the
    token for each of `ROLES` that has one. `others`: further special tokens. `added`: tokens by
    their ids, with the attributes of the tokenizers library's `AddedToken`."""

    names: Mapping[str, str] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    added: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)


def special_tokens(folder: Path) -> SpecialTokens:
    """Reads the special tokens of the tokenizer in a folder, as transformers does: those of
    tokenizer_config.json. If that file has no `added_tokens_decoder`, those of
    special_tokens_map.json come first. Raises DataError: a file cannot be read, or is no JSON
    object."""
    config = read_config(folder)
    decoder = config.get("added_tokens_decoder")
    settings = config if isinstance(decoder, dict) else {**config, **read_config(folder, _MAP)}
    names = {role: text for role in ROLES if (text := _text(settings.get(role))) is not None}
    more = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or ()
    listed = more.values() if isinstance(more, dict) else more if isinstance(more, list) else ()
    others = tuple(text for one in listed if (text := _text(one)) is not None)
    tokens = decoder.items() if isinstance(decoder, dict) else ()
    added = {int(key): token for key, token in tokens if key.isdecimal() and isinstance(token, dict) and _text(token)}
    return SpecialTokens(names, others, added)


def llama_spaces(folder: Path) -> str | None:
    """Returns where `LlamaTokenizer` of transformers 5 puts the space before a text: first (only
    there), always (also behind special tokens) or never. None: the tokenizer.json decides. Raises
    DataError: a file cannot be read, or is not a JSON object."""
    config = read_config(folder)
    if str(config.get("tokenizer_class")).removesuffix("Fast") != "LlamaTokenizer":
        return None
    if read_config(folder, "config.json").get("model_type", "llama") != "llama":
        return None  # for these it knows that the class is wrong
    if config.get("add_prefix_space") is False:
        return "never"
    return "always" if config.get("legacy") else "first"


def ids_of_model(folder: Path, role: str) -> tuple[int, ...]:
    """Returns the ids, maybe several, that generation_config.json, else config.json, gives a role
    of `ROLES`. Raises DataError: a file cannot be read, or is not a JSON object."""
    files = (read_config(folder, name) for name in _OF_MODEL)
    return next((ids for config in files if (ids := _ids(config.get(f"{role}_id")))), ())


def read_config(folder: Path, name: str = _CONFIG) -> dict[str, Any]:
    """Returns the content of a JSON file of the tokenizer in a folder; empty if it does not exist.
    Raises DataError: it cannot be read, or is not a JSON object."""
    path = folder / name
    if not path.exists():
        return {}
    content = read_file(path, _CONFIG_BOUNDS.size, DataError, _KEY)
    return parse_object(content, visible(path), _CONFIG_BOUNDS, DataError, "use the model's own file")


def _text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    return tuple(one for one in ids[:_MOST_IDS] if isinstance(one, int) and not isinstance(one, bool) and one >= 0)


def vocabulary(content: bytes, path: Path) -> dict[str, int]:
    """Returns the ids of all tokens. Raises DataError: the content is not a tokenizer.json."""
    try:
        document = parse_as(_File, content, "", BOUNDS, DataError, _FIX, unknown="ignore")
    except DataError as error:
        whats = [f"{path} is not a tokenizer.json: {problem.fault}" for problem in error.problems]
        raise DataError(Problem(_KEY, fault, _FIX) for fault in whats) from None
    words = document["model"].get("vocab", {})
    ids = words if isinstance(words, dict) else {word: index for index, (word, _) in enumerate(words)}
    return ids | {token["content"]: token["id"] for token in document.get("added_tokens") or ()}
