"""`raypp report`: writes one HTML page about a run, or about two side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from raypp.api.find_run import find_run
from raypp.api.report.collect import collect
from raypp.api.report.page import page
from raypp.cli.output import echo, write_file
from raypp.errors import JobError, Problem
from raypp.planning.stored_bytes import size_text


@click.command("report")
@click.argument("runs", nargs=-1, required=True, metavar="RUN [RUN]")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("report.html"),
    show_default=True,
    help="The file to write.",
)
def report_command(runs: tuple[str, ...], out: Path) -> None:
    """Write one HTML page about RUN, or about two runs side by side.

    The page needs nothing else: it works offline, on a phone, and in an e-mail.
    """
    if len(runs) > 2:
        raise JobError(Problem("RUN", f"{len(runs)} runs are named; a page shows one or two", "name one or two"))
    found = [collect(*find_run(run)) for run in runs]
    if len(found) == 2 and found[0].title == found[1].title:
        found = [replace(run, title=f"{run.title} ({run.url})") for run in found]
    content = page(found).encode("utf-8", "replace")
    write_file(out, content)
    echo(f"wrote {out} ({size_text(len(content))})")
