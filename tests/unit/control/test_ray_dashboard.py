"""How commands reach a cluster's dashboard, and what they learn from it."""

import json
import shlex
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import hostile_world as hostile
import pytest

from raypp.control.cluster_call import python_of
from raypp.control.clusters.dashboard import Dashboard, dashboard_url
from raypp.control.clusters.find import Cluster
from raypp.errors import UnreachableError


@pytest.mark.parametrize("on_head", [True, False])
def test_this_python_runs_drivers_only_if_this_machine_is_the_head(on_head: bool) -> None:
    here = {"state": "ALIVE", "nodeId": "1", "nodeManagerHostname": socket.gethostname(), "isHeadNode": on_head}
    there = {"state": "ALIVE", "nodeId": "2", "nodeManagerHostname": "another-host", "isHeadNode": not on_head}
    nodes = json.dumps({"data": {"summary": [{"raylet": here}, {"raylet": there}]}})
    with hostile.server(b"{}", paths=[("/nodes", nodes.encode())]) as url:
        python = python_of(Cluster(url, Dashboard(url)))
    assert python == (shlex.quote(sys.executable) if on_head else "python")


@pytest.fixture(autouse=True)
def proxy_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)


def test_a_proxy_is_not_asked_for_a_cluster_on_loopback() -> None:
    with hostile.server(b'{"ray_version": "2.60.0"}') as url:
        for address in (url, url.replace("127.0.0.1", "localhost")):
            assert Dashboard(address).ray_version() == "2.60.0"


@pytest.mark.parametrize("status", [403, 503])
def test_a_proxy_that_refuses_is_named_first(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with hostile.server(b"<html>denied by policy</html>", status) as proxy:
        monkeypatch.setenv("http_proxy", proxy.replace("//", "//me:secret@"))
        with pytest.raises(UnreachableError) as caught:
            Dashboard("http://head.example:8265").ray_version()
    (problem,) = caught.value.problems
    assert problem.fault.startswith(f"through the proxy {proxy} (http_proxy): ")
    assert problem.fix.startswith("name its host in NO_PROXY")
    assert "secret" not in str(caught.value)


def test_a_proxy_that_is_down_is_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnreachableError, match=r"^address: through the proxy http://127.0.0.1:9 \(http_proxy\)"):
        Dashboard("http://head.example:8265").ray_version()
    monkeypatch.setenv("no_proxy", ".example")
    with pytest.raises(UnreachableError, match=r"^address: no Ray cluster answers"):
        Dashboard("http://head.example:8265").ray_version()


def test_an_address_with_the_port_of_ray_s_gcs_is_an_error_that_names_the_dashboard_s() -> None:
    grpc = pytest.importorskip("grpc")
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(UnreachableError) as caught:
            Dashboard(f"http://127.0.0.1:{port}").ray_version()
    finally:
        server.stop(0)
    (problem,) = caught.value.problems
    assert "Ray's GCS" in problem.fault and problem.fault.isprintable()
    assert problem.fix == "use the dashboard's address, usually http://127.0.0.1:8265"


@pytest.mark.parametrize(
    "typed",
    [
        "http://head:8265/#/jobs",
        "http://head:8265/#/cluster?tab=nodes",
        "http://head:8265/?view=1",
        "http://head:8265//",
        "head:8265",
        " head ",
    ],
)
def test_an_address_may_come_from_a_browser(typed: str) -> None:
    assert dashboard_url(typed) == "http://head:8265"


def test_the_path_of_a_dashboard_behind_a_gateway_is_kept() -> None:
    assert dashboard_url("https://gateway/ray/prod/#/jobs") == "https://gateway/ray/prod"
