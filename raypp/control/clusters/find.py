"""Finds the cluster that a command uses: `--address`, RAYPP_ADDRESS, or the embedded one."""

import os
from dataclasses import dataclass
from types import EllipsisType
from urllib.parse import urlsplit

from raypp.control.clusters import local
from raypp.control.clusters.dashboard import Dashboard, dashboard_url, token_from_environment
from raypp.errors import JobError, Problem, UnreachableError
from raypp.kinds import STORES

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Cluster:
    """A cluster that a command can use. `address`: `http://host:port` of its dashboard. `embedded`:
    the embedded cluster's state if it is that one, else None."""

    address: str
    dashboard: Dashboard
    embedded: local.LocalCluster | None = None


def find_cluster(address: str | None = None, timeout_s: float = 20.0) -> Cluster:
    """Returns the cluster that a command uses, without contacting it. `address`: the dashboard's;
    `auto`: that of this machine's cluster. None: RAYPP_ADDRESS's, or the embedded cluster.
    `timeout_s`: of one request. Raises JobError: the address is invalid. Raises UnreachableError:
    no address is given and no embedded cluster runs."""
    embedded = local.remains()
    given = address or os.environ.get("RAYPP_ADDRESS")
    if given:
        url = _dashboard_of(given, embedded)
        if embedded is None or not _is_at(embedded, url):
            return Cluster(url, Dashboard(url, token_from_environment(), timeout_s))
    if embedded is None:
        fault = "no address of a Ray cluster is given, and no embedded cluster runs"
        fix = "start one with `raypp local up`, or give an address: --address http://host:8265 or RAYPP_ADDRESS"
        raise UnreachableError(Problem("address", fault, fix))
    if embedded.ray.find() is None:
        fault = "the Ray head of the embedded cluster has ended, and its runs with it; its S3 server runs"
        raise UnreachableError(Problem("address", fault, "`raypp local up` starts it again, beside the S3 server"))
    return Cluster(embedded.dashboard, Dashboard(embedded.dashboard, embedded.token(), timeout_s), embedded)


def lend_store_settings(embedded: local.LocalCluster | EllipsisType | None = ...) -> str | None:
    """Makes this process use the embedded cluster's S3 server, unless its environment sets another.

    A command that uses another cluster does not use the server, and sends no keys of it there: what
    was lent before is taken back, and nothing is lent later. `embedded`: the embedded cluster if
    the command uses it; None: it uses another. Left out: not known here; the server is lent unless
    RAYPP_ADDRESS names another cluster. Returns the URL of the server that is now used; None if the
    environment has its own settings, or no embedded cluster is used.
    """
    if isinstance(embedded, EllipsisType):
        embedded, address = None if _loan.refused else local.remains(), os.environ.get("RAYPP_ADDRESS")
        if embedded is not None and address and not _is_at(embedded, _url_of(address)):
            embedded = None
    else:
        _loan.refused = embedded is None
        if embedded is None:
            _loan.take_back()
    if embedded is None or any(os.environ.get(name) for store in STORES if store.embedded for name in store.chosen_by):
        return None
    _loan.give(embedded.s3.environment())
    return embedded.s3.endpoint


def lend_settings_of(*addresses: str | None) -> None:
    """Makes this process use the store of the clusters that runs were submitted to. Lends the
    embedded cluster's S3 server if any of the addresses is that cluster's, whatever RAYPP_ADDRESS
    says; takes it back if none may be. Not if the command has named another cluster."""
    if _loan.refused:
        return
    urls = {_url_of(address) for address in addresses if address}
    embedded = local.remains()
    if embedded is not None and any(_is_at(embedded, url) for url in urls):
        lend_store_settings(embedded)
    elif urls and not any(urlsplit(url).hostname in _LOOPBACK for url in urls):  # an earlier life had another port
        lend_store_settings(None)


def _dashboard_of(address: str, embedded: local.LocalCluster | None) -> str:
    """Returns the dashboard's URL. `auto`: the embedded cluster's, or of a `ray start` here."""
    if address.strip().lower() == "auto":
        return embedded.dashboard if embedded is not None else dashboard_url("127.0.0.1")
    url = dashboard_url(address)
    if embedded is not None and urlsplit(url).netloc == embedded.gcs:
        fault = f"{address!r} is the embedded cluster's GCS port"
        raise JobError(Problem("--address", fault, f"use {embedded.dashboard}"))
    return url


def _is_at(embedded: local.LocalCluster, url: str) -> bool:
    """Returns whether a dashboard's URL, with any name of loopback, is the embedded cluster's."""
    given, own = urlsplit(url), urlsplit(embedded.dashboard)
    return given.hostname in _LOOPBACK and (given.scheme, given.port, given.path) == (own.scheme, own.port, own.path)


def _url_of(address: str) -> str:
    """Returns the dashboard's URL; the address itself if it is invalid, which its use reports."""
    try:
        return _dashboard_of(address, local.remains())
    except JobError:
        return address


class _Loan:
    """The variables of this process that hold the settings of the embedded cluster's store.
    `refused`: whether the process uses another cluster, which does not get them."""

    def __init__(self) -> None:
        self.refused = False
        self._before: dict[str, str | None] = {}

    def give(self, variables: dict[str, str]) -> None:
        self._before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)

    def take_back(self) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._before = {}


_loan = _Loan()
