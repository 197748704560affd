"""Commands about the job language: explain, schema, list-kinds. None needs a cluster."""

from __future__ import annotations

import shutil
import textwrap

import click

from raypp.cli.output import echo, echo_json, echo_lines, styled
from raypp.errors import JobError


@click.command("explain")
@click.argument("section", required=False)
def explain_command(section: str | None) -> None:
    """Explain the job file, one SECTION (pipeline.wire) or one key (mesh.pp)."""
    from raypp.spec.explain import explain

    columns = shutil.get_terminal_size((88, 24)).columns
    echo_lines(explain(section, width=max(50, min(columns, 100))), nl=False)


@click.command("schema")
def schema_command() -> None:
    """Print the job file's JSON Schema.

    Editors with yaml-language-server check and complete a job file that begins with

    \b
        # yaml-language-server: $schema=raypp.schema.json

    after `raypp schema > raypp.schema.json`.
    """
    from raypp.spec.explain import schema

    echo_json(schema(), indent=2)


@click.command("list-kinds")
@click.argument("key", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_kinds_command(key: str | None, as_json: bool) -> None:
    """List the models, data sources, schedules, optimizers, policies, trackers and stores.

    With KEY (model.kind), list only the kinds of that key.
    """
    from raypp.kinds import STORES
    from raypp.spec.availability import CHOICES

    every = {name: choice.kinds for name, choice in CHOICES.items()} | {"checkpoint.url": lambda: iter(STORES)}
    if key is not None and key not in every:
        matching = [known for known in every if known.startswith(key)]
        if len(matching) != 1:
            raise JobError(f"{key!r} is not a key with kinds", f"use one of {', '.join(every)}")
        key = matching[0]
    kinds = {
        name: [(kind.name, kind.available, kind.summary) for kind in listed()]
        for name, listed in every.items()
        if key in (None, name)
    }
    if as_json:
        document = {
            name: [{"name": kind, "available": ready, "summary": summary} for kind, ready, summary in rows]
            for name, rows in kinds.items()
        }
        echo_json(document, indent=2)
        return
    columns = min(shutil.get_terminal_size((100, 24)).columns, 120)
    for position, (name, rows) in enumerate(kinds.items()):
        if position:
            echo()
        echo(styled(name, bold=True))
        longest = max(len(kind) for kind, _, _ in rows)
        for kind, ready, summary in rows:
            text = summary if ready else f"not available yet: {summary}"
            first, later = f"  {kind:<{longest}}  ", " " * (longest + 4)
            row = textwrap.fill(text, columns, initial_indent=first, subsequent_indent=later)
            echo_lines(row if ready else styled(row, dim=True))
