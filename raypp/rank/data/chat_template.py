"""Renders a conversation by a model's Jinja chat template, as transformers does.

A template comes from others: Jinja's sandbox keeps it from the process; its output is limited.
"""

import hashlib
import json
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import Template, nodes, pass_context, pass_eval_context
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from raypp.errors import DataError, Problem
from raypp.untrusted.text import visible

Message = dict[str, Any]

KEY = "data.chat_template"
MOST_SOURCE = 1 << 20
"""Characters of a template."""
MOST_OUTPUT = 64 << 20
"""Characters that one rendering may write."""
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys that hold a model's reasoning in data; templates read the first two."""
_WORD = re.compile(r"\w+")
_NAME = "<chat template>"
_SHOWN = 300


class TemplateFault(Exception):
    """A template cannot render a conversation; says why, with the template's line."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text. `spans`: first and one past the last character of each part inside of
    `{% generation %}`. `turns`: the same of what each turn's iteration of a loop wrote, by the
    turn's index. Those of which no iteration wrote, or several, are missing."""

    text: str
    spans: tuple[tuple[int, int], ...]
    turns: Mapping[int, tuple[int, int]]


class ChatTemplate:
    """A chat template. Not thread-safe. `source`: the template, or several by name: `tool_use`
    renders conversations with tools, `default` the others. `special_tokens`: `bos_token`,
    `eos_token` and so on, for the template. `today`: what `strftime_now` formats. None: a template
    that asks for the date is refused, because the same data would differ from day to day. Raises
    DataError: it is not a template; names its line."""

    def __init__(
        self,
        source: str | Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        today: datetime | None = None,
    ) -> None:
        self._given = source, special_tokens, today
        self._special = dict(special_tokens or {})
        self._environment = _environment(today)
        sources = {"default": source} if isinstance(source, str) else dict(source)
        if "default" not in sources:
            fault = f"there are templates {', '.join(map(visible, sources))}, but none is the default"
            raise DataError(Problem(KEY, fault, "name the file of one with data.chat_template"))
        self._marks = {name: _MARKS.search(text) is not None for name, text in sources.items()}
        self._words = {name: frozenset(_WORD.findall(text)) for name, text in sources.items()}
        parts = [sorted(sources.items()), sorted(self._special.items()), str(today)]
        self.identity = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
        """Changes if the text of a conversation would."""
        self._templates = {name: _compiled(self._environment, text) for name, text in sources.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, self._given  # another process compiles it again

    def marks_turns(self, tools: Sequence[Any] | None = None) -> bool:
        """Whether the template says by `{% generation %}` what the model has to write."""
        return self._marks[self._chosen(tools)]

    def reads(self, key: str, tools: Sequence[Any] | None = None) -> bool:
        """Whether the template has a word that is a key of a turn, or another name of it."""
        words = self._words[self._chosen(tools)]
        return key in words or (key in _REASONING and not words.isdisjoint(_REASONING))

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> Rendered:
        """Renders a conversation. `add_generation_prompt`: with the header of the next turn. Raises
        TemplateFault: the template refuses the conversation, fails, or writes too much."""
        tracker = _tracker(self._environment)
        turns = [_normal(message) for message in messages]
        tracker.begin(turns)
        values = {
            **self._special,
            "messages": turns,
            "tools": None if tools is None else list(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        parts = []
        try:
            for part in self._templates[self._chosen(tools)].generate(values):
                tracker.position += len(part)
                if tracker.position > MOST_OUTPUT:
                    raise TemplateError(f"writes more than {MOST_OUTPUT:,} characters")
                parts.append(part)
        except Exception as error:  # a template can raise whatever its expressions raise
            raise TemplateFault(_in_words(error)) from error
        return Rendered("".join(parts), tuple(tracker.spans), tracker.turns())

    def _chosen(self, tools: Sequence[Any] | None) -> str:
        return "tool_use" if tools is not None and "tool_use" in self._templates else "default"


_AT = "_at"
"""The filter to which each iteration of a loop gives its item. It reads the context, so that Jinja
does not compute it in advance."""


class _Generation(Extension):
    """Records where the content of `{% generation %}`, and of loops, begins and ends."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        environment.filters[_AT] = pass_context(lambda _, item, loop: self.at(item, loop))
        self.begin()

    def begin(self, turns: Sequence[Message] = ()) -> None:
        self.position, self.spans = 0, list[tuple[int, int]]()
        self._index = {id(turn): index for index, turn in enumerate(turns)}
        self._wrote: dict[int, list[tuple[int, int]]] = {}
        self._open: dict[int, tuple[int, int]] = {}

    def at(self, item: object, loop: int) -> None:
        """Notes that an iteration of a loop begins, or with None that the loop has ended."""
        turn, start = self._open.pop(loop, (0, self.position))
        if self.position > start:
            self._wrote.setdefault(turn, []).append((start, self.position))
        if (now := self._index.get(id(item))) is not None:
            self._open[loop] = now, self.position

    def turns(self) -> dict[int, tuple[int, int]]:
        """Returns what each turn's iteration wrote."""
        return {turn: parts[0] for turn, parts in self._wrote.items() if len(parts) == 1}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _mark(self, _: nodes.EvalContext, caller: Callable[[], str]) -> str:
        content = caller()
        self.spans.append((self.position, self.position + len(content)))
        return content


class _SafeNamespace(Namespace):
    """A namespace without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Dict:
    """`dict` in a template: only what makes one."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Loops(NodeTransformer):
    """Makes loops tell their items as they go through them, and their end."""

    _loops = 0

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:
        self.generic_visit(node)
        if not isinstance(node.target, nodes.Name) or node.recursive:
            return [node]
        self._loops += 1
        item = nodes.Name(node.target.name, "load", lineno=node.lineno)
        node.body.insert(0, self._noted(item))
        return [node, self._noted(nodes.Const(None, lineno=node.lineno))]

    def _noted(self, item: nodes.Expr) -> nodes.ExprStmt:
        number = nodes.Const(self._loops, lineno=item.lineno)
        call = nodes.Filter(item, _AT, [number], [], None, None, lineno=item.lineno)
        return nodes.ExprStmt(call, lineno=item.lineno)


def _environment(today: datetime | None) -> ImmutableSandboxedEnvironment:
    extensions = [_Generation, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson

    def strftime_now(form: str) -> str:
        if today is None:
            raise TemplateError("asks for the date of today; set data.template_date, for example '2026-01-31'")
        return today.strftime(form)

    environment.globals.update(
        raise_exception=_raise, strftime_now=strftime_now, dict=_Dict(), namespace=_SafeNamespace
    )
    return environment


def _tracker(environment: ImmutableSandboxedEnvironment) -> _Generation:
    tracker = environment.extensions[_Generation.identifier]
    assert isinstance(tracker, _Generation)
    return tracker


def _compiled(environment: ImmutableSandboxedEnvironment, source: str) -> Template:
    fix = "use the template of the model's tokenizer, or repair it"
    if len(source) > MOST_SOURCE:
        fault = f"the chat template has {len(source):,} characters; at most {MOST_SOURCE:,} are read"
        raise DataError(Problem(KEY, fault, fix))
    try:
        code = environment.compile(_Loops().visit(environment.parse(source)), filename=_NAME)
        return Template.from_code(environment, code, environment.make_globals(None))
    except TemplateSyntaxError as error:
        fault = f"line {error.lineno} of the chat template: {visible(str(error.message)[:_SHOWN])}"
        raise DataError(Problem(KEY, fault, fix)) from error
    except (ValueError, RecursionError, SyntaxError, MemoryError, OverflowError) as error:
        fault = f"the chat template cannot be compiled: {visible(str(error)[:_SHOWN])}"
        raise DataError(Problem(KEY, fault, fix)) from error


def _normal(message: Message) -> Message:
    """Leaves out keys without value, but `content`; reasoning gets the names templates read."""
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    thought = next((kept[key] for key in _REASONING if key in kept), None)
    return kept if thought is None else {"thinking": thought, **kept, "reasoning_content": thought}


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no {name!r}")


def _raise(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter would escape what HTML reserves."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _in_words(error: Exception) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _NAME]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
    text = "nested too deeply" if isinstance(error, RecursionError) else str(error) or type(error).__name__
    text = visible(text[:_SHOWN].replace("NoneType", "null"))
    return (f"line {line} of the chat template: " if line else "the chat template: ") + text
