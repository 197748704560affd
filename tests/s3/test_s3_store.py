"""Tests the stores that need a server against the contract of all stores, and what only S3 has."""

import inspect
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from seaweed import BUCKET, seaweed
from store_contract import StoreContract

from raypp.kinds import STORES
from raypp.storage import AccessRefused, BucketMissing, ObjectStore, ServerNotThere, open_store
from raypp.storage.s3 import S3Store

_PREFIXES = (f"test-{number}" for number in itertools.count())
_PART = 5 << 20


@pytest.fixture
def s3_store(server: Any) -> S3Store:
    return server.store(BUCKET, next(_PREFIXES), part_bytes=_PART)


def _contract_of(scheme: str) -> type:
    """Returns the contract's tests for the store that the fixture `<scheme>_store` opens. The
    fixture is named in a signature, not asked for by `getfixturevalue`: it may have parameters of
    its own, such as the kinds of servers."""

    def store(self: StoreContract, **fixtures: ObjectStore) -> ObjectStore:
        return fixtures[f"{scheme}_store"]

    names = ("self", f"{scheme}_store")
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    store.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return type(f"TestStore{scheme.title()}", (StoreContract,), {"large": 3 * _PART, "store": pytest.fixture(store)})


for _kind in STORES.usable():
    if not _kind.local:
        globals()[f"TestStore{_kind.name.title()}"] = _contract_of(_kind.name)


def test_open_store_takes_the_servers_place_and_keys_from_the_environment(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    store = open_store(f"s3://{BUCKET}/by/url/")
    store.put("a", b"1")
    assert store.url == f"s3://{BUCKET}/by/url"
    assert server.store(BUCKET).get("by/url/a") == b"1"


def test_a_missing_bucket_is_named_and_not_created(server: Any) -> None:
    store = server.store("no-such-bucket")
    for action in (store.probe, lambda: store.put("a", b""), lambda: list(store.list())):
        with pytest.raises(BucketMissing, match="'no-such-bucket' does not exist"):
            action()


@pytest.mark.gate
def test_a_bucket_is_created_only_when_asked_for(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        open_store("s3://made-on-demand/x", missing_bucket="create").probe()


@pytest.mark.gate
def test_a_wrong_secret_and_an_unknown_key_are_distinguished(server: Any) -> None:
    wrong = S3Store(BUCKET, endpoint=server.endpoint, access_key=server.access_key, secret_key="wrong")
    with pytest.raises(AccessRefused, match="secret key is wrong"):
        wrong.probe()
    unknown = S3Store(BUCKET, endpoint=server.endpoint, access_key="nobody", secret_key="wrong")
    with pytest.raises(AccessRefused, match="does not know the access key"):
        unknown.probe()


def test_no_server_at_the_endpoint_is_reported_with_the_endpoint() -> None:
    store = S3Store(BUCKET, endpoint="http://127.0.0.1:9", access_key="a", secret_key="b")
    with pytest.raises(ServerNotThere, match=r"http://127\.0\.0\.1:9"):
        store.probe()


def test_a_broken_off_upload_leaves_no_parts_on_the_server(server: Any, s3_store: S3Store) -> None:
    def failing() -> Iterator[bytes]:
        yield bytes(2 * _PART)
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError):
        s3_store.put_stream("torn", failing(), 4 * _PART)
    assert list(s3_store.unfinished()) == []


@pytest.mark.gate
def test_what_was_acknowledged_is_there_after_the_server_was_killed_and_started_again(tmp_path: Path) -> None:
    with seaweed(tmp_path) as first:
        data = os.urandom(1 << 20)
        first.store(BUCKET, "p").put("a", data)
        first.stop(grace_s=0)
        assert not first.running()
    with seaweed(tmp_path) as second:
        assert (second.access_key, second.secret_key) == (first.access_key, first.secret_key)
        assert second.store(BUCKET, "p").get("a") == data
        assert stat.S_IMODE((tmp_path / "s3.json").stat().st_mode) == 0o600
        assert second.running()
