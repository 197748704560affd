"""No test asserts how long something took, or sleeps long where it could wait for a condition.

A deadline may end a hang: `assert time.monotonic() < end` in a loop that waits for a condition.
"""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

from torch_names import Source, read_sources

ROOT = Path(__file__).parents[2]
READINGS = {
    f"time.{name}{unit}"
    for name in ("monotonic", "perf_counter", "process_time", "thread_time", "time")
    for unit in ("", "_ns")
}
TIMES = {"time", "updated_at"}
"""Fields that hold the time of an event."""
MEASURES = {
    "cpu_s", "freed_s", "gbps", "held_s", "last_stall_s", "lost_s", "stall_s", "told_s", "upload_mb_per_s", "upload_s",
    "wall_s", "yielded_s",
}  # fmt: skip
"""Fields that hold a measured time or rate."""
PASS_ON = {
    "abs", "all", "any", "enumerate", "list", "max", "mean", "median", "min", "pairwise", "round", "set", "sorted",
    "sum", "tuple", "zip",
}  # fmt: skip
"""Functions whose results are as their arguments."""
LONGEST_SLEEP_S = 0.5
Key = tuple[int, str]
"""A name in its outermost function; attributes and functions are those of the whole file (0)."""


def clock_asserts(source: Source) -> list[int]:
    """Returns the lines of asserts about a measured time. A difference of readings of a clock is
    one, also behind a name, an attribute, a list or a function of the same file. So is a reading
    compared with another one and a margin, unless a loop waits there. Comparing with 0 is
    allowed."""
    return sorted(_Clocks(source).asserts())


class _Clocks:
    def __init__(self, source: Source) -> None:
        self._source = source
        self._scopes: dict[int, int] = {}
        self._functions: dict[int, str] = {}
        self._waiting: set[int] = set()
        for node in source.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for inside in ast.walk(node):
                    self._scopes.setdefault(id(inside), id(node))  # outer functions come first
                    self._functions[id(inside)] = node.name
            elif isinstance(node, ast.While | ast.For):
                self._waiting |= {id(inside) for inside in ast.walk(node)}
        self._known: dict[Key, set[str]] = {}
        bindings, changes = list(self._bindings()), True
        while changes:
            changes = False
            for key, value in bindings:
                known = self._known.setdefault(key, set())
                changes |= bool(self._kinds(value) - known)
                known |= self._kinds(value)

    def asserts(self) -> Iterator[int]:
        for node in self._source.nodes:
            if isinstance(node, ast.Assert):
                judged = {"duration"} if id(node) in self._waiting else {"duration", "deadline"}
                if any(self._kinds(side) & judged for one in ast.walk(node.test) for side in _compared(one)):
                    yield node.lineno

    def _bindings(self) -> Iterator[tuple[Key, ast.expr]]:
        for node in self._source.nodes:
            if isinstance(node, ast.Assign):
                yield from ((key, node.value) for target in node.targets for key in self._targets(target))
            elif isinstance(node, ast.For | ast.comprehension):
                yield from ((key, node.iter) for key in self._targets(node.target))
            elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
                yield from ((key, node.value) for key in self._targets(node.target))
            elif isinstance(node, ast.Return | ast.Yield) and node.value is not None and id(node) in self._scopes:
                yield (0, self._functions[id(node)]), node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
                yield from ((key, node.args[0]) for key in self._targets(node.func.value))

    def _targets(self, target: ast.expr) -> Iterator[Key]:
        if isinstance(target, ast.Name):
            yield self._scopes.get(id(target), 0), target.id
        elif isinstance(target, ast.Attribute):
            yield 0, target.attr
        elif isinstance(target, ast.Tuple | ast.List):
            for one in target.elts:
                yield from self._targets(one)

    def _kinds(self, value: ast.expr) -> set[str]:
        """Returns which of reading, duration and deadline an expression may be."""
        if isinstance(value, ast.Name):
            return self._known.get((self._scopes.get(id(value), 0), value.id), set())
        if isinstance(value, ast.Attribute):
            return self._known.get((0, value.attr), set()) | _of_field(value.attr)
        if isinstance(value, ast.Subscript):
            text = value.slice.value if isinstance(value.slice, ast.Constant) else ""
            return self._kinds(value.value) | (_of_field(text) if isinstance(text, str) else set())
        if isinstance(value, ast.Call):
            if self._source.dotted(value.func) in READINGS:
                return {"reading"}
            name = _called(value)
            passed = [kind for one in value.args for kind in self._kinds(one)] if name in PASS_ON else []
            return self._known.get((0, name), set()) | set(passed)
        inner = {kind for one in _parts(value) for kind in self._kinds(one)}
        if isinstance(value, ast.BinOp) and "reading" in inner:
            inner |= (
                {"duration"}
                if isinstance(value.op, ast.Sub)
                else {"deadline"}
                if isinstance(value.op, ast.Add)
                else set()
            )
        return inner


def _of_field(name: str) -> set[str]:
    return {"reading"} if name in TIMES else {"duration"} if name in MEASURES else set()


def _parts(value: ast.expr) -> list[ast.expr]:
    if isinstance(value, ast.ListComp | ast.SetComp | ast.GeneratorExp):
        return [value.elt]
    if isinstance(value, ast.Lambda | ast.Dict | ast.JoinedStr):
        return []
    return [one for one in ast.iter_child_nodes(value) if isinstance(one, ast.expr)]


def _compared(node: ast.AST) -> list[ast.expr]:
    """Returns the sides of a comparison by size with something else than 0."""
    if not isinstance(node, ast.Compare):
        return []
    sides, orders = [node.left, *node.comparators], (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
    with_0 = any(isinstance(side, ast.Constant) and side.value == 0 for side in sides)
    return sides if any(isinstance(one, orders) for one in node.ops) and not (with_0 and len(sides) == 2) else []


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def long_sleeps(source: Source) -> list[int]:
    """Returns the lines that sleep longer than half a second outside of slow tests. The time is a
    number, or the name of one."""
    numbers, slow = {}, set()
    for node in source.nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            numbers |= {ast.unparse(target): node.value.value for target in node.targets}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark" and _is_slow([node.value]):
            return []
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_slow(node.decorator_list):
            slow |= {id(inside) for inside in ast.walk(node)}
    calls = [node for node in source.nodes if isinstance(node, ast.Call) and _called(node) == "sleep" and node.args]
    times = {call.lineno: numbers.get(ast.unparse(call.args[0]), getattr(call.args[0], "value", 0)) for call in calls
             if id(call) not in slow}  # fmt: skip
    return sorted(line for line, time in times.items() if isinstance(time, int | float) and time > LONGEST_SLEEP_S)


def _is_slow(marks: list[ast.expr]) -> bool:
    return any(name in ast.unparse(mark) for mark in marks for name in ("mark.slow", "mark.gate"))


def found(rule: Callable[[Source], list[int]]) -> list[str]:
    sources = read_sources(ROOT, ("raypp", "tests", "benchmarks", "cluster"))
    of_tests = [source for source in sources if source.module.startswith("tests.")]
    places = [f"{source.module.replace('.', '/')}.py:{line}" for source in of_tests for line in rule(source)]
    return list(places)


def test_no_test_asserts_how_long_something_took() -> None:
    assert not found(clock_asserts), "count work, or give the code a clock"


def test_no_test_sleeps_long() -> None:
    assert not found(long_sleeps), "wait for a condition, or give the code a clock"


def test_planted_asserts_are_found() -> None:
    planted = [
        "begun = time.monotonic()\nwork()\nassert time.monotonic() - begun < 3",
        "begun = time.process_time()\nwork()\ntook = (time.process_time() - begun) / 100\nassert took < 0.02",
        "begun = time.monotonic()\nwork()\nassert time.monotonic() < begun + 3",
        "def took():\n    begun = time.time()\n    return time.time() - begun\nseconds = took()\nassert 1 < seconds",
        "sent = []\nbegun = time.monotonic()\nsent.append(time.monotonic())\n"
        "for moment in sorted(sent):\n    assert moment - begun > 1",
        "assert max(rate / (time.perf_counter() - begun) for rate in rates) < 1.1",
        "assert all(event.time - other.time < 5 for event in events)",
        "assert saving.last_stall_s > 0.1 and done",
        "assert details['upload_s'] > 1.5 * TIMEOUT_S",
        "for link in links.values():\n    assert 0.3 * RATE < link['gbps'] < 1.05 * RATE",
        "now = time.monotonic()\nassert wait(lambda: time.monotonic() - now > 0.02)",
    ]
    sources = [Source.of("tests.planted", f"import time\n{text}") for text in planted]
    assert [len(clock_asserts(source)) for source in sources] == [1] * len(planted)


def test_planted_sleeps_are_found() -> None:
    text = """
import time
PAUSE_S = 2.0
def test_a():
    time.sleep(0.7)
    time.sleep(PAUSE_S)
    time.sleep(0.5)
@pytest.mark.slow
def test_b():
    time.sleep(6)
"""
    assert long_sleeps(Source.of("tests.planted", text)) == [5, 6]
