"""The benchmark's sink answers like S3, apart from the bodies that it drops."""

from __future__ import annotations

import base64
import itertools
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from store_contract import assert_one_of_eight_writers_wins

from benchmarks.sink import KEPT_BYTES, Sink
from raypp.storage import AlreadyExists, NotFound
from raypp.storage.s3 import S3Store
from raypp.storage.store import MemorySource, StoreError

pytestmark = pytest.mark.slow
_PREFIXES = (f"sink-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def sink() -> Iterator[Sink]:
    running = Sink.start()
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture
def store(sink: Sink) -> S3Store:
    return sink.store("bench", next(_PREFIXES))


def client_of(store: S3Store) -> Any:
    return store._clients.current


def test_small_objects_are_kept_listed_and_deleted(store: S3Store) -> None:
    store.put("a/COMMIT", b"0123456789")
    store.put("a/b c&<d", b"")
    store.put("b", b"x" * KEPT_BYTES)
    assert store.get("a/COMMIT") == b"0123456789"
    assert store.get("a/COMMIT", 2, 5) == b"234"
    assert store.get("a/COMMIT", 20, 30) == b""
    assert {info.key: info.size for info in store.list("a/")} == {"a/COMMIT": 10, "a/b c&<d": 0}
    store.delete(["a/COMMIT", "a/missing"])
    assert store.head("a/COMMIT") is None
    with pytest.raises(NotFound):
        store.get("a/COMMIT")
    store.delete(["a/b c&<d"])
    assert [info.key for info in store.list("")] == ["b"]


def test_a_key_is_created_once(store: S3Store) -> None:
    assert store.limitations() == ()
    store.put("COMMIT", b"first", if_absent=True)
    with pytest.raises(AlreadyExists):
        store.put("COMMIT", b"second", if_absent=True)
    assert_one_of_eight_writers_wins(store)


def test_a_wrong_checksum_is_refused_so_that_writers_send_them(store: S3Store) -> None:
    assert store.sums.compared()
    wrong = base64.b64encode(zlib.crc32(b"other").to_bytes(4, "big")).decode()
    with pytest.raises(Exception, match="BadDigest"):
        client_of(store).put_object(Bucket="bench", Key="x", Body=b"this", ChecksumCRC32=wrong)


@pytest.mark.parametrize("size", [KEPT_BYTES + 1, 16 << 20, (48 << 20) + 123])
def test_of_large_objects_only_the_size_is_kept(store: S3Store, size: int) -> None:
    data = memoryview(np.zeros(size, dtype=np.uint8)).cast("B")
    store.put_stream("large", MemorySource([data]), size)
    info = store.head("large")
    assert info is not None and info.size == size
    assert list(store.unfinished("")) == []
    with pytest.raises(StoreError, match="the sink keeps objects of up to"):
        store.get("large")


def test_boto3s_own_way_of_sending_checksums_and_framing_arrives_too(sink: Sink) -> None:
    import boto3

    client = boto3.client(
        "s3", endpoint_url=sink.endpoint, region_name="us-east-1", aws_access_key_id="k", aws_secret_access_key="s"
    )
    client.put_object(Bucket="bench", Key="own/small", Body=b"abc")
    assert client.get_object(Bucket="bench", Key="own/small")["Body"].read() == b"abc"
    client.put_object(Bucket="bench", Key="own/large", Body=bytes(KEPT_BYTES * 3))
    page = client.list_objects_v2(Bucket="bench", Prefix="own/", MaxKeys=1)
    assert page["IsTruncated"] and [one["Key"] for one in page["Contents"]] == ["own/large"]
    rest = client.list_objects_v2(
        Bucket="bench", Prefix="own/", ContinuationToken=page["NextContinuationToken"], Delimiter="/"
    )
    assert [(one["Key"], one["Size"]) for one in rest["Contents"]] == [("own/small", 3)]
    folders = client.list_objects_v2(Bucket="bench", Prefix="o", Delimiter="/")
    assert [one["Prefix"] for one in folders["CommonPrefixes"]] == ["own/"]


def test_an_upload_that_lacks_a_part_is_refused_and_an_aborted_one_is_gone(store: S3Store) -> None:
    client, key = client_of(store), store.name_of("torn")
    upload = client.create_multipart_upload(Bucket="bench", Key=key)["UploadId"]
    part = client.upload_part(Bucket="bench", Key=key, UploadId=upload, PartNumber=1, Body=b"x")
    named = [{"PartNumber": number, "ETag": part["ETag"]} for number in (1, 2)]
    with pytest.raises(Exception, match="InvalidPart"):
        client.complete_multipart_upload(Bucket="bench", Key=key, UploadId=upload, MultipartUpload={"Parts": named})
    assert [one.key for one in store.unfinished("")] == ["torn"]
    client.abort_multipart_upload(Bucket="bench", Key=key, UploadId=upload)
    assert list(store.unfinished("")) == []
    assert store.head("torn") is None


def test_many_connections_are_served_at_once(sink: Sink) -> None:
    stores = [sink.store("bench", f"many-{number}") for number in range(4)]
    data = memoryview(bytes(1 << 20))

    def write(store: S3Store) -> None:
        for number in range(5):
            store.put_stream(f"{number}", MemorySource([data]), len(data))

    with ThreadPoolExecutor(len(stores)) as pool:
        list(pool.map(write, stores))
    assert [sum(info.size for info in store.list("")) for store in stores] == [5 << 20] * 4


def test_it_ends_with_the_process_that_started_it() -> None:
    running = Sink.start()
    assert running._process.stdin is not None
    running._process.stdin.close()
    assert running._process.wait(10) == 0
    running.stop()
