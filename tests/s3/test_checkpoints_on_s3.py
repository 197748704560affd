"""Saving, verifying, loading and pruning on a real S3 server, with multipart uploads."""

import base64
from typing import Any

import pytest
import torch
from botocore.exceptions import ClientError
from collecting_reporter import CollectingReporter
from in_one_process import InOneProcess
from saving import PART, OneRank, committed, newest, saved
from seaweed import BUCKET
from torch import nn

from raypp.records import Coordinates, Seat
from raypp.state.checkpoint.commit import Commit, StaleAttemptError, claim_next_attempt, write_commit
from raypp.state.checkpoint.layout import rank_key
from raypp.state.checkpoint.load_checkpoint import load_checkpoint
from raypp.state.checkpoint.retention import find_leftovers, look_after_store, remove_leftovers
from raypp.state.checkpoint.save import CheckpointSaver
from raypp.storage.s3 import S3Store


@pytest.fixture
def store(server: Any) -> S3Store:
    return server.store(BUCKET, "checkpoints", part_bytes=PART)


def test_a_checkpoint_goes_to_s3_and_back_and_old_ones_go(store: S3Store, run: str) -> None:
    rank = OneRank(store, run, keep=2)
    for step in (1, 2, 3):
        rank.save(step)
    assert rank.saver.wait() == 3
    assert [kind for kind in rank.reporter.kinds() if kind != "save_waited"] == ["committed"] * 3
    assert committed(store, run) == [2, 3]
    assert list(store.list(f"{run}/step-00000001")) == []

    fresh = nn.Linear(1024, 1500)
    fresh_optimizer = torch.optim.AdamW(fresh.parameters())
    loaded = load_checkpoint(store, run, None, [fresh], fresh_optimizer)
    assert loaded is not None and (loaded.step, loaded.data_position) == (3, {"row": 3})
    assert torch.equal(rank.stage.weight, fresh.weight)
    for key in ("exp_avg", "exp_avg_sq", "step"):
        own = rank.optimizer.state[rank.stage.weight][key]
        assert torch.equal(own, fresh_optimizer.state[fresh.weight][key])

    bad = rank_key(run, 3, rank.attempt, 0)
    data = bytearray(store.get(bad))
    data[len(data) // 2] ^= 1
    store.put(bad, data)
    assert newest(store, run) == (2, [bad])

    claim_next_attempt(store, run)
    with pytest.raises(StaleAttemptError):
        write_commit(store, Commit(run, 9, rank.attempt, {}, {}, {}, ()))


class Layers(nn.Module):
    """A stage: some layers of a model, under their global names."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(700, 700 + number) for number in numbers})


@pytest.mark.gate
def test_what_two_stages_wrote_one_stage_reads_and_back(store: S3Store, run: str) -> None:
    attempt, together, reporter = claim_next_attempt(store, run), InOneProcess(), CollectingReporter()
    stages, savers = [Layers(0, 1), Layers(2)], []
    for rank, stage in enumerate(stages):
        seat = Seat(run, attempt, rank, 2, Coordinates(pp=rank), Coordinates(2, 1, 1, 1, 1))
        savers.append(CheckpointSaver(store, run, {}, seat, together, reporter, keep=2))
        optimizer = torch.optim.AdamW(stage.parameters())
        sum(parameter.sum() for parameter in stage.parameters()).backward()
        optimizer.step()
        savers[-1].save(1, [stage], optimizer, {})
    assert [saver.wait() for saver in reversed(savers)] == [1, 1]
    written = {name: value for stage in stages for name, value in stage.state_dict().items()}

    for mesh in ([Layers(0, 1, 2)], [Layers(0), Layers(1), Layers(2)]):
        for stage in mesh:
            assert load_checkpoint(store, run, 1, [stage], torch.optim.AdamW(stage.parameters())) is not None
            for name, value in stage.state_dict().items():
                assert torch.equal(value, written[name]), name


def test_a_sum_that_the_server_let_pass_is_found_by_our_own(store: S3Store, run: str) -> None:
    """Ceph accepts bodies with a wrong checksum. raypp checks what it reads against the commit."""
    rank = saved(store, run, 1, 2)
    bad = rank_key(run, 2, rank.attempt, 0)
    data = bytearray(store.get(bad))
    wrong = base64.b64encode(bytes(4)).decode()
    data[-5] ^= 1
    try:
        store._clients.current.put_object(Bucket=BUCKET, Key=store.name_of(bad), Body=bytes(data), ChecksumCRC32=wrong)
        assert not store.sums.compared()
    except ClientError as error:
        assert store.sums.compared() and error.response["Error"]["Code"] == "BadDigest"
        store.put(bad, data)
    assert newest(store, run) == (1, [bad])


def begin_upload(store: S3Store, key: str) -> None:
    """Starts an upload of which one part arrives and whose writer then disappears."""
    client, name = store._clients.current, store.name_of(key)
    upload = client.create_multipart_upload(Bucket=store.bucket, Key=name)["UploadId"]
    client.upload_part(Bucket=store.bucket, Key=name, UploadId=upload, PartNumber=1, Body=bytes(PART))


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
        reporter = CollectingReporter()
        seat = Seat(run, claim_next_attempt(store, run), 0, 1, Coordinates(), Coordinates(1, 1, 1, 1, 1))
        look_after_store(store, run, seat, reporter).join(60)
        (event,) = reporter.events
        assert event.kind == "leftovers_removed"
        removed.append(event.details["objects"])
    assert removed == [[rank_key(run, 5, 1, 3)], [rank_key(run, 5, 1, 0)]]
    assert list(store.unfinished(f"{run}/")) == []
    assert list(store.list(f"{run}/step-")) == []
