"""`raypp checkpoints show | diff`: show the contents of a checkpoint, and compare two."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from typing import Any

import click

from raypp.api.checkpoints import open_checkpoint
from raypp.checkpoint.commit import Commit
from raypp.checkpoint.diff import Comparison, diff_checkpoints
from raypp.checkpoint.layout import step_folder
from raypp.checkpoint.saved_tensors import TensorInfo
from raypp.checkpoint.tensor_file import OPTIMIZER
from raypp.cli.console import Table, Text, progress_bar, wide_console
from raypp.cli.output import echo, echo_json, echo_lines, say, styled
from raypp.errors import EXIT_OK, EXIT_RUN_FAILED
from raypp.observe.status import date_and_clock, mesh_text
from raypp.planning.stored_bytes import size_text
from raypp.storage import ObjectStore
from raypp.untrusted.text import visible

_SHOWN = 20
_WIDEST = 80


@click.command("show")
@click.argument("run")
@click.option("--all", "everything", is_flag=True, help="Include the tensors of the optimizer's state.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with all tensors.")
def show_command(run: str, everything: bool, as_json: bool) -> None:
    """Show the contents of a checkpoint of RUN (the newest, or RUN/step-N): mesh, sizes, tensors.

    Reads and checks headers, but not the tensors' data.
    """
    store, commit, saved = open_checkpoint(run, say)
    tensors = saved.infos
    if as_json:
        echo_json(_facts(store, commit, tensors))
        return
    console = wide_console()
    place = f"{store.url}/{step_folder(commit.run, commit.step)}"
    console.print(Text.assemble((f"{commit.run}, step {commit.step}", "bold"), f"  {place}"))
    facts = f"attempt {commit.attempt}, {mesh_text(commit.mesh)}, written {date_and_clock(commit.created)}, "
    facts += f"{size_text(commit.size)} in {len(commit.objects)} objects"
    console.print(facts)
    shown = [info for info in tensors.values() if everything or not info.name.startswith(OPTIMIZER)]
    _print_tensors(shown)
    left = [info for name, info in tensors.items() if name.startswith(OPTIMIZER)]
    if left and not everything:
        size = size_text(sum(info.bytes for info in left))
        console.print(f"and {len(left)} tensors of the optimizer, {size}: --all shows them", style="dim")


@click.command("diff")
@click.argument("a")
@click.argument("b")
@click.option("--no-optimizer", is_flag=True, help="Compare only the model.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def diff_command(a: str, b: str, no_optimizer: bool, as_json: bool) -> int:
    """Compare two checkpoints, A and B, tensor by tensor. Their meshes may differ.

    Each is RUN, URL/NAME or URL/NAME/step-N; without a step, the newest. Exits with code 0 if all
    bits are equal, else with code 1.
    """
    (store_a, commit_a, tensors_a), (store_b, commit_b, tensors_b) = open_checkpoint(a, say), open_checkpoint(b, say)
    with progress_bar("comparing", commit_a.size) as advance:
        comparison = diff_checkpoints(tensors_a, tensors_b, optimizer=not no_optimizer, progress=advance)
    if as_json:
        facts = {
            "a": f"{store_a.url}/{step_folder(commit_a.run, commit_a.step)}",
            "b": f"{store_b.url}/{step_folder(commit_b.run, commit_b.step)}",
            "same": comparison.same,
            "equal": comparison.equal,
            "only_a": comparison.only_a,
            "only_b": comparison.only_b,
            "other_form": [
                {"name": left.name, "a": _form(left), "b": _form(right)} for left, right in comparison.other_form
            ],
            "different": [asdict(difference) for difference in comparison.different],
        }
        echo_json(facts)
    else:
        _tell(comparison)
    return EXIT_OK if comparison.same else EXIT_RUN_FAILED


def _facts(store: ObjectStore, commit: Commit, tensors: dict[str, TensorInfo]) -> dict[str, Any]:
    return {
        "run": commit.run,
        "step": commit.step,
        "checkpoint": f"{store.url}/{step_folder(commit.run, commit.step)}",
        "attempt": commit.attempt,
        "mesh": commit.mesh,
        "created": commit.created,
        "bytes": commit.size,
        "data_position": commit.extra.get("data_position"),
        "objects": [{"key": one.key, "bytes": one.size, "rank": one.rank} for one in commit.objects],
        "tensors": [
            {"name": one.name, "dtype": one.dtype, "shape": one.shape, "bytes": one.bytes, "ranks": one.ranks}
            for one in tensors.values()
        ],
    }


def _print_tensors(tensors: list[TensorInfo]) -> None:
    """Prints one line per tensor. There may be tens of thousands: Rich takes a ms for each."""
    rows = [("tensor", "dtype", "shape", "size", "on ranks")]
    for info in tensors:
        shape = " × ".join(map(str, info.shape)) or "scalar"
        rows.append((visible(info.name), info.dtype.lower(), shape, size_text(info.bytes), _ranges(info.ranks)))
    name, kind, form, size, _ = (min(_WIDEST, max(map(len, column))) for column in zip(*rows, strict=True))
    head, *lines = (
        f"{words[0]:<{name}}  {words[1]:<{kind}}  {words[2]:<{form}}  {words[3]:>{size}}  {words[4]}" for words in rows
    )
    echo(styled(head, bold=True))
    echo_lines("\n".join(lines), nl=bool(lines))


def _ranges(ranks: tuple[int, ...]) -> str:
    """Formats ranks as `0–3, 6`."""
    texts = []
    for _, group in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in group]
        texts.append(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}")
    return ", ".join(texts)


def _form(info: TensorInfo) -> dict[str, Any]:
    return {"dtype": info.dtype, "shape": info.shape}


def _tell(comparison: Comparison) -> None:
    console = wide_console()
    for title, names in (("only in A", comparison.only_a), ("only in B", comparison.only_b)):
        if names:
            echo(f"{title}: {', '.join(names[:_SHOWN])}{_more(len(names))}")
    for left, right in comparison.other_form[:_SHOWN]:
        echo(f"{left.name}: {left.dtype} {list(left.shape)} in A, {right.dtype} {list(right.shape)} in B")
    if len(comparison.other_form) > _SHOWN:
        echo(f"…{_more(len(comparison.other_form))}")
    if comparison.different:
        numbers = ("elements", "max |a − b|", "relative")
        table = Table("values differ", *numbers, right=numbers)
        largest = sorted(comparison.different, key=lambda one: (-one.max_rel, -one.max_abs))
        for one in largest[:_SHOWN]:
            table.add_row(one.name, f"{one.elements} of {one.of}", f"{one.max_abs:.3g}", f"{one.max_rel:.3g}")
        console.print(table)
        if len(largest) > _SHOWN:
            echo(f"…{_more(len(largest))}")
    count = len(comparison.different) + len(comparison.only_a) + len(comparison.only_b) + len(comparison.other_form)
    echo(f"{comparison.equal} tensors are bitwise equal, {count} are not")


def _more(count: int) -> str:
    return f" and {count - _SHOWN} more" if count > _SHOWN else ""
