"""`raypp queue`: who waits for devices and who has them."""

import time
from typing import Any

import click

from raypp.api.queue import cancel_waiting, move, queue
from raypp.cli.console import Console, Table, Text
from raypp.cli.output import echo, echo_json
from raypp.control.clusters.find import find_cluster
from raypp.control.queue import client
from raypp.control.queue.ticket import rules_in_words
from raypp.state.run_records.status import date_and_clock, duration

_WATCH_S = 5.0


@click.group("queue", invoke_without_command=True)
@click.option("--address", metavar="A", help="URL of the cluster's dashboard, as for `raypp submit`.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (with --watch: one line each).")
@click.option("--watch", "-w", is_flag=True, help="Show it again every five seconds, until Ctrl-C.")
@click.pass_context
def queue_group(context: click.Context, address: str | None, as_json: bool, watch: bool) -> None:
    """Show the runs that wait for devices, in order, and those that have them.

    Users' names are what they say of themselves; nothing checks them.
    """
    context.obj = address
    while context.invoked_subcommand is None:
        (echo_json if as_json else _show)(queue(address))
        if not watch:
            return
        time.sleep(_WATCH_S)


@queue_group.command("cancel")
@click.argument("name")
@click.pass_obj
def cancel_command(address: str | None, name: str) -> None:
    """Take the run NAME, or URL/NAME, out of the line, and free its name."""
    gone = cancel_waiting(name, address)
    echo(f"{gone['run']} is out of the line; {gone['kept'] or 'its name is free'}")


@queue_group.command("move")
@click.argument("name")
@click.option("--before", required=True, metavar="NAME", help="The run that is to come after it.")
@click.pass_obj
def move_command(address: str | None, name: str, before: str) -> None:
    """Move the run NAME, or URL/NAME, directly before another that waits.

    No run passes one of higher priority.
    """
    move(name, before, address)
    echo(f"{name} is now before {before}")


@queue_group.command("pause")
@click.pass_obj
def pause_command(address: str | None) -> None:
    """Start no run of the line, and let new ones wait in it, until `raypp queue resume`."""
    client.pause(find_cluster(address), client.user_name(None))
    echo("the line is paused; `raypp queue resume` ends that")


@queue_group.command("resume")
@click.pass_obj
def resume_command(address: str | None) -> None:
    """End the pause of the line."""
    echo("the line goes on" if client.pause(find_cluster(address), None) else "the line was not paused")


@queue_group.command("hold")
@click.argument("node")
@click.option("--until", metavar="TIME", help='Local: 18:00, or "2026-12-31 18:00".  [default: until it is released]')
@click.pass_obj
def hold_command(address: str | None, node: str, until: str | None) -> None:
    """Start no run of the line on NODE: its address or host name.

    Runs that are there go on. `raypp submit --now` can still use it.
    """
    end = None if until is None else client.time_of(until)
    held = client.hold(find_cluster(address), node, client.user_name(None), end)
    when = "`raypp queue release` ends that" if end is None else f"until {date_and_clock(end)}"
    echo(f"{', '.join(held)} is held: {when}")


@queue_group.command("release")
@click.argument("node")
@click.pass_obj
def release_command(address: str | None, node: str) -> None:
    """End the hold on NODE."""
    echo(f"{', '.join(client.hold(find_cluster(address), node, None))} is free for the line")


def _show(shown: dict[str, Any]) -> None:
    console = Console()
    if shown["running"]:
        console.print(_table("running", shown["running"], "expected_end"))
    if shown["waiting"]:
        console.print(_table("waiting", shown["waiting"], "expected_start"))
        console.print(Text(shown["why"]))
    elif not shown["running"]:
        echo("no run waits, and none has devices")
    for words in rules_in_words(shown):
        echo(words)
    for damage in shown["damaged"]:
        echo(damage, err=True)


def _table(head: str, rows: list[dict[str, Any]], expected: str) -> Table:
    table = Table(head, "user", "priority", "devices", "since", expected.replace("_", " "), right=(), folded=(head,))
    for row in rows:
        devices = row.get("needs") or (f"{row['gpus']:g} GPU" if row["gpus"] else f"{row['cpus']:g} CPU")
        since = "–" if row["since"] is None else f"{duration(time.time() - row['since'])} ago"
        name = Text(f"{row['place']}. {row['run']}" if "place" in row else row["run"], style="bold")
        when = f"after {', '.join(row['after'])}" if row.get("after") else _when(row[expected])
        table.add_row(name, row["user"] or "–", row.get("priority", "–"), devices, since, when)
    return table


def _when(when: float | None) -> str:
    return "unknown" if when is None else f"in {duration(when - time.time())}"
