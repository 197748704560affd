"""A rank that saves and loads through a store, for tests of store faults: a real saver in a world
of one rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from newest_usable import newest_usable
from told import Told
from torch import Tensor, nn

from raypp.checkpoint.commit import claim_next_attempt, list_checkpoints
from raypp.checkpoint.load_checkpoint import load_checkpoint
from raypp.checkpoint.save import CheckpointSaver
from raypp.records import Coordinates, Seat
from raypp.storage import ObjectStore

PART = 5 << 20
"""Part size: the smallest that S3 allows. A state in these tests has four parts."""


class Together:
    """Exchanges the announcements of several savers in one process."""

    def __init__(self) -> None:
        self.messages: dict[tuple[int, int], dict[str, Any]] = {}

    def announce(self, step: int, rank: int, message: dict[str, Any]) -> None:
        self.messages[step, rank] = message

    def telling(self, *_: Any) -> nullcontext[None]:
        return nullcontext()

    def forget(self, step: int, ranks: Sequence[int]) -> None:
        pass

    def wait_all(
        self,
        step: int,
        ranks: Sequence[int],
        timeout_s: float,
        stopped: Callable[[], bool] = lambda: False,
        progressed: Callable[[], None] = lambda: None,
    ) -> dict[int, dict[str, Any]]:
        end = time.monotonic() + timeout_s
        while any((step, rank) not in self.messages for rank in ranks):
            if stopped() or time.monotonic() > end:
                raise TimeoutError(f"not all of {list(ranks)} spoke")
            time.sleep(0.01)
        return {rank: self.messages[step, rank] for rank in ranks}


class OneRank:
    """Trains a small model and saves it.

    Args:
        store: Where the model is saved.
        run: The run's name. Its next attempt is claimed.
        keep: Number of committed checkpoints to keep.
    """

    def __init__(self, store: ObjectStore, run: str, keep: int = 9) -> None:
        self.store, self.run, self.reporter = store, run, Told()
        torch.manual_seed(0)
        self.stage = nn.Linear(1024, 1500)
        self.optimizer = torch.optim.AdamW(self.stage.parameters())
        self.weights: dict[int, Tensor] = {}
        self.attempt = claim_next_attempt(store, run)
        seat = Seat(run, self.attempt, 0, 1, Coordinates(), Coordinates(1, 1, 1, 1))
        self.saver = CheckpointSaver(store, run, {}, seat, Together(), self.reporter, keep=keep)

    def save(self, step: int) -> None:
        """Takes one training step and starts to save it."""
        self.stage(torch.ones(2, 1024)).sum().backward()
        self.optimizer.step()
        self.weights[step] = self.stage.weight.detach().clone()
        self.saver.save(step, [self.stage], self.optimizer, {"data_position": {"row": step}})

    def save_and_wait(self, step: int) -> bool:
        """Returns whether the step was committed."""
        self.save(step)
        return self.saver.wait() == step

    def failures(self) -> str:
        """Returns the messages of all save_failed events."""
        return "\n".join(event.message for event in self.reporter.events if event.kind == "save_failed")

    def loads(self, store: ObjectStore, step: int) -> bool:
        """Returns whether a fresh model that loads this step gets the weights of that step."""
        fresh = nn.Linear(1024, 1500)
        loaded = load_checkpoint(store, self.run, step, [fresh], torch.optim.AdamW(fresh.parameters()))
        return loaded is not None and loaded.step == step and torch.equal(fresh.weight, self.weights[step])


def committed(store: ObjectStore, run: str) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(store, run)]


def newest(store: ObjectStore, run: str) -> tuple[int | None, list[str]]:
    """Returns the newest step that verifies, and the objects that invalidate newer steps."""
    newest = newest_usable(store, run)
    objects = [problem.key for rejected in newest.rejected for problem in rejected.problems]
    return None if newest.commit is None else newest.commit.step, objects
