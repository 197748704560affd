"""Interrupted uploads are found and removed. Uploads that may still be in progress stay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from saving import PART, newest, saved
from seaweed import BUCKET
from told import Told

from raypp.checkpoint.commit import claim_next_attempt
from raypp.checkpoint.layout import rank_key
from raypp.checkpoint.retention import find_leftovers, look_after_store, remove_leftovers
from raypp.records import Coordinates, Seat
from raypp.storage.s3 import S3Store


def begin_upload(store: S3Store, key: str) -> None:
    """Starts an upload of which one part arrives and whose writer then disappears."""
    client, name = store._clients.current, store.name_of(key)
    upload = client.create_multipart_upload(Bucket=store.bucket, Key=name)["UploadId"]
    client.upload_part(Bucket=store.bucket, Key=name, UploadId=upload, PartNumber=1, Body=bytes(PART))


@pytest.fixture
def store(server: Any) -> Iterator[S3Store]:
    return server.store(BUCKET, "leftovers", part_bytes=PART)


def test_unfinished_uploads_and_uncommitted_objects_of_older_attempts_go_and_nothing_else(
    store: S3Store, run: str
) -> None:
    saved(store, run, 1)
    begin_upload(store, rank_key(run, 2, 1, 0))
    store.put(rank_key(run, 2, 1, 1), b"of a rank that was done")
    assert claim_next_attempt(store, run) == 2
    begin_upload(store, rank_key(run, 2, 2, 0))
    begin_upload(store, rank_key(f"{run}-other", 2, 1, 0))

    leftovers = find_leftovers(store, run)
    assert [upload.key for upload in leftovers.uploads] == [rank_key(run, 2, 1, 0)]
    assert [info.key for info in leftovers.objects] == [rank_key(run, 2, 1, 1)]
    assert [upload.key for upload in leftovers.under_way] == [rank_key(run, 2, 2, 0)]
    remove_leftovers(store, run, leftovers)
    assert not find_leftovers(store, run)
    assert [upload.key for upload in store.unfinished(f"{run}/")] == [rank_key(run, 2, 2, 0)]
    assert len(list(store.unfinished(f"{run}-other/"))) == 1
    assert newest(store, run) == (1, [])


@pytest.mark.gate
def test_an_attempt_removes_at_its_start_what_the_ones_before_left(store: S3Store, run: str) -> None:
    """Objects that the previous attempt may be about to commit stay until the next attempt."""
    claim_next_attempt(store, run)
    begin_upload(store, rank_key(run, 5, 1, 3))
    store.put(rank_key(run, 5, 1, 0), b"1234")
    removed = []
    for _ in range(2):
        reporter = Told()
        seat = Seat(run, claim_next_attempt(store, run), 0, 1, Coordinates(), Coordinates(1, 1, 1, 1))
        look_after_store(store, run, seat, reporter).join(60)
        (event,) = reporter.events
        assert event.kind == "leftovers_removed"
        removed.append(event.details["objects"])
    assert removed == [[rank_key(run, 5, 1, 3)], [rank_key(run, 5, 1, 0)]]
    assert list(store.unfinished(f"{run}/")) == []
    assert list(store.list(f"{run}/step-")) == []
