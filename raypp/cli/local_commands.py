"""`raypp local up | down | status`: controls the embedded cluster."""

from __future__ import annotations

import click

from raypp.cli.output import echo, echo_json
from raypp.clusters import local
from raypp.errors import EXIT_UNREACHABLE


@click.group("local")
def local_group() -> None:
    """Control a cluster on this machine: a Ray head and an S3 server, on the loopback interface."""


@local_group.command()
@click.option("--cpus", type=click.IntRange(1), default=None, help="CPU slots of Ray.  [default: max(8, cores)]")
def up(cpus: int | None) -> None:
    """Start the cluster, unless it is already running."""
    cluster, started = local.up(cpus)
    echo("the embedded cluster is up" if started else "the embedded cluster was already up")
    _describe(cluster)
    if not started and cpus not in (None, cluster.num_cpus):
        echo(f"--cpus {cpus} has no effect on a running cluster; run `raypp local down` first", err=True)


@local_group.command()
@click.option("--delete-data", is_flag=True, help="Also delete all data in its S3 server.")
def down(delete_data: bool) -> None:
    """Stop the cluster. Other Ray clusters are not affected."""
    ended = local.down(delete_data=delete_data)
    echo("the embedded cluster is down" if ended else "no embedded cluster was running")


@local_group.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(as_json: bool) -> None:
    """Show whether the cluster is running, and its addresses.  Exits with code 3 if it is not."""
    cluster = local.find()
    if as_json:
        facts = {"dashboard": cluster.dashboard, "s3": cluster.s3.endpoint, "cpus": cluster.num_cpus} if cluster else {}
        echo_json({"up": cluster is not None, **facts})
    elif cluster is None:
        echo("no embedded cluster is running; start it with `raypp local up`")
    else:
        echo("the embedded cluster is up")
        _describe(cluster)
    if cluster is None:
        raise SystemExit(EXIT_UNREACHABLE)


def _describe(cluster: local.LocalCluster) -> None:
    echo(f"  Ray dashboard  {cluster.dashboard}  (log in with the token in {cluster.token_path})")
    echo(f"  S3 server      {cluster.s3.endpoint}  bucket {local.BUCKET}, keys in {cluster.s3.directory}/s3.json")
    echo(f"  CPU slots      {cluster.num_cpus}  (logical; ranks can outnumber cores and then share them)")
