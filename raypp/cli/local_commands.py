"""`raypp local up | down | status`: the embedded cluster of a laptop."""

from __future__ import annotations

import json

import click

from raypp.clusters import local
from raypp.errors import EXIT_UNREACHABLE


@click.group("local")
def local_group() -> None:
    """An embedded cluster on this machine: a Ray head and an S3 server, on loopback."""


@local_group.command()
@click.option("--cpus", type=click.IntRange(1), default=None, help="CPU slots Ray hands out.  [default: max(8, cores)]")
def up(cpus: int | None) -> None:
    """Start it (or say that it runs)."""
    cluster, started = local.up(cpus)
    click.echo("the embedded cluster is up" if started else "the embedded cluster was up already")
    _describe(cluster)
    if not started and cpus not in (None, cluster.num_cpus):
        click.echo(f"--cpus {cpus} has no effect on a running cluster; `raypp local down` first", err=True)


@local_group.command()
@click.option("--delete-data", is_flag=True, help="Also delete everything in its S3 server.")
def down(delete_data: bool) -> None:
    """End it, and nothing else."""
    ended = local.down(delete_data=delete_data)
    click.echo("the embedded cluster is down" if ended else "no embedded cluster was running")


@local_group.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def status(as_json: bool) -> None:
    """Say whether it runs, and where.  Exit code 3 when it does not."""
    cluster = local.find()
    if as_json:
        facts = {"dashboard": cluster.dashboard, "s3": cluster.s3.endpoint, "cpus": cluster.num_cpus} if cluster else {}
        click.echo(json.dumps({"up": cluster is not None, **facts}))
    elif cluster is None:
        click.echo("no embedded cluster is running; start it with `raypp local up`")
    else:
        click.echo("the embedded cluster is up")
        _describe(cluster)
    if cluster is None:
        raise SystemExit(EXIT_UNREACHABLE)


def _describe(cluster: local.LocalCluster) -> None:
    click.echo(f"  Ray dashboard  {cluster.dashboard}  (it asks for the token in {cluster.token_path})")
    click.echo(f"  S3 server      {cluster.s3.endpoint}  bucket {local.BUCKET}, keys in {cluster.s3.directory}/s3.json")
    click.echo(f"  CPU slots      {cluster.num_cpus}  (logical: ranks may outnumber cores; they take turns)")
