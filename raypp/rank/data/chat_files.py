"""Finds a job's chat template: a file of its own, or one of the model's. Encodes rows with it."""

from collections.abc import Callable, Mapping
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from raypp.errors import DataError, Problem
from raypp.job.job import DataSection
from raypp.job.small_files import TEMPLATES, here
from raypp.job.tokenizer_file import read_config, special_tokens, tokenizer_path
from raypp.kinds import SOURCES
from raypp.rank.data.chat_template import KEY, MOST_SOURCE, ChatTemplate, TemplateFault
from raypp.rank.data.conversations import Names, needs_template
from raypp.rank.data.rows import RowEncoder
from raypp.rank.data.tokenised import Request
from raypp.rank.data.tokenizer import NotEncodable, PromptTokenizer
from raypp.untrusted.files import expand_home, read_file
from raypp.untrusted.text import visible

_CONFIG, _ALONE = "tokenizer_config.json", "chat_template.jinja"
_MOST_OTHERS = 100
_CONTENT = "what-the-assistant-writes"
_GIVE = "set data.chat_template to a file with a Jinja template"


def row_encoder(request: Request, first: Callable[[], object]) -> RowEncoder:
    """Returns the encoder of a job's rows. `first`: reads the first row, only without a template.
    Raises DataError: as `open_template`; or conversations have none."""
    data = request.data
    template, names = open_template(data), Names.of(data)
    if template is None and isinstance(row := first(), Mapping) and needs_template(row, names):
        raise no_template(data)
    return RowEncoder(request.tokenizer, template, data.loss, names, request.vocab_size)


def open_template(data: DataSection) -> ChatTemplate | None:
    """Opens the template that `data.chat_template` names, else the one beside `data.tokenizer`.
    There, `chat_template.jinja` and `additional_chat_templates/NAME.jinja` come before the
    `chat_template` of `tokenizer_config.json`, as in transformers. Returns None if there is no
    template. Raises DataError: a file cannot be read, or the template cannot be compiled."""
    folder = None if data.tokenizer == "bytes" else tokenizer_path(data.tokenizer).parent
    config = read_config(folder) if folder is not None else {}
    if data.chat_template is not None:
        source: Any = _read(here(expand_home(data.chat_template)))
    else:
        source = _sources(config.get("chat_template"), folder)
        if folder is not None and (files := _template_files(folder)):
            default = source if isinstance(source, str) else (source or {}).get("default")
            usual = {"default": default} if default is not None else {}
            source = usual | {name: _read(path) for name, path in files.items()}
    if source is None:
        return None
    tokens = special_tokens(folder).names if folder is not None else {}
    return ChatTemplate(source, dict(tokens), _date(data.template_date))


def _template_files(folder: Path) -> dict[str, Path]:
    """Returns a folder's files of templates by name; `default` is the one beside the tokenizer."""
    files = {"default": folder / _ALONE} if (folder / _ALONE).exists() else {}
    others = folder / TEMPLATES
    if others.is_dir():
        named = sorted(islice(others.glob("*.jinja"), _MOST_OTHERS))
        files |= {path.name.removesuffix(".jinja"): path for path in named}
    return files


def no_template(data: DataSection) -> DataError:
    """Returns the error for conversations without a template."""
    if data.tokenizer == "bytes":
        return DataError(Problem(KEY, "is missing: the bytes tokenizer has no chat template", _GIVE))
    fault = f"there is neither {_ALONE} nor a chat_template in {_CONFIG} beside {visible(data.tokenizer)}"
    return DataError(Problem(KEY, fault, f"copy the model's tokenizer files there, or {_GIVE}"))


def end_of_turn(template: ChatTemplate) -> str:
    """Returns what a template writes right behind an assistant's turn, up to the next blank; "" if
    nothing. A model that was trained on conversations writes it where it has answered."""
    try:
        turns: list[dict[str, Any]] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _CONTENT}]
        _, _, behind = template.render(turns).text.rpartition(_CONTENT)
    except TemplateFault:  # the conversation will tell
        return ""
    return next(iter(behind.split()), "")


def turn_ends(template: ChatTemplate, tokenizer: PromptTokenizer) -> tuple[int, ...]:
    """Returns the ids that end an assistant's answer and call of a tool, if each is one token."""
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    ends: list[int] = []
    try:
        answer = tokenizer.encode(end_of_turn(template)).tolist()
        ends += answer if len(answer) == 1 else answer[:1] if tokenizer.decode(answer[:1]) == "" else []
        called = tokenizer.encode(template.render(turns, [tool]).text.rstrip()).tolist()[-1:]
        ends += called if tokenizer.decode(called) == "" else []
    except (NotEncodable, TemplateFault):
        pass
    return tuple(dict.fromkeys(ends))


def learnt_ends(data: Mapping[str, Any], tokenizer: PromptTokenizer) -> tuple[int, ...]:
    """Returns the ids that end the turns that a run learns; none if it learns no conversations.
    `data`: the `data:` section of its job, as stored."""
    kinds = [data.get("kind"), *(part.get("kind") for part in data.get("parts") or ())]
    if not any(kind in SOURCES and KEY.rpartition(".")[2] in SOURCES.get(kind).keys for kind in map(str, kinds)):
        return ()
    keys = ("tokenizer", "chat_template", "template_date")
    given = {key: data[key] for key in keys if data.get(key) is not None}
    try:
        template = open_template(DataSection.model_validate({"template_date": "2000-01-01", **given}))
    except (DataError, ValueError):
        return ()
    return () if template is None else turn_ends(template, tokenizer)


def _date(text: str | None) -> datetime | None:
    try:
        return None if text is None else datetime.strptime(text, "%Y-%m-%d")
    except ValueError:
        raise DataError(Problem("data.template_date", f"{text} is not a date", "write it as 2026-01-31")) from None


def _read(path: Path) -> str:
    try:
        return read_file(path, 4 * MOST_SOURCE, DataError, KEY).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(Problem(KEY, f"{visible(path)} is not UTF-8", "convert the file")) from error


def _sources(given: Any, folder: Path | None) -> str | dict[str, str] | None:
    """Returns the template of a tokenizer_config.json: a text, or a list of named ones."""
    if given is None or isinstance(given, str):
        return given
    if isinstance(given, list) and all(isinstance(one, dict) for one in given):
        named = {one.get("name"): one.get("template") for one in given}
        if all(isinstance(key, str) and isinstance(value, str) for key, value in named.items()):
            return {str(key): str(value) for key, value in named.items()}
    fault = f"chat_template in {visible(folder)}/{_CONFIG} is neither a text nor a list of named templates"
    raise DataError(Problem(KEY, fault, _GIVE))
