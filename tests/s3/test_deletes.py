"""Servers that take no DeleteObjects, or none as boto3 sends it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fault_proxy import FaultProxy, Request
from saving import OneRank, committed
from seaweed import BUCKET

from raypp.clusters.seaweed import SeaweedServer
from raypp.doctor.findings import findings
from raypp.doctor.node import NodeProbe
from raypp.storage import StoreError
from raypp.storage.s3 import S3Store

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


def is_single(request: Request) -> bool:
    return request.method == "DELETE"


def store_at(proxy: FaultProxy, server: SeaweedServer, run: str) -> S3Store:
    keys = {"access_key": server.access_key, "secret_key": server.secret_key}
    return S3Store(BUCKET, run, endpoint=proxy.endpoint, **keys)


@pytest.mark.parametrize("kind", SERVERS)
def test_objects_are_deleted_one_by_one_where_a_server_takes_no_delete_objects(
    kind: str, proxy: FaultProxy, seaweed_server: SeaweedServer, run: str
) -> None:
    status, code = SERVERS[kind]
    together = proxy.add(is_together, times=None, status=status, code=code)
    store = store_at(proxy, seaweed_server, run)
    store.probe()
    for number in range(20):
        store.put(f"d/{number}", b"x")
    store.delete([f"d/{number}" for number in range(19)] + ["never/was"])
    assert [info.key for info in store.list()] == ["d/19"]
    assert together.hits == 1  # found out once
    assert ["DeleteObjects" in limit.fault for limit in store.limitations()] == [True]


def test_a_server_that_takes_delete_objects_gets_them(
    proxy: FaultProxy, seaweed_server: SeaweedServer, run: str
) -> None:
    store = store_at(proxy, seaweed_server, run)
    for number in range(3):
        store.put(f"d/{number}", b"x")
    before = len(proxy.seen)
    store.delete([f"d/{number}" for number in range(3)])
    assert [is_together(request) for request in proxy.seen[before:]] == [True]
    assert store.limitations() == ()


def test_a_run_saves_and_removes_old_checkpoints_there(
    proxy: FaultProxy, seaweed_server: SeaweedServer, run: str
) -> None:
    proxy.add(is_together, times=None, status=400, code="MissingContentMD5")
    store = store_at(proxy, seaweed_server, "deletes")
    rank = OneRank(store, run, keep=1)
    for step in (1, 2, 3):
        assert rank.save_and_wait(step), rank.failures()
    assert committed(store, run) == [3]


def test_no_right_to_delete_is_told_once_and_nothing_is_assumed(
    proxy: FaultProxy, seaweed_server: SeaweedServer, run: str
) -> None:
    store = store_at(proxy, seaweed_server, run)
    store.put("a", b"")
    together = proxy.add(is_together, times=1, status=403, code="AccessDenied")
    single = proxy.add(is_single, times=1, status=403, code="AccessDenied")
    with pytest.raises(StoreError, match="access denied"):
        store.delete(["a"])
    store.delete(["a"])
    assert store.head("a") is None
    assert (together.hits, single.hits) == (1, 1)
    assert is_together(next(one for one in reversed(proxy.seen) if one.method != "HEAD"))


@pytest.mark.parametrize("code", ["InvalidArgument", "BadDigest", "MissingContentMD5"])
def test_a_request_that_a_server_refuses_is_not_said_to_succeed_later(
    code: str, proxy: FaultProxy, seaweed_server: SeaweedServer, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPP_STORE_PATIENCE_S", "0")
    store = store_at(proxy, seaweed_server, run)
    store.put("a", b"x")
    proxy.add(lambda request: request.method == "GET", times=None, status=400, code=code)
    with pytest.raises(StoreError, match=f"400 {code}") as caught:
        store.get("a")
    assert "later" not in str(caught.value)


def test_the_doctor_says_how_objects_are_deleted(
    proxy: FaultProxy, seaweed_server: SeaweedServer, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.add(is_together, times=None, status=400, code="MissingContentMD5")
    for name, value in seaweed_server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
    url = f"s3://{BUCKET}/{run}"
    answer: dict[str, Any] = NodeProbe("00" * 16).try_store(url, "mark")
    assert "error" not in answer
    nodes = [{"ip": ip, "hidden_from_it": [], **answer} for ip in ("10.0.0.1", "10.0.0.2")]
    report = findings({"nodes": [{"ip": "10.0.0.1", "error": ""}], "links": [], "store": {"url": url, "nodes": nodes}})
    (problem,) = [one.problem for one in report if "DeleteObjects" in one.problem.fault]
    assert problem.fault.startswith(url)
