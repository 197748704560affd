"""Parses YAML into plain values and records the line of every key. Scalars follow YAML 1.2: only
`true` and `false` are booleans, `3e-4` is a number, `off` and dates are text. The job file has
values such as `off` that YAML 1.1 would read as booleans."""

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from raypp.errors import Problem
from raypp.job.limits import VALUES
from raypp.job.section import KeyPath, dotted
from raypp.untrusted.documents import shown

_NULL, _BOOL, _INT, _FLOAT, _STR, _MERGE, _MAP, _SEQ = (
    f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "merge", "map", "seq")
)


class _Loader(yaml.SafeLoader):
    """PyYAML's loader with the scalar rules of YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own convention

    def compose_scalar_node(self, anchor: dict[Any, yaml.Node]) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        if not node.value.isascii():
            # JSON writes a character beyond U+FFFF as two escapes, which PyYAML does not join.
            node.value = node.value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        return node


def _resolve_as(tag: str, pattern: str, first: str) -> None:
    _Loader.add_implicit_resolver(tag, re.compile(pattern, re.VERBOSE), list(first) or [""])


_resolve_as(_BOOL, r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF")
_resolve_as(_INT, r"^(?:[-+]?[0-9][0-9_]*|0o[0-7]{1,40}|0x[0-9a-fA-F]{1,40})$", "-+0123456789")
_resolve_as(
    _FLOAT,
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
    "-+0123456789.",
)
_resolve_as(_NULL, r"^(?:~|null|Null|NULL)$", "~nN")
_resolve_as(_NULL, r"^$", "")
_resolve_as(_MERGE, r"^<<$", "<")


_LONGEST_TAG = 60
_MANY = f"more than {VALUES:,} values, aliases followed"
_SYNTAX = (
    (_MANY, "", "write fewer: no job needs so many"),
    # part of PyYAML's message, our message (empty: keep PyYAML's), the fix
    ("\\t", "a tab used for indentation", "indent with spaces"),
    ("but found another document", "a second document starts here (`---`)", "put each job in its own file"),
    ("undefined alias", "", "define the alias first with &name, or quote the text if it begins with *"),
    (
        "mapping values are not allowed",
        "a key is not allowed here",
        "check the indentation and the line before (is a space missing after its colon?); quote text with a colon",
    ),
    ("expected alphabetic or numeric character", "", "quote text that begins with * or &"),
    ("cannot start any token", "", "quote text that begins with this character"),
    ("<stream end>", "the text ends inside a bracket or a quote", "close the bracket or quote"),
    ("could not find expected ':'", "a line without `:`", "write `key: value`, with a space after the colon"),
)


@dataclass
class Document:
    """A parsed text.

    Attributes:
        value: Plain dicts, lists, text, numbers, booleans and None.
        where: The location (`job.yaml:14`) of each key path; the empty path is the whole text.
        problems: Errors in the text itself. `value` then holds what could be parsed.
    """

    value: Any = None
    where: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_document(text: str, source: str, *, numbered: bool = True) -> Document:
    """Parses one YAML document. Errors in the text become problems. `source`: for locations: a
    file, or an override. `numbered`: add `:line` to locations."""
    reading = _Reading(source, numbered)
    document = reading.document
    document.where[()] = reading.place(None)
    try:
        node = _Loader(text).get_single_node()
        if node is not None:
            document.value = reading.value(node, ())
    except yaml.YAMLError as error:
        document.problems.append(reading.syntax_problem(error, text))
    except (RecursionError, ValueError, OverflowError) as error:  # the latter of PyYAML's int and chr
        fault = "is nested too deeply" if isinstance(error, RecursionError) else "has a number that is too large"
        document.problems.append(Problem("", f"not valid YAML: it {fault}", "write it as text", reading.place(None)))
    return document


class _Reading:
    """One pass over the nodes of a document. Collects values, locations and problems."""

    def __init__(self, source: str, numbered: bool) -> None:
        self.source = source
        self.numbered = numbered
        self.document = Document()
        self._open: set[int] = set()
        self._values = 0

    def place(self, mark: Any) -> str:
        if not self.numbered:
            return self.source
        return f"{self.source}:{mark.line + 1 if mark is not None else 1}"

    def problem(self, node: yaml.Node, path: KeyPath, fault: str, fix: str) -> None:
        self.document.problems.append(Problem(dotted(path), fault, fix, self.place(node.start_mark)))

    def syntax_problem(self, error: yaml.YAMLError, text: str) -> Problem:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        where = self.place(mark)
        if isinstance(error, yaml.reader.ReaderError):
            line = text.count("\n", 0, error.position) + 1
            where = f"{self.source}:{line}" if self.numbered else self.source
            return Problem("", f"not valid YAML: a control character (code {error.character})", "remove it", where)
        fault = getattr(error, "problem", None) or str(error)
        for sign, words, fix in _SYNTAX:
            if sign in fault:
                return Problem("", f"not valid YAML: {words or fault}", fix, where)
        fix = "write `key: value` with a space after the colon, and indent all keys of a section equally"
        return Problem("", f"not valid YAML: {fault}", fix, where)

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        if not self._opened(node, path):
            return None
        try:
            if not isinstance(node, yaml.ScalarNode) and node.tag not in (_MAP, _SEQ):
                self.problem(node, path, f"the YAML tag '{node.tag[:_LONGEST_TAG]}' is not supported", "remove the tag")
            if isinstance(node, yaml.MappingNode):
                return self.mapping(node, path, {})
            if isinstance(node, yaml.SequenceNode):
                return [self.item(item, (*path, index)) for index, item in enumerate(node.value)]
            return self.scalar(node, path)
        finally:
            self._open.discard(id(node))

    def _opened(self, node: yaml.Node, path: KeyPath) -> bool:
        """Enters a node, and returns whether it can be read: it is not inside itself."""
        if id(node) in self._open:
            self.problem(node, path, "the alias contains itself", "write the value out")
            return False
        self._values += 1 + len(node.value) * isinstance(node, yaml.MappingNode)  # a merge skips keys that are there
        if self._values > VALUES:
            raise yaml.MarkedYAMLError(problem=_MANY, problem_mark=node.start_mark)
        self._open.add(id(node))
        return True

    def item(self, node: yaml.Node, path: KeyPath) -> Any:
        self.document.where[path] = self.place(node.start_mark)
        return self.value(node, path)

    def mapping(self, node: yaml.MappingNode, path: KeyPath, into: dict[str, Any]) -> dict[str, Any]:
        """Adds the keys of a mapping that `into`, a mapping that merges it, lacks."""
        lines: dict[str, int] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                merged += value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self.problem(key_node, path, "a key must be plain text", "remove the brackets around the key")
                continue
            key = str(key_node.value)
            here = (*path, key)
            if wrong := _wrong_text(key):
                self.problem(key_node, path, f"a key {wrong}", "remove it")
                continue
            if key in lines:
                fault = f"is given twice, first in line {lines[key]}" if self.numbered else "is given twice"
                self.problem(key_node, here, fault, "keep one of the two")
                continue
            lines[key] = key_node.start_mark.line + 1
            if key in into:
                continue
            self.document.where[here] = self.place(key_node.start_mark)
            into[key] = self.value(value_node, here)
        for source in merged:
            self.merge(source, path, into)
        return into

    def merge(self, node: yaml.Node, path: KeyPath, into: dict[str, Any]) -> None:
        """Handles `<<: *other`: adds the keys of another mapping that this mapping lacks."""
        if not isinstance(node, yaml.MappingNode):
            self.problem(node, path, "`<<` needs a section", "name a section with <<: *anchor")
        elif self._opened(node, path):
            self.mapping(node, path, into)
            self._open.discard(id(node))

    def scalar(self, node: yaml.Node, path: KeyPath) -> Any:
        text = str(node.value)
        if node.tag == _NULL:
            return None
        if node.tag == _BOOL:
            return text.lower() == "true"
        try:
            if node.tag == _INT:
                return int(text, 0 if text[:2] in ("0x", "0o") else 10)
            if node.tag == _FLOAT:
                return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
        except ValueError:
            self.problem(node, path, f"{shown(text)} is not a number", "write digits")
            return None
        if node.tag not in (_STR, _MERGE):
            self.problem(node, path, f"the YAML tag '{node.tag[:_LONGEST_TAG]}' is not supported", "remove the tag")
        if wrong := _wrong_text(text):
            self.problem(node, path, wrong, "remove it")
            return None
        return text


def _wrong_text(text: str) -> str:
    if "\0" in text:
        return "contains a NUL character"
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        return "contains half of a surrogate pair, which is not a character"
    return ""
