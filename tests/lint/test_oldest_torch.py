"""raypp uses no public name of torch that the oldest supported release, 2.11, lacks.

The pinned torch is newer, so `make test` does not notice such a name. The list is that of
all public names that were added since. `make test-torch211` compares it with both releases
(`tests/ranks/test_two_torches.py`). A file may use one if it also has its last part as a string:
it asks whether torch has it (`hasattr(F, "linear_cross_entropy")`).
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from torch_names import Source, read_sources

ROOT = Path(__file__).parents[2]
NEWER = frozenset((ROOT / "tests/lint/names_since_torch_2_11.txt").read_text().split())


def newer_uses(source: Source) -> list[str]:
    """Returns the uses of names that torch 2.11 lacks, without those that the file asks for."""
    asked = {node.value for node in source.nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    used = set(_names(source)) & NEWER
    return sorted(name for name in used if name.rstrip(")").replace("(", ".").rpartition(".")[2] not in asked)


def _names(source: Source) -> Iterator[str]:
    yield from source.imports.values()
    for node in source.nodes:
        if isinstance(node, ast.Attribute):
            yield source.dotted(node) or f".{node.attr}"
        elif isinstance(node, ast.Call):
            yield from (f"{source.dotted(node.func)}({keyword.arg})" for keyword in node.keywords)


def test_no_name_is_newer_than_the_oldest_supported_torch() -> None:
    found = {source.module: newer_uses(source) for source in read_sources(ROOT, ("raypp", "benchmarks"))}
    assert not {module: names for module, names in found.items() if names}, (
        "torch 2.11 lacks these: ask for the name first, or do without it"
    )


def test_planted_names_are_found() -> None:
    planted = [
        ("import torch.distributed as dist\ndist.all_gather_single()", "torch.distributed.all_gather_single"),
        ("from torch.nn.functional import linear_cross_entropy", "torch.nn.functional.linear_cross_entropy"),
        (
            "from torch.nn.attention.varlen import varlen_attn\nvarlen_attn(enable_gqa=True)",
            "torch.nn.attention.varlen.varlen_attn(enable_gqa)",
        ),
        ("def f(stage):\n    stage.set_separate_reduce_scatter_group()", ".set_separate_reduce_scatter_group"),
    ]
    for text, name in planted:
        assert newer_uses(Source.of("raypp.planted", text)) == [name]
