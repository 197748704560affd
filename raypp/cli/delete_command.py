"""`raypp delete`: remove a run from its store."""

from __future__ import annotations

import click

from raypp.api.run import Run
from raypp.cli.output import confirmed, echo
from raypp.errors import size_text


@click.command("delete")
@click.argument("run")
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def delete_command(run: str, dry_run: bool, yes: bool) -> None:
    """Delete RUN: its checkpoints, records and logs, after it has ended."""
    found = Run.find(run)
    facts = found.delete(dry_run=True)
    what = f"{size_text(facts['bytes'])}: {len(facts['checkpoints'])} checkpoints, {facts['objects']} objects"
    what += f" below {found.place.url.rstrip('/')}/{found.name}"
    what += f" ({facts['left']} others there, which the run did not write, stay)" if facts["left"] else ""
    if dry_run or not yes:
        echo(f"{found.name}: would free {what}")
    if dry_run:
        return
    if yes or confirmed("Delete it?"):
        found.delete()
        echo(f"{found.name}: freed {what}")
