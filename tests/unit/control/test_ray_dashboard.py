"""How commands reach a cluster's dashboard, and what they learn from it."""

from __future__ import annotations

import json
import shlex
import socket
import sys

import nasty_world as nasty
import pytest

from raypp.clusters.dashboard import Dashboard
from raypp.clusters.find import Cluster
from raypp.control.client import python_of


@pytest.mark.parametrize("on_head", [True, False])
def test_this_python_runs_drivers_only_if_this_machine_is_the_head(on_head: bool) -> None:
    here = {"state": "ALIVE", "nodeId": "1", "nodeManagerHostname": socket.gethostname(), "isHeadNode": on_head}
    there = {"state": "ALIVE", "nodeId": "2", "nodeManagerHostname": "another-host", "isHeadNode": not on_head}
    nodes = json.dumps({"data": {"summary": [{"raylet": here}, {"raylet": there}]}})
    with nasty.server(b"{}", paths=[("/nodes", nodes.encode())]) as url:
        found = python_of(Cluster(url, Dashboard(url)))
    assert found == (shlex.quote(sys.executable) if on_head else "python")


def test_a_proxy_is_not_asked_for_a_cluster_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with nasty.server(b'{"ray_version": "2.60.0"}') as url:
        for address in (url, url.replace("127.0.0.1", "localhost")):
            assert Dashboard(address).ray_version() == "2.60.0"
