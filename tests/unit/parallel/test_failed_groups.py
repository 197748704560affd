"""What a device computed after its communicators were aborted is not kept."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from raypp.rank.joining.lost_peer import lost_peer
from raypp.stages.parallel.rank_groups import before_abort, before_join, check_groups
from raypp.state.checkpoint.snapshot import SnapshotBuffer
from raypp.state.checkpoint.state import Slice


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    before_join()
    yield
    before_join()


def test_nothing_is_wrong_before_an_abort_and_after_the_next_join() -> None:
    check_groups()
    before_abort()
    with pytest.raises(dist.DistBackendError) as found:
        check_groups()
    assert lost_peer(found.value)
    before_join()
    check_groups()


def test_a_snapshot_whose_copy_may_have_come_after_an_abort_gives_no_bytes() -> None:
    part = Slice("w", torch.ones(4), (4,), (0,))
    snapshot = SnapshotBuffer().take([part])
    before_abort()
    with pytest.raises(dist.DistBackendError, match="aborted"):
        snapshot.data()
    snapshot.release()
    before_join()
    again = SnapshotBuffer().take([part])
    assert bytes(again.data()) == part.tensor.numpy().tobytes()
