"""No file on the path of a step makes the host wait for a device, except where it says why."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDERS = ("raypp/stages/models", "raypp/stages/parallel", "raypp/stages/pipeline")
_OF_RANK = (
    "adamw", "bf16_weights", "evaluate", "muon", "nonfinite", "optimizer", "optimizer_offload", "quantised_moments",
    "reduce", "sample", "sgd", "step", "stragglers", "tune_lookahead", "warm_up",
)  # fmt: skip
FILES = (
    *(str(path.relative_to(ROOT)) for name in _OF_RANK for path in (ROOT / "raypp/rank").rglob(f"{name}.py")),
    "raypp/state/checkpoint/snapshot.py",
    "raypp/state/memory/rank_slots.py",
    "raypp/state/memory/tier.py",
)

_COUNT = "the number of repeats is an int: the result's size does not depend on values"
_HOST = "a tensor on the CPU, which never was on the device"
_SAVER = "a thread that waits for the copy of a snapshot, not the one that computes"
_OUTER = "an outer step, every so many steps: what replicas agree on is in host memory"
_DECODE = "decoding, between two steps: tokens are chosen, and rows end, on the host"
ALLOWED = {
    ("raypp.stages.models.kv_cache.KeyValueCache.prompts", "tensor(device=)"): _DECODE,
    ("raypp.stages.models.kv_cache.KeyValueCache.next_token", "tensor(device=)"): _DECODE,
    ("raypp.stages.pipeline.decode.PipelineDecoder._take", "tolist"): _DECODE,
    ("raypp.stages.pipeline.decode.PipelineDecoder._turn", "tensor(device=)"): _DECODE,
    ("raypp.stages.pipeline.decode.next_tokens", "numpy"): _DECODE,
    ("raypp.stages.pipeline.decode.next_tokens", "tolist"): _DECODE,
    ("raypp.rank.step.sample.Sampler.__init__", "tolist"): "token ids of prompts, which a tokenizer made on the host",
    ("raypp.rank.optimizers.reduce.GradientReducer.read", "cpu"): "the one wait of a step, after its last backward",
    (
        "raypp.rank.optimizers.optimizer_offload.OffloadedOptimizer.to_host",
        "cpu",
    ): "loads a checkpoint, before the first step of an attempt",
    ("raypp.rank.step.nonfinite.FiniteGuard._symptoms", "tolist"): _HOST + ", of a step that is not finite",
    ("raypp.rank.step.nonfinite._gathered", "tolist"): _HOST + ", of a step that is not finite",
    ("raypp.state.checkpoint.snapshot.Snapshot.data", "numpy"): _HOST + ": the bytes of a snapshot",
    ("raypp.state.checkpoint.snapshot.SnapshotBuffer._copy.rest", "synchronize"): _SAVER,
    ("raypp.state.checkpoint.snapshot._Copy.wait", "synchronize"): _SAVER,
    ("raypp.stages.parallel.outer_sync.OuterSync._exchanged", "cpu"): _OUTER,
    ("raypp.stages.parallel.outer_sync.OuterSync._receive", "cpu"): _OUTER,
    ("raypp.stages.parallel.host_copies.await_on_host", "synchronize"): _OUTER,
    ("raypp.stages.parallel.outer_sync.OuterSync._of_all", "tolist"): _OUTER,
    ("raypp.stages.pipeline.agreement.unpack", "tolist"): _HOST,
    ("raypp.stages.parallel.attention_choice.try_kernel", "synchronize"): "tries a kernel before the stages are built",
    ("raypp.stages.pipeline.device_clock.DeviceClock.anchor", "synchronize"): "before and after steps that are traced",
    ("raypp.stages.pipeline.link_probe._wait", "synchronize"): "measures messages between two steps, once per attempt",
    ("raypp.stages.models.fp8._multiply", "tolist"): _HOST,
    ("raypp.stages.models.attention._attend", "repeat_interleave"): _COUNT,
    ("raypp.stages.parallel.ring_hops._per_query_head", "repeat_interleave"): _COUNT,
    ("raypp.stages.parallel.context.ulysses_attention", "repeat_interleave"): _COUNT,
    (
        "raypp.stages.models.experts.ExpertStacks.forward",
        "tolist",
    ): "the loop of the reference: one read per layer and forward",
    ("raypp.stages.models.adapter_dropout.AdapterDropout.__init__", "tensor(device=)"): _HOST
    + "; when a stage is built",
    ("raypp.stages.models.quantised_rows._table", "tensor(device=)"): "16 numbers, once per device",
    ("raypp.stages.parallel.expert._Counts.sizes", "tolist"): _HOST + ", after the wait below",
    (
        "raypp.stages.parallel.expert._Counts.sizes",
        "synchronize",
    ): "NCCL takes the sizes of an exchange from the host: one wait per layer and forward, behind queued work",
}
"""Why each place may wait, or does not wait although it looks like it."""


_METHODS = frozenset(
    {"item", "tolist", "cpu", "numpy", "nonzero", "bincount", "unique", "masked_select", "synchronize"}
)
"""Methods, or functions of torch, that wait whatever their arguments are."""


class Wait(NamedTuple):
    """A place that would wait if its tensor were on a GPU.

    Attributes:
        where: `module.function`; a method's has its class.
        what: The name that waits.
        line: Its line.
    """

    where: str
    what: str
    line: int


def host_waits(module: str, text: str) -> list[Wait]:
    """Returns the places of a file that wait, as far as its text shows. It cannot see
    `int(tensor)`, `if tensor:` and copies by `.to`: `tests/ranks/test_no_host_sync.py` does."""
    return sorted(_within(ast.parse(text), module))


def _within(node: ast.AST, where: str) -> Iterator[Wait]:
    for child in ast.iter_child_nodes(node):
        inside = where
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = f"{where}.{child.name}"
        what = _call(child) if isinstance(child, ast.Call) else _index(child)
        if what:
            yield Wait(where, what, child.lineno)  # type: ignore[attr-defined]
        yield from _within(child, inside)


def _call(call: ast.Call) -> str:
    if not isinstance(call.func, ast.Attribute):
        return ""
    name, given = call.func.attr, {keyword.arg for keyword in call.keywords}
    if name in _METHODS:
        return name
    if name == "repeat_interleave" and "output_size" not in given:
        return name
    of_torch = isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"
    if of_torch and name in ("tensor", "as_tensor") and "device" in given:
        return f"{name}(device=)"
    if of_torch and name == "where" and len(call.args) == 1:
        return "where"
    return ""


def _index(node: ast.AST) -> str:
    """Finds an index that is a comparison, its negation, or is named a mask."""
    if not isinstance(node, ast.Subscript):
        return ""
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    for part in parts:
        if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Invert):
            return "mask"
        if isinstance(part, ast.Compare) or (isinstance(part, ast.Name) and "mask" in part.id):
            return "mask"
    return ""


def found() -> dict[tuple[str, str], int]:
    """Returns the places that wait on the path of a step, and their lines."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]
    places = {}
    for path in [*paths, *(ROOT / file for file in FILES)]:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        places |= {(wait.where, wait.what): wait.line for wait in host_waits(module, path.read_text())}
    return places


def test_nothing_on_the_path_of_a_step_waits_for_the_device_unless_the_list_says_why() -> None:
    unknown = [
        f"{where}, line {line}: {what}" for (where, what), line in found().items() if (where, what) not in ALLOWED
    ]
    assert not unknown, "keep the value on the device, or say here why the host must have it"


def test_the_list_names_no_place_that_is_gone() -> None:
    assert not ALLOWED.keys() - found().keys()


def test_planted_waits_are_found() -> None:
    planted = [
        ("x.sum().item()", "item"),
        ("counts.tolist()", "tolist"),
        ("x.cpu()", "cpu"),
        ("torch.nonzero(x)", "nonzero"),
        ("x.nonzero()", "nonzero"),
        ("torch.bincount(x, minlength=3)", "bincount"),
        ("x.repeat_interleave(n)", "repeat_interleave"),
        ("torch.repeat_interleave(n)", "repeat_interleave"),
        ("torch.tensor([1, 2], device=x.device)", "tensor(device=)"),
        ("torch.where(x > 0)", "where"),
        ("torch.cuda.synchronize()", "synchronize"),
        ("x[x > 0]", "mask"),
        ("x[:, ~kept]", "mask"),
        ("x[label_mask]", "mask"),
    ]
    for text, what in planted:
        waits = host_waits("raypp.stages.models.planted", f"class A:\n    def f(self, x, n):\n        return {text}")
        assert [(wait.where, wait.what, wait.line) for wait in waits] == [("raypp.stages.models.planted.A.f", what, 3)]
