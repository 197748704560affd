"""`raypp data show`: data as a run reads them; `tokenize`: token shards. No torch, no cluster."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import click
import yaml
from rich.rule import Rule

from raypp.api.checked_job import load_checked_job
from raypp.cli.console import Console, Lines, Table, Text, progress_bar
from raypp.cli.options import job_argument
from raypp.cli.output import echo, echo_json, echo_lines
from raypp.control.clusters.find import lend_store_settings
from raypp.environment import usable_cores
from raypp.errors import DataError, JobError, RayppError, size_text
from raypp.job.checks import check_spec
from raypp.job.job import Job
from raypp.job.job_file import load_job
from raypp.storage import open_for_others
from raypp.untrusted.text import shell_word

if TYPE_CHECKING:  # NumPy, which `--help` does not need
    from raypp.rank.data.look import Look, LookedPiece
    from raypp.rank.data.shard_format import Manifest
    from raypp.rank.data.tokenizer import Tokenizer
    from raypp.rank.data.write_shards import Output

_LOSS = ("green", "bright_green")
_NO_LOSS = ("bright_black", "white")
_TOO_LONG = "yellow"
_MOST_CHARACTERS = 1500
_BAR = 40


@click.command("tokenize")
@job_argument
@click.option("--out", required=True, metavar="DIR_OR_URL", help="Folder of the token shards, or its URL in a store.")
@click.option("--processes", type=click.IntRange(1, 256), help="Processes that tokenise.  [default: one per CPU]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def tokenize_command(job: Path, overrides: tuple[str, ...], out: str, processes: int | None, as_json: bool) -> None:
    """Tokenise the data of JOB once, into shards that any run reads without copying them.

    Train on them with the `data:` section that it prints: the rows are the same. Each part of a
    mixture gets its own folder below --out. If the command is killed, run it again: it continues.
    """
    from raypp.rank.data.write_shards import outputs_of, section_of_shards

    file = load_job(job, overrides)
    problems = [problem for problem in check_spec(file.job, file.directory) if problem.key.startswith("data")]
    if problems:
        raise JobError(file.locate(problem) for problem in problems)
    lend_store_settings()
    made: list[tuple[Output, str, Manifest]] = []
    for output in outputs_of(file.job):
        try:
            url, manifest = _written(output, out, processes or usable_cores())
        except DataError as error:
            raise DataError(file.locate(problem) for problem in error.problems) from error
        made.append((output, url, manifest))
        if not as_json:
            name = f"{output.name}: " if output.name else ""
            held = f"{manifest.documents:,} documents, {manifest.tokens:,} tokens, {size_text(manifest.size)}"
            echo(f"{name}{held} in {len(manifest.shards)} shard{'s' if len(manifest.shards) != 1 else ''}")
    section = section_of_shards(file.job, {output.key: url for output, url, _ in made})
    if as_json:
        echo_json({"outputs": [_output_document(*one) for one in made], "data": section})
    elif [output.key for output, _, _ in made] == ["data"]:
        echo(f"  train on them: --set data.kind=tokens --set {shell_word('data.path=' + made[0][1])}")
    else:
        echo("train on them with this section:")
        echo_lines(yaml.safe_dump({"data": section}, sort_keys=False, allow_unicode=True), nl=False)


def _written(output: Output, out: str, processes: int) -> tuple[str, Manifest]:
    """Writes the shards of one source; returns their path or URL, and what they are."""
    from raypp.rank.data.write_shards import Options, write_shards

    def say_stored(shards: int) -> None:
        if shards:
            name = f"{output.name}: " if output.name else ""
            echo(f"{name}keeps {shards} finished shard{'s' if shards != 1 else ''}", err=True)

    place = f"{out.rstrip('/')}/{output.name}" if output.name else out
    with open_for_others(place) as store, progress_bar(f"tokenising {output.name}".rstrip()) as advance:
        options = Options(
            processes,
            total=lambda size: advance(total=size),
            progress=advance,
            stored=say_stored,
            remarked=lambda remark: echo(f"note: {remark}", err=True),
        )
        return store.url.removeprefix("file://"), write_shards(output.read, output.request, store, options)


def _output_document(output: Output, url: str, made: Manifest) -> dict[str, object]:
    facts = {"documents": made.documents, "tokens": made.tokens, "shards": len(made.shards), "bytes": made.size}
    return {"key": output.key, "out": url, **facts, "dtype": made.plan.dtype, "digest": made.digest}


@click.group("data")
def data_group() -> None:
    """Look at a job's data before training, and tokenise it once."""


data_group.add_command(tokenize_command)


@data_group.command("show")
@job_argument
@click.option("--rows", type=click.IntRange(1, 1000), default=2, show_default=True, help="Rows to show.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with the ids of the rows.")
def show_command(job: Path, overrides: tuple[str, ...], rows: int, as_json: bool) -> None:
    """Show the first rows that JOB would train on, and what packing makes of its documents.

    Green text carries loss: the model learns to write it. Two shades tell one token from the next.
    Reads all of the data, as a run would.
    """
    file = load_checked_job(job, overrides)
    lend_store_settings()
    from raypp.rank.data.look import look_at
    from raypp.state.hf.model_files import HfFiles
    from raypp.state.hf.unused_tensors import unused_weights

    try:
        look = look_at(file.job, rows)
    except DataError as error:
        raise DataError(file.locate(problem) for problem in error.problems) from error
    if (model := file.job.model).from_hf:
        with suppress(RayppError):  # of weights that cannot be read the run tells
            unused = unused_weights(HfFiles(model.from_hf), model)
            look = replace(look, remarks=(*look.remarks, *filter(None, [unused])))
    if as_json:
        echo_json(_document(look, file.job))
    else:
        _show(look, file.job, Console())


def _document(look: Look, job: Job) -> dict[str, object]:
    return {
        "documents": look.documents,
        "tokens": look.tokens,
        "loss_tokens": look.loss_tokens,
        "not_trained": look.untrained,
        "before_text": look.around[0],
        "after_text": look.around[1],
        "parts": [{"name": name, "documents": count, "tokens": size} for name, (count, size) in look.parts.items()],
        "seq_len": job.data.seq_len,
        "too_long": {"documents": look.too_long, "are": "dropped" if job.data.too_long == "drop" else "cut"},
        "remarks": [*look.tokenizer.remarks, *look.remarks],
        "rows": look.rows,
        "fill": look.fill,
        "sampled": look.sampled,
        "lengths": [
            {"above": look.edges[i], "up_to": look.edges[i + 1], "documents": count}
            for i, count in enumerate(look.counts)
        ],
        "first_rows": [
            [{"ids": piece.ids.tolist(), "loss": piece.loss.astype(int).tolist()} for piece in row]
            for row in look.first
        ],
    }


def _show(look: Look, job: Job, console: Console) -> None:
    for number, row in enumerate(look.first, start=1):
        _show_row(number, row, look, job, console)
    about = "about " if look.sampled else ""
    facts = Table.grid(padding=(0, 2))
    share = look.loss_tokens / look.tokens
    facts.add_row("documents", f"{look.documents:,}")
    facts.add_row("tokens", f"{look.tokens:,}; {share:.1%} of them carry loss")
    if look.untrained_in_words:
        facts.add_row("", Text(look.untrained_in_words))
    begin, end = look.around
    facts.add_row("texts", f"begin with {begin}, end with {end}" if begin else f"end with {end}")
    for remark in look.tokenizer.remarks:
        facts.add_row("", Text(remark, _TOO_LONG))
    for name, (count, size) in look.parts.items():
        facts.add_row(f"  {name}", f"{count:,} documents, {size:,} tokens")
    facts.add_row("rows", f"{about}{look.rows:,} of {job.data.seq_len} tokens an epoch, {about}{look.fill:.1%} full")
    if look.too_long:
        facts.add_row("too long", Text(look.too_long_in_words, _TOO_LONG))
    for number, remark in enumerate(look.remarks):
        facts.add_row("" if number else "note", Text(remark, _TOO_LONG))
    console.print(Rule("all documents", style="bright_black"))
    console.print(facts)
    console.print()
    console.print(_histogram(look, job.data.seq_len))


def _show_row(number: int, row: list[LookedPiece], look: Look, job: Job, console: Console) -> None:
    tokens, loss = sum(len(piece.ids) for piece in row), sum(int(piece.loss.sum()) for piece in row)
    title = f"row {number}: {tokens} of {job.data.seq_len} tokens, {loss} carry loss"
    console.print(Rule(title, style="bright_black"))
    room = _MOST_CHARACTERS
    for index, piece in enumerate(row):
        if room <= 0:
            console.print(Text(f"… and {len(row) - index} more documents", "bright_black"))
            break
        text = _piece_text(piece, look.tokenizer, room, plain=console.color_system is None)
        room -= len(text)
        if text.plain.endswith("\n"):
            text.right_crop(1)
        begin = "▌ " if piece.start == 0 else f"▌ from token {piece.start} on: "
        console.print(Lines(begin, "cyan") + text)


def _piece_text(piece: LookedPiece, tokenizer: Tokenizer, room: int, plain: bool) -> Lines:
    """Returns the tokens of a piece in their colours; without colours in «», if they carry loss."""
    text = Lines()
    every = bool(piece.loss.all())
    borders = [0, *(i for i in range(1, len(piece.ids)) if piece.loss[i] != piece.loss[i - 1]), len(piece.ids)]
    for start, end in pairwise(borders):
        carries = bool(piece.loss[start])
        shown = tokenizer.shown(piece.ids[start:end].tolist())
        left = room - len(text)
        if len(shown) > left:
            text.append(shown[:left], (_LOSS if carries else _NO_LOSS)[0])
            text.append("…", "bright_black")
            break
        if plain:
            text.append(f"«{shown}»" if carries and not every else shown)
        else:
            _append_tokens(text, shown, piece.ids[start:end].tolist(), tokenizer, _LOSS if carries else _NO_LOSS)
    return text


def _append_tokens(text: Lines, shown: str, ids: list[int], tokenizer: Tokenizer, styles: tuple[str, str]) -> None:
    tokens = [tokenizer.shown([one]) for one in ids]
    if len(tokens) == len(shown) or "".join(tokens) != shown:  # bytes, or characters of several tokens
        text.append(shown, styles[1])
        return
    for index, token in enumerate(tokens):
        text.append(token, styles[index % 2])


def _histogram(look: Look, seq_len: int) -> Table:
    most = max(look.counts)
    table = Table("tokens", "documents", "", right=("tokens", "documents"))
    for low, high, count in zip(look.edges, look.edges[1:], look.counts, strict=False):
        style = _TOO_LONG if low >= seq_len else "cyan"
        bar = "█" * max(round(_BAR * count / most), 1 if count else 0)
        table.add_row(f"{low + 1:,} – {high:,}", f"{count:,}", Text(bar, style))
    return table
