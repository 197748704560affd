"""`python -m cluster.testbed`: test beds from the command line."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from typing import Any

import click

from cluster.testbed import bed
from cluster.testbed.bed import TestBed
from cluster.testbed.network import Cut, instances
from raypp.cli.output import show_error
from raypp.errors import RayppError

_name = click.argument("name")
_host = click.argument("host", type=int)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def testbed() -> None:
    """Emulates several hosts on one machine, to try a job on a network like yours. Needs root."""


@testbed.command()
@_name
@click.option("--hosts", "-n", default=2, show_default=True, help="Number of hosts; host 0 is the Ray head.")
@click.option("--rate", default="1gbit", show_default=True, help="Rate per cable and direction: 38mbit, 1gbit, none.")
@click.option("--cpus", default=2, show_default=True, help="CPU slots of each host's Ray node.")
@click.option("--no-ray", is_flag=True, help="Hosts and cables only.")
@click.option("--no-store", is_flag=True, help="No S3 server.")
@click.option("--pin", is_flag=True, help="Give each host one core of this machine.")
def up(name: str, hosts: int, rate: str, cpus: int, no_ray: bool, no_store: bool, pin: bool) -> None:
    """Create hosts, cables, Ray nodes and an S3 server."""
    made = TestBed.up(name, hosts=hosts, rate=rate, cpus=cpus, ray=not no_ray, store=not no_store, pin=pin)
    click.echo(f"the test bed {name} is up: {hosts} hosts, {rate} each way")
    _show(made)
    click.echo(f'use it:  eval "$(python -m cluster.testbed env {name})"; raypp submit JOB')
    click.echo(f"stop it: python -m cluster.testbed down {name}")


@testbed.command()
@click.argument("name", required=False)
@click.option("--all", "everything", is_flag=True, help="All test beds on this machine.")
def down(name: str | None, everything: bool) -> None:
    """Stop a test bed and remove everything it created, even after a crash."""
    if not name and not everything:
        raise click.UsageError("give a NAME or --all")
    for one in instances() if everything else [str(name)]:
        click.echo(f"the test bed {one} is down" if bed.remove(one) else f"there was no test bed {one}")


@testbed.command()
@click.argument("name", required=False)
def status(name: str | None) -> None:
    """Show hosts, cables and processes; without NAME, list the test beds."""
    if name is None:
        click.echo("\n".join(instances()) or "there is no test bed")
    else:
        _show(TestBed.open(name))


@testbed.command()
@_name
def env(name: str) -> None:
    """Print shell lines that make `raypp` use the bed's cluster and store. They contain keys."""
    for variable, value in TestBed.open(name).environment().items():
        click.echo(f"export {variable}={shlex.quote(value)}")


@testbed.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@_name
@_host
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def exec(name: str, host: int, command: tuple[str, ...]) -> None:
    """Run COMMAND on HOST, with the bed's environment."""
    opened = TestBed.open(name)
    line = opened.command(host, command)
    os.execvpe(line[0], line, opened.with_environment())


@testbed.command()
@_name
@_host
@click.option(
    "--one-way", type=click.Choice(["out", "in"]), help="Drop only what it sends, or only what is sent to it."
)
def cut(name: str, host: int, one_way: str | None) -> None:
    """Cut HOST's cable."""
    TestBed.open(name).cut(host, Cut(one_way) if one_way else Cut.BOTH)


@testbed.command()
@_name
@_host
@click.argument("rate")
def rate(name: str, host: int, rate: str) -> None:
    """Limit HOST's cable to RATE."""
    TestBed.open(name).set_rate(host, rate)


@testbed.command()
@_name
@_host
@click.option("--silently", is_flag=True, help="Cut its cable first, so that no other host notices, as in a power cut.")
def kill(name: str, host: int, silently: bool) -> None:
    """Kill every process of HOST."""
    TestBed.open(name).kill(host, silently=silently)


def _plain(word: str, text: str, act: Callable[[TestBed, int], Any]) -> None:
    @testbed.command(word, help=text)
    @_name
    @_host
    def command(name: str, host: int) -> None:
        act(TestBed.open(name), host)


_plain("heal", "Repair HOST's cable. A node that Ray has declared dead also needs `start`.", TestBed.heal)
_plain("freeze", "Stop every process of HOST (SIGSTOP).", TestBed.freeze)
_plain("thaw", "Continue the processes of HOST (SIGCONT).", TestBed.thaw)
_plain("start", "Start HOST's Ray node again.", TestBed.start)


def _show(shown: TestBed) -> None:
    for one in shown.status():
        node = {True: "in the cluster", False: "not in the cluster", None: "–"}[one["ray"]]
        frozen = ", frozen" if one["frozen"] else ""
        click.echo(
            f"  {one['hostname']:<12} {one['address']:<12} {one['cable']:<24} "
            f"{one['processes']} processes{frozen}, Ray: {node}"
        )
    if shown.ray:
        click.echo(f"  dashboard  {shown.address}  (token in {shown.token_path})")
    if shown.store:
        click.echo(f"  S3 server  {shown.store.endpoint}  bucket {bed.BUCKET}")


def main() -> None:
    """Runs one command; prints errors that the user can fix without a traceback."""
    try:
        testbed.main(prog_name="python -m cluster.testbed", standalone_mode=True)
    except RayppError as error:
        show_error(error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
