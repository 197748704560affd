"""Saving, verifying, loading and pruning on a real S3 server, with objects large enough to travel in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from seaweed import BUCKET, seaweed
from told import Told
from torch import nn

from raypp.checkpoint.commit import Commit as CommitDocument
from raypp.checkpoint.commit import StaleAttemptError, claim_next_attempt, list_checkpoints, write_commit
from raypp.checkpoint.layout import rank_key
from raypp.checkpoint.load import load_checkpoint
from raypp.checkpoint.save import CheckpointSaver
from raypp.checkpoint.verify import newest_usable
from raypp.records import Coordinates, Seat
from raypp.storage.s3 import S3Store

pytestmark = pytest.mark.s3
RUN = "on-s3"


class Alone:
    """Announcements of a world of one."""

    def __init__(self) -> None:
        self.said: dict[tuple[int, int], dict[str, Any]] = {}

    def announce(self, step: int, rank: int, message: dict[str, Any]) -> None:
        self.said[step, rank] = message

    def wait_all(
        self, step: int, ranks: Sequence[int], timeout_s: float, stopped: Callable[[], bool] = lambda: False
    ) -> dict[int, dict[str, Any]]:
        return {rank: self.said[step, rank] for rank in ranks}


@pytest.fixture(scope="module")
def store() -> Iterator[S3Store]:
    with seaweed() as server:
        yield server.store(BUCKET, "checkpoints", part_bytes=5 << 20)


def test_a_checkpoint_goes_to_s3_and_back_and_old_ones_go(store: S3Store) -> None:
    torch.manual_seed(0)
    stage, told = nn.Linear(1024, 1500), Told()
    optimizer = torch.optim.AdamW(stage.parameters())
    attempt = claim_next_attempt(store, RUN)
    seat = Seat(RUN, attempt, 0, 1, Coordinates(), Coordinates(1, 1, 1, 1))
    saver = CheckpointSaver(store, RUN, {}, seat, Alone(), told, keep=2)
    for step in (1, 2, 3):
        stage(torch.ones(2, 1024)).sum().backward()
        optimizer.step()
        saver.save(step, [stage], optimizer, {"data_position": {"row": step}})
    assert saver.wait() == 3
    assert [event.kind for event in told.events if event.kind != "save_waited"] == ["committed"] * 3
    assert [checkpoint.step for checkpoint in list_checkpoints(store, RUN)] == [2, 3]
    assert list(store.list(f"{RUN}/step-00000001")) == []

    fresh = nn.Linear(1024, 1500)
    fresh_optimizer = torch.optim.AdamW(fresh.parameters())
    loaded = load_checkpoint(store, RUN, None, [fresh], fresh_optimizer)
    assert loaded is not None and (loaded.step, loaded.data_position) == (3, {"row": 3})
    assert torch.equal(stage.weight, fresh.weight)
    for key in ("exp_avg", "exp_avg_sq", "step"):
        assert torch.equal(optimizer.state[stage.weight][key], fresh_optimizer.state[fresh.weight][key])

    bad = rank_key(RUN, 3, attempt, 0)
    data = bytearray(store.get(bad))
    data[len(data) // 2] ^= 1
    store.put(bad, data)
    found = newest_usable(store, RUN)
    assert found.commit is not None and found.commit.step == 2
    assert found.rejected[0].problems[0].key == bad

    claim_next_attempt(store, RUN)
    with pytest.raises(StaleAttemptError):
        write_commit(store, CommitDocument(RUN, 9, attempt, {}, {}, {}, ()))
