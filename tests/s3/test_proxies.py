"""Proxies in the environment: loopback needs none, and one that refuses is named first."""

from collections.abc import Iterator

import hostile_world as hostile
import pytest
from fault_proxy import FaultProxy, fault_proxy
from seaweed import BUCKET

from raypp.control.clusters.seaweed import SeaweedServer
from raypp.storage import StoreError, open_store
from raypp.storage.s3 import S3Store

NAMES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
ELSEWHERE = "http://s3.example:9000"


@pytest.fixture
def squid(seaweed_server: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy that every variable names."""
    with fault_proxy(seaweed_server.endpoint) as running:
        for name in NAMES:
            monkeypatch.setenv(name, running.endpoint)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield running


def test_a_store_on_loopback_is_reached_without_the_proxy(
    squid: FaultProxy, seaweed_server: SeaweedServer, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = seaweed_server.store(BUCKET, run)
    for name, value in seaweed_server.environment().items():
        monkeypatch.setenv(name, value)
    named = open_store(f"s3://{BUCKET}/{run}")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", seaweed_server.endpoint.replace("127.0.0.1", "localhost"))
    for store in (given, named, open_store(f"s3://{BUCKET}/{run}")):
        store.probe()
    assert squid.seen == []


def test_given_keys_are_used_without_a_search_for_others(
    squid: FaultProxy, seaweed_server: SeaweedServer, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    """The search would end at 169.254.169.254, through the proxy."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    store = seaweed_server.store(BUCKET)
    store.probe()
    assert squid.seen == []


def refusal_of(store: S3Store) -> StoreError:
    with pytest.raises(StoreError) as caught:
        store.probe()
    return caught.value


PAGES = {
    "short": b"denied by policy",
    "html": b"<!DOCTYPE html><html><body>The URL could not be retrieved</body></html>",
    "nothing": b"",
}


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("status", [403, 407, 503])
def test_a_proxy_that_refuses_is_named_first(
    status: int, page: str, squid: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPP_STORE_PATIENCE_S", "0")
    with hostile.server(PAGES[page], status) as proxy:
        monkeypatch.setenv("http_proxy", proxy.replace("//", "//me:secret@"))
        error = refusal_of(S3Store(BUCKET, "runs", endpoint=ELSEWHERE, access_key="K", secret_key="S"))
    (problem,) = error.problems
    assert problem.fault.startswith(f"through the proxy {proxy} (http_proxy): ")
    assert problem.fix.startswith("name its host in NO_PROXY")
    assert "secret" not in str(error)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_is_down_is_named_first(scheme: str, squid: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYPP_STORE_PATIENCE_S", "0")
    squid.down()
    endpoint = ELSEWHERE.replace("http", scheme)
    error = refusal_of(S3Store(BUCKET, "runs", endpoint=endpoint, access_key="K", secret_key="S"))
    assert error.problems[0].fault.startswith(f"through the proxy {squid.endpoint} ({scheme}_proxy): no answer")


def test_a_store_elsewhere_is_reached_through_the_proxy(
    squid: FaultProxy, seaweed_server: SeaweedServer, run: str
) -> None:
    keys = {"access_key": seaweed_server.access_key, "secret_key": seaweed_server.secret_key, "endpoint": ELSEWHERE}
    S3Store(BUCKET, run, **keys).probe()
    assert {request.target.partition("/raypp")[0] for request in squid.seen} == {ELSEWHERE}
    assert "proxy" not in str(refusal_of(S3Store("no-such-bucket", **keys)))  # what S3 itself answers
