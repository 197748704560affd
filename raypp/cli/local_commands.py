"""`raypp local up | down | status`: controls the embedded cluster."""

from __future__ import annotations

import click

from raypp.cli.output import echo, echo_json
from raypp.clusters import local
from raypp.clusters.prometheus import find_prometheus
from raypp.errors import EXIT_UNREACHABLE


@click.group("local")
def local_group() -> None:
    """Control a cluster on this machine: a Ray head, an S3 server and, where it is installed,
    Prometheus, on the loopback interface."""


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
@click.option("--delete-data", is_flag=True, help="Also delete all data in its S3 server and Prometheus.")
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
        echo_json({"up": cluster is not None, **(_facts(cluster) if cluster else {})})
    elif cluster is None:
        echo("no embedded cluster is running; start it with `raypp local up`")
    else:
        echo("the embedded cluster is up")
        _describe(cluster)
    if cluster is None:
        raise SystemExit(EXIT_UNREACHABLE)


def _facts(cluster: local.LocalCluster) -> dict[str, object]:
    return {
        "dashboard": cluster.dashboard,
        "s3": cluster.s3.endpoint,
        "prometheus": cluster.prometheus_url() if cluster.has_prometheus() else None,
        "cpus": cluster.num_cpus,
    }


def _describe(cluster: local.LocalCluster) -> None:
    echo(f"  Ray dashboard  {cluster.dashboard}  (log in with the token in {cluster.token_path})")
    echo(f"  S3 server      {cluster.s3.endpoint}  bucket {local.BUCKET}, keys in {cluster.s3.directory}/s3.json")
    echo(f"  Prometheus     {_prometheus(cluster)}")
    echo(f"  CPU slots      {cluster.num_cpus}  (logical; ranks can outnumber cores and then share them)")


def _prometheus(cluster: local.LocalCluster) -> str:
    if cluster.has_prometheus():
        return f"{cluster.prometheus_url()}  scrapes Ray's metrics and those of the runs"
    if find_prometheus() is None:
        return "not installed; install `prometheus` (Debian, Homebrew), then run `raypp local up` again"
    if not cluster.prometheus_port:
        return "none: an older raypp started this cluster; run `raypp local down`, then `raypp local up`"
    return f"not running; see {local.directory() / 'prometheus' / 'prometheus.log'}, then run `raypp local up`"
