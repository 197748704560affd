"""Streaming saves: training stands still for one copy to host memory; the rest happens in a thread.

Every rank uploads its own object and announces it. The committing rank (rank 0) waits for all announcements
and creates COMMIT. A save that fails is told as an event and never raised: training is worth more than one save.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from raypp.checkpoint.announce import Announcements
from raypp.checkpoint.commit import COMMITTING_RANK, Commit, ObjectRecord, job_identity, read_commit, write_commit
from raypp.checkpoint.layout import commit_key, rank_key
from raypp.checkpoint.retention import prune
from raypp.checkpoint.snapshot import Snapshot, SnapshotBuffer
from raypp.checkpoint.state import gather_state
from raypp.checkpoint.upload import upload_snapshot, with_patience
from raypp.errors import CheckpointError, RayppError, in_words
from raypp.records import Event, Reporter, Seat
from raypp.storage import ObjectStore
from raypp.storage.rate_limit import Abandoned, Pace

log = logging.getLogger(__name__)

_OUTCOME = -1
"""The committing rank's second voice: how the commit went."""


class CheckpointSaver:
    """Saves one rank's part of the state, again and again.

    Every rank of the attempt makes one, and calls `save` at the same steps.

    Args:
        store: Opened at the job's checkpoint.url.
        run: The run's name.
        job_doc: The resolved job; its model, data, mesh, pipeline and train sections go into COMMIT.
        seat: This rank's place.
        announcements: How ranks tell each other, outside of the training's groups.
        reporter: Where events go: committed, save_failed, save_waited, save_skipped, prune_failed.
        keep: Committed checkpoints to keep.
        keep_every: Steps that are multiples of it are kept for ever; 0: none.
        pace: How fast this rank may send; None: as fast as it can.
        commit_timeout_s: How long the committing rank waits for the others' parts.
    """

    def __init__(
        self,
        store: ObjectStore,
        run: str,
        job_doc: Mapping[str, Any],
        seat: Seat,
        announcements: Announcements,
        reporter: Reporter,
        keep: int,
        *,
        keep_every: int = 0,
        pace: Pace | None = None,
        commit_timeout_s: float = 600.0,
    ) -> None:
        self.store = store
        self.run = run
        self.seat = seat
        self.keep = keep
        self.keep_every = keep_every
        self._job = job_identity(job_doc)
        self._announcements = announcements
        self._reporter = reporter
        self._timeout_s = commit_timeout_s
        self._buffer = SnapshotBuffer()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._pace = (pace or Pace()).shared(self._closed.is_set)
        self._snapshot: Snapshot | None = None
        self._before_s = 0.0
        self._last_step: int | None = None
        self._committed: int | None = None
        self._optimizer: torch.optim.Optimizer | None = None

    def save(
        self, step: int, stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer, extra: Mapping[str, Any]
    ) -> None:
        """Begins a save and returns; the copy to host memory, the upload and the commit go on in threads.

        Every rank must call it at the same steps, between two steps, with no gradient pending. The optimizer's next
        step waits for the copy, by a hook this sets. When the save before is still under way, this waits for that first
        and says so. Store failures are events, never raised.

        Args:
            step: Optimizer steps done; higher than at the last call.
            stages: This rank's stages.
            optimizer: Over their parameters.
            extra: Plain JSON, the same on every rank: `data_position`, and what else is wanted back.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"step {step} after step {self._last_step}: a step is saved once, in order")
        started = time.perf_counter()
        self._wait_for_last(step)
        if self._optimizer is not optimizer:
            optimizer.register_step_pre_hook(self._buffer.before_update)
            self._optimizer = optimizer
        snapshot = self._buffer.take(gather_state(stages, optimizer, self.seat.coordinates).values())
        self._snapshot, self._before_s = snapshot, time.perf_counter() - started
        self._last_step = step
        self._thread = threading.Thread(
            target=self._store,
            args=(step, snapshot, dict(extra), self._before_s),
            name=f"raypp-save-{step}",
            daemon=True,
        )
        self._thread.start()

    @property
    def committed(self) -> int | None:
        """The last step this rank knows to be committed by this attempt; None when there is none yet."""
        return self._committed

    @property
    def busy(self) -> bool:
        """Whether the last save is still under way on this rank."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def last_stall_s(self) -> float:
        """Seconds that training stood still for the last save: waiting for the one before, beginning the copy, and, in
        the step after, waiting for the copy's end (0 before that step's update)."""
        return self._before_s + (self._snapshot.held_s if self._snapshot is not None else 0.0)

    def skip(self, step: int) -> None:
        """Says that the save of a step is left out, because the last one is not durable yet."""
        if self.seat.rank == COMMITTING_RANK:
            self._tell(
                "save_skipped",
                f"step {step} was not saved: the save of step {self._last_step} was still under way "
                "(checkpoint.if_busy: skip)",
                step,
            )

    def wait(self) -> int | None:
        """Waits until the last save is committed or has failed.

        Returns:
            The last step this saver knows to be committed; None when there is none.
        """
        if self._thread is not None:
            self._thread.join()
        if self._last_step is not None and self.seat.rank != COMMITTING_RANK:
            self._hear_outcome(self._last_step)
        return self._committed

    def close(self) -> None:
        """Gives up what is still under way (call `wait` first to finish it)."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def _wait_for_last(self, step: int) -> None:
        if self._thread is None or not self._thread.is_alive():
            return
        started = time.perf_counter()
        self._reporter.phase("save", f"step {step} waits for the save of step {self._last_step}")
        self._thread.join()
        waited = time.perf_counter() - started
        self._tell(
            "save_waited",
            f"the save of step {step} waited {waited:.2f} s for that of step {self._last_step}: "
            "the store is slower than checkpoint.every_steps asks for",
            step,
            seconds=round(waited, 3),
        )

    def _store(self, step: int, snapshot: Snapshot, extra: dict[str, Any], stall_s: float) -> None:
        """The thread: upload, announce, and on the committing rank: commit."""
        started = time.monotonic()
        rank = self.seat.rank
        try:
            try:
                snapshot.data()  # the copy, which is not a part of the upload's time
                copied = time.monotonic()
                record = self._upload(step, snapshot)
            finally:
                snapshot.release()
            facts = {"stall_s": stall_s + snapshot.held_s, "upload_s": time.monotonic() - copied}
            self._announcements.announce(
                step, rank, {"object": None if record is None else asdict(record), "facts": facts}
            )
        except Abandoned:
            return
        except Exception as error:  # noqa: BLE001 - a thread has nobody above it; every failure becomes an event
            self._failed(step, f"rank {rank} could not store its part: {in_words(error)}")
            self._announce_quietly(step, rank, {"error": in_words(error)})
        if rank != COMMITTING_RANK:
            return
        try:
            self._commit(step, extra, started)
        except Exception as error:  # noqa: BLE001 - as above
            if not self._closed.is_set():
                self._failed(step, in_words(error))
            self._announce_quietly(step, _OUTCOME, {"committed": False})

    def _upload(self, step: int, snapshot: Snapshot) -> ObjectRecord | None:
        """This rank's object; None when it holds nothing that another does not write."""
        if not snapshot.entries:
            return None
        seat = self.seat
        key = rank_key(self.run, step, seat.attempt, seat.rank)
        if self.store.head(commit_key(self.run, step)) is not None:
            self._refuse_own_commit(step)
        about = {"run": self.run, "step": step, "attempt": seat.attempt, "rank": seat.rank}
        return upload_snapshot(self.store, key, snapshot, seat.rank, about, self._closed.wait, pace=self._pace)

    def _refuse_own_commit(self, step: int) -> None:
        """Objects that a commit of this attempt number names are never written again."""
        try:
            attempt = read_commit(self.store, self.run, step).attempt
        except CheckpointError:
            return
        if attempt >= self.seat.attempt:
            raise CheckpointError(f"step {step} is already committed, by attempt {attempt}")

    def _commit(self, step: int, extra: dict[str, Any], started: float) -> None:
        seat = self.seat
        said = self._announcements.wait_all(step, range(seat.world_size), self._timeout_s, self._closed.is_set)
        failed = {rank: message["error"] for rank, message in said.items() if "error" in message}
        if failed:
            raise CheckpointError("; ".join(f"rank {rank}: {error}" for rank, error in failed.items()))
        records = tuple(ObjectRecord(**message["object"]) for message in said.values() if message["object"])
        commit = Commit(self.run, step, seat.attempt, seat.mesh_sizes.as_dict(), self._job, extra, records)
        with_patience(lambda: write_commit(self.store, commit), self._closed.wait)
        self._committed = step
        self._tell_committed(commit, [message["facts"] for message in said.values()], time.monotonic() - started)
        self._announce_quietly(step, _OUTCOME, {"committed": True})
        try:
            prune(self.store, self.run, self.keep, keep_every=self.keep_every, newest=step, attempt=seat.attempt)
        except RayppError as error:
            self._tell("prune_failed", f"old checkpoints could not be removed: {error}", step)

    def _tell_committed(self, commit: Commit, facts: Sequence[Mapping[str, float]], seconds: float) -> None:
        """Stall and upload are those of the slowest rank; the rate is that of all of them together."""
        stall_s, upload_s = (max(fact[name] for fact in facts) for name in ("stall_s", "upload_s"))
        rate = commit.size / 1e6 / max(upload_s, 1e-9)
        self._tell(
            "committed",
            f"step {commit.step}: {commit.size / 1e6:.1f} MB in {len(commit.objects)} objects, {seconds:.2f} s after a "
            f"stop of {stall_s * 1e3:.0f} ms; {rate:.0f} MB/s",
            commit.step,
            seconds=round(seconds, 3),
            stall_s=round(stall_s, 6),
            upload_s=round(upload_s, 3),
            upload_mb_per_s=round(rate, 1),
            bytes=commit.size,
            objects=len(commit.objects),
        )

    def _hear_outcome(self, step: int) -> None:
        """Learns from the committing rank, or, when that is gone, from the store, how the commit went."""
        try:
            said = self._announcements.wait_all(step, [_OUTCOME], self._timeout_s, self._closed.is_set)
            committed = bool(said[_OUTCOME]["committed"])
        except Exception as error:  # noqa: BLE001 - its server ends with the committing rank: the store knows
            log.debug("no word of the commit of step %d: %s", step, error)
            try:
                committed = read_commit(self.store, self.run, step).attempt == self.seat.attempt
            except RayppError:
                committed = False
        if committed:
            self._committed = step

    def _announce_quietly(self, step: int, rank: int, message: dict[str, Any]) -> None:
        try:
            self._announcements.announce(step, rank, message)
        except Exception as error:  # noqa: BLE001 - the others notice by their timeout
            log.debug("could not announce step %d: %s", step, error)

    def _failed(self, step: int, why: str) -> None:
        self._tell("save_failed", f"step {step} was not saved: {why}", step)

    def _tell(self, kind: str, message: str, step: int, **details: Any) -> None:
        seat = self.seat
        self._reporter.event(
            Event(kind, message, attempt=seat.attempt, step=step, rank=seat.rank, node=seat.node, details=details)
        )
