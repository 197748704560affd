"""Finds the cluster that a command uses: `--address`, RAYPP_ADDRESS, or the embedded one."""

from __future__ import annotations

import os
from dataclasses import dataclass

from raypp.clusters import local
from raypp.clusters.dashboard import Dashboard, dashboard_url, token_from_environment
from raypp.errors import Problem, UnreachableError
from raypp.kinds import STORES


@dataclass(frozen=True)
class Cluster:
    """A cluster that a command can use.

    Attributes:
        address: `http://host:port` of its dashboard.
        dashboard: Client of the dashboard.
        embedded: The embedded cluster's state if it is that one, else None.
    """

    address: str
    dashboard: Dashboard
    embedded: local.LocalCluster | None = None


def find_cluster(address: str | None = None, timeout_s: float = 20.0) -> Cluster:
    """Returns the cluster that a command uses, without contacting it.

    Raises:
        JobError: The address is invalid.
        UnreachableError: No address is given and no embedded cluster runs.
    """
    embedded = local.find()
    given = address or os.environ.get("RAYPP_ADDRESS")
    if given:
        url = dashboard_url(given)
        if embedded is None or dashboard_url(embedded.dashboard) != url:
            return Cluster(url, Dashboard(url, token_from_environment(), timeout_s))
    if embedded is None:
        raise UnreachableError(
            Problem(
                "address",
                "no address of a Ray cluster is given, and no embedded cluster runs",
                "start one with `raypp local up`, or give an address: --address http://host:8265 or RAYPP_ADDRESS",
            )
        )
    return Cluster(embedded.dashboard, Dashboard(embedded.dashboard, embedded.token(), timeout_s), embedded)


def lend_store_settings(embedded: local.LocalCluster | None = None) -> str | None:
    """Makes this process use the embedded cluster's S3 server, unless its environment sets another.

    Returns:
        The URL of the server that is now used; None if the environment has its own settings, or no
        embedded cluster runs.
    """
    if any(os.environ.get(name) for store in STORES if store.embedded for name in store.chosen_by):
        return None
    cluster = embedded or local.find()
    if cluster is None:
        return None
    os.environ.update(cluster.aws_environment())
    return cluster.s3.endpoint
