"""Servers that take no DeleteObjects, or none as boto3 sends it."""

import re
from typing import Any

import pytest
from fault_proxy import FaultProxy, Request, asks
from saving import committed, saved, store_at
from seaweed import BUCKET

from raypp.control.clusters.seaweed import SeaweedServer
from raypp.storage import StoreError
from raypp.storage.s3 import S3Store
from raypp.storage.store import Patience
from raypp.tools.doctor.findings import findings
from raypp.tools.doctor.node import NodeProbe

# What each answers to a DeleteObjects without Content-MD5.
SERVERS = {
    "MinIO of January 2025, Dell OneFS": (400, "MissingContentMD5"),
    "older MinIO": (400, "InvalidRequest"),
    "Google's interoperable interface": (400, "MalformedXML"),
    "a server without it": (501, "NotImplemented"),
    "a gateway that allows no POST": (405, "MethodNotAllowed"),
    "a gateway that finds nothing there": (404, "NoSuchKey"),
    "a server that signs another body": (403, "SignatureDoesNotMatch"),
}


def is_together(request: Request) -> bool:
    return request.method == "POST" and re.search(r"[?&]delete(=|&|$)", request.target) is not None


@pytest.fixture
def store(proxy: FaultProxy, seaweed_server: SeaweedServer, run: str) -> S3Store:
    return store_at(proxy, seaweed_server, run)


@pytest.mark.parametrize("kind", SERVERS)
def test_objects_are_deleted_one_by_one_where_a_server_takes_no_delete_objects(
    kind: str, proxy: FaultProxy, store: S3Store
) -> None:
    status, code = SERVERS[kind]
    together = proxy.add(is_together, times=None, status=status, code=code)
    store.probe()
    for number in range(20):
        store.put(f"d/{number}", b"x")
    store.delete([f"d/{number}" for number in range(19)] + ["never/was"])
    assert [info.key for info in store.list()] == ["d/19"]
    assert together.hits == 1  # found out once
    assert ["DeleteObjects" in limit.fault for limit in store.limitations()] == [True]


def test_a_server_that_takes_delete_objects_gets_them(proxy: FaultProxy, store: S3Store) -> None:
    for number in range(3):
        store.put(f"d/{number}", b"x")
    before = len(proxy.seen)
    store.delete([f"d/{number}" for number in range(3)])
    assert [is_together(request) for request in proxy.seen[before:]] == [True]
    assert store.limitations() == ()


def test_a_run_saves_and_removes_old_checkpoints_there(proxy: FaultProxy, store: S3Store, run: str) -> None:
    proxy.add(is_together, times=None, status=400, code="MissingContentMD5")
    saved(store, run, 1, 2, 3, keep=1)
    assert committed(store, run) == [3]


def test_no_right_to_delete_is_reported_once_and_nothing_is_assumed(proxy: FaultProxy, store: S3Store) -> None:
    store.put("a", b"")
    together = proxy.add(is_together, times=1, status=403, code="AccessDenied")
    single = proxy.add(asks("DELETE"), times=1, status=403, code="AccessDenied")
    with pytest.raises(StoreError, match="access denied"):
        store.delete(["a"])
    store.delete(["a"])
    assert store.head("a") is None
    assert (together.hits, single.hits) == (1, 1)
    assert is_together(next(one for one in reversed(proxy.seen) if one.method != "HEAD"))


@pytest.mark.parametrize("code", ["InvalidArgument", "BadDigest", "MissingContentMD5"])
def test_a_request_that_a_server_refuses_is_not_said_to_succeed_later(
    code: str, proxy: FaultProxy, seaweed_server: SeaweedServer, run: str
) -> None:
    store = store_at(proxy, seaweed_server, run, patience=Patience(0.0, 0.0))
    store.put("a", b"x")
    proxy.add(asks("GET"), times=None, status=400, code=code)
    with pytest.raises(StoreError, match=f"400 {code}") as caught:
        store.get("a")
    assert "later" not in str(caught.value)


@pytest.mark.usefixtures("in_seaweed")
def test_the_doctor_says_how_objects_are_deleted(proxy: FaultProxy, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy.add(is_together, times=None, status=400, code="MissingContentMD5")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
    url = f"s3://{BUCKET}/{run}"
    answer: dict[str, Any] = NodeProbe("00" * 16).try_store(url, "mark")
    assert "error" not in answer
    nodes = [{"ip": ip, "hidden_from_it": [], **answer} for ip in ("10.0.0.1", "10.0.0.2")]
    report = findings({"nodes": [{"ip": "10.0.0.1", "error": ""}], "links": [], "store": {"url": url, "nodes": nodes}})
    (problem,) = [one.problem for one in report if "DeleteObjects" in one.problem.fault]
    assert problem.fault.startswith(url)
