"""A rank that saves and loads through a store: a real saver in a world of one rank."""

from typing import Any

import torch
from collecting_reporter import CollectingReporter
from fault_proxy import FaultProxy
from in_one_process import InOneProcess
from newest_usable import newest_usable
from seaweed import BUCKET
from torch import Tensor, nn

from raypp.control.clusters.seaweed import SeaweedServer
from raypp.records import Coordinates, Seat
from raypp.state.checkpoint.commit import claim_next_attempt, list_checkpoints
from raypp.state.checkpoint.load_checkpoint import load_checkpoint
from raypp.state.checkpoint.save import CheckpointSaver
from raypp.storage import ObjectStore
from raypp.storage.s3 import S3Store

PART = 5 << 20
"""Part size: the smallest that S3 allows. A state in these tests has four parts."""


class OneRank:
    """Claims the next attempt of a run, trains a small model and saves it."""

    def __init__(self, store: ObjectStore, run: str, keep: int = 9) -> None:
        self.store, self.run, self.reporter = store, run, CollectingReporter()
        torch.manual_seed(0)
        self.stage = nn.Linear(1024, 1500)
        self.optimizer = torch.optim.AdamW(self.stage.parameters())
        self.weights: dict[int, Tensor] = {}
        self.attempt = claim_next_attempt(store, run)
        seat = Seat(run, self.attempt, 0, 1, Coordinates(), Coordinates(1, 1, 1, 1, 1))
        self.saver = CheckpointSaver(store, run, {}, seat, InOneProcess(), self.reporter, keep=keep)

    def save(self, step: int) -> None:
        self.stage(torch.ones(2, 1024)).sum().backward()
        self.optimizer.step()
        self.weights[step] = self.stage.weight.detach().clone()
        self.saver.save(step, [self.stage], self.optimizer, {"data_position": {"row": step}})

    def save_and_wait(self, step: int) -> bool:
        self.save(step)
        return self.saver.wait() == step

    def failures(self) -> str:
        return "\n".join(event.message for event in self.reporter.events if event.kind == "save_failed")

    def loads(self, store: ObjectStore, step: int) -> bool:
        """Returns whether a fresh model that loads this step gets the weights of that step."""
        fresh = nn.Linear(1024, 1500)
        loaded = load_checkpoint(store, self.run, step, [fresh], torch.optim.AdamW(fresh.parameters()))
        return loaded is not None and loaded.step == step and torch.equal(fresh.weight, self.weights[step])


def saved(store: ObjectStore, run: str, *steps: int, keep: int = 9) -> OneRank:
    rank = OneRank(store, run, keep)
    for step in steps:
        assert rank.save_and_wait(step), rank.failures()
    return rank


def store_at(place: FaultProxy | SeaweedServer, server: SeaweedServer, prefix: str = "", **more: Any) -> S3Store:
    """Returns a store with the keys of a server that is reached at this place, such as a proxy."""
    keys = {"access_key": server.access_key, "secret_key": server.secret_key}
    return S3Store(BUCKET, prefix, endpoint=place.endpoint, **keys, **more)


def committed(store: ObjectStore, run: str) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(store, run)]


def newest(store: ObjectStore, run: str) -> tuple[int | None, list[str]]:
    """Returns the newest step that verifies, and the objects that invalidate newer steps."""
    newest, problems = newest_usable(store, run)
    return newest and newest.step, [problem.key for problem in problems]
