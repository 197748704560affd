"""Asynchronous saves: training waits only for a copy to host memory; a thread does the rest.

Every rank uploads its own object and announces it; rank 0 waits for all and creates COMMIT. A save
that fails is an event: it is tried again until the store takes it or the next one begins. Only
`finish` raises, since no save follows the last one.
"""

import hashlib
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from raypp.errors import CheckpointError, Problem, RayppError, in_words
from raypp.failure_kinds import FailureKind
from raypp.records import EventKind, Reporter, SaveProgress, Seat
from raypp.retry import Backoff
from raypp.state.checkpoint.announce import TELLS_PER_TIMEOUT, Announcement, Announcements, Facts
from raypp.state.checkpoint.commit import COMMITTING_RANK, Commit, ObjectRecord, job_identity, read_commit, write_commit
from raypp.state.checkpoint.layout import commit_key, rank_key
from raypp.state.checkpoint.retention import BestOf, prune
from raypp.state.checkpoint.snapshot import Snapshot, SnapshotBuffer
from raypp.state.checkpoint.state import gather_state
from raypp.storage import ObjectStore, StoreError
from raypp.storage.rate_limit import Abandoned, Pace
from raypp.storage.store import WAIT_S, MemorySource

log = logging.getLogger(__name__)

T = TypeVar("T")

_OUTCOME = -1
"""The rank under which the committing rank announces whether the commit succeeded."""
_LONGEST_WHY = 2000
_TRIES = 4
"""A store that has not taken a write so often in a row is reported, and no save waits for it."""
_PAUSES = Backoff(math.inf, first_s=0.5, longest_s=10.0)
"""Of an upload and of a commit; the store's own client has retried each request before."""
_POLL_S, _LOOK_S = 0.1, 1.0
_HASHED_AT_ONCE = 4 << 20


class NotSavedError(RayppError):
    """The last state of an attempt is in no checkpoint: this rank's part or the commit failed."""

    failure_kind = FailureKind.SAVE_FAILED


class StoreTookNothingError(NotSavedError):
    """The same, although the rank has waited for its store: another attempt would not help."""

    failure_kind = FailureKind.NOT_SAVED


class PeerNotSavedError(NotSavedError):
    """The same, because of another rank."""

    failure_kind = FailureKind.LOST_PEER


class _PartsMissingError(CheckpointError):
    """Other ranks could not store their parts."""


class CheckpointSaver:
    """Saves one rank's part of the state repeatedly.

    Every rank of the attempt creates one, and calls `save` at the same steps.

    Args:
        job_doc: The resolved job; COMMIT contains its sections model, data, mesh, pipeline and
            train.
        announcements: Messages between ranks, outside the process groups of the training.
        reporter: Receives the events committed, save_failed, save_waited, save_skipped,
            prune_failed.
        keep_every: Checkpoints whose step is a multiple of it are never removed; 0 for none.
        best: How many with the least loss in `eval_losses` are kept besides.
        commit_timeout_s: How long ranks wait for another one that sends no more of its part.
        last_save_s: How long `finish` waits for a store that takes no writes.
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
        best: int = 0,
        pace: Pace | None = None,
        commit_timeout_s: float = 600.0,
        last_save_s: float = WAIT_S,
    ) -> None:
        self.store = store
        self.run = run
        self.seat = seat
        self.keep = keep
        self.keep_every, self.best = keep_every, best
        self.eval_losses: dict[int, float] = {}
        self._job = job_identity(job_doc)
        self._announcements = announcements
        self._reporter = reporter
        self._timeout_s = commit_timeout_s
        self._last_save_s = last_save_s
        self._buffer = SnapshotBuffer()
        self._thread: threading.Thread | None = None
        self._closed, self._given_up = threading.Event(), threading.Event()
        self._failures, self._failing, self._trouble = 0, False, ""
        self._pace = (pace or Pace()).shared(self._closed.is_set)
        self._snapshot: Snapshot | None = None
        self._before_s = 0.0
        self._last_step: int | None = None
        self._committed: int | None = None
        self._committing: int | None = None
        self._unsettled: dict[int, str] = {}
        self._own_error: Exception | None = None
        self._why = ""
        self._others_progress = 0
        self._optimizer: torch.optim.Optimizer | None = None

    def save(
        self,
        step: int,
        stages: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        extra: Mapping[str, Any],
        pin: Callable[[], Snapshot | None] = lambda: None,
    ) -> None:
        """Begins a save and returns; copy to host memory, upload and commit continue in threads.

        Every rank must call it at the same steps, between two steps, with no gradient pending. It
        sets a hook that makes the optimizer's next step wait for the copy. If the previous save is
        still in progress, this waits for it first and reports that; or gives it up, if the store
        does not take it. Store failures become events and are never raised. `extra`: plain JSON,
        the same on every rank: `data_position`, and what else to restore. `pin`: returns a snapshot
        of the step in memory, to upload it and then to release it; None if there is none: a buffer
        of the saver's own then takes the copy.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"step {step} after step {self._last_step}: steps are saved once and in order")
        started = time.perf_counter()
        self._wait_for_last(step)
        if (snapshot := pin()) is None:
            if self._optimizer is not optimizer:
                optimizer.register_step_pre_hook(self._buffer.before_update)
                self._optimizer = optimizer
            snapshot = self._buffer.take(gather_state(stages, optimizer, self.seat.coordinates).values())
        elif not self._buffer.busy:
            self._buffer.close()  # its memory is no longer needed
        self._snapshot, self._before_s = snapshot, time.perf_counter() - started
        self._last_step, self._own_error, self._why, self._failures = step, None, "", 0
        self._given_up.clear()
        self._thread = threading.Thread(
            target=self._run, args=(step, snapshot, dict(extra), self._before_s), name=f"raypp-save-{step}", daemon=True
        )
        self._thread.start()

    @property
    def committed(self) -> int | None:
        """The last step that this rank knows this attempt committed; None if there is none."""
        return self._committed

    @property
    def busy(self) -> bool:
        """Whether the last save is still in progress on this rank."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def progress(self) -> SaveProgress:
        """How far the last save is on this rank."""
        return SaveProgress(self.busy + (self.busy and self._is_stuck))

    @property
    def _is_stuck(self) -> bool:
        return self._failures >= (1 if self._failing else _TRIES)

    @property
    def last_stall_s(self) -> float:
        """Seconds that the last save stalled training: the wait for the save before, the start of
        the copy, and, in the step after it, the wait for the copy's end."""
        return self._before_s + (self._snapshot.held_s if self._snapshot is not None else 0.0)

    def skip(self, step: int) -> None:
        """Reports that the save of a step is skipped, because the last one is not durable yet."""
        if self.seat.rank == COMMITTING_RANK:
            self._report(
                "save_skipped",
                f"step {step} was not saved: the save of step {self._last_step} was still in progress "
                "(checkpoint.if_busy: skip)",
                step,
            )

    def wait(self) -> int | None:
        """Waits until the last save is committed or has failed. Returns the last step that this
        saver knows to be committed; None if there is none."""
        return self._wait(0.0)

    def _wait(self, patience_s: float) -> int | None:
        """Does what `wait` does, and waits that long for a store that takes no writes."""
        end = time.monotonic() + patience_s
        told = not patience_s
        while self.busy:
            if self._is_stuck and not told:
                told = self._failing = True
                words = f"rank {self.seat.rank} waits up to {patience_s / 60:g} min until the store takes it"
                self._report_unsaved(self._last_step or 0, f"{words}: {self._trouble}", waits_s=patience_s)
            if self._is_stuck and time.monotonic() >= end:
                self._given_up.set()
            assert self._thread is not None
            self._thread.join(_POLL_S)
        if self._last_step is not None and self.seat.rank != COMMITTING_RANK:
            self._learn_outcome(self._last_step)
        return self._committed

    def finish(self) -> int | None:
        """Waits for the last save of the attempt, like `wait`, and requires that it is committed. A
        store that takes no writes gets some minutes to do so again. Raises NotSavedError: this
        rank's part or the commit failed; PeerNotSavedError: another rank's did."""
        committed = self._wait(self._last_save_s)
        if self._last_step is None or committed == self._last_step:
            return committed
        head = f"the last checkpoint, of step {self._last_step}, was not saved"
        error = self._own_error
        if error is None and (self._why or self.seat.rank != COMMITTING_RANK):
            raise PeerNotSavedError(f"{head}: {self._why or 'rank 0 gave no reason'}")
        problem = error.problems[0] if isinstance(error, RayppError) else Problem("", self._why or "its thread ended")
        fault, kind = f"{head}: {replace(problem, fix='')}", NotSavedError
        if self._given_up.is_set():
            fault, kind = f"{fault}; it was tried again for {self._last_save_s / 60:g} min", StoreTookNothingError
        raise kind(fault, problem.fix or "check the store: `raypp doctor --store URL`") from error

    def close(self) -> None:
        """Abandons a save in progress; call `wait` first to finish it."""
        self._closed.set()
        self._given_up.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        if not self._buffer.busy:
            self._buffer.close()

    def _wait_for_last(self, step: int) -> None:
        if self._thread is None or not self._thread.is_alive():
            return
        started = time.perf_counter()
        before, trouble = None, ""
        while self._thread.is_alive():
            if self._is_stuck:
                self._given_up.set()
            trouble = trouble or str(getattr(self.store, "trouble", ""))
            now = (self._pace.sent, self._others_progress)
            if now != before:  # a wait without it counts as a hang
                self._reporter.phase("save", f"step {step} waits for the save of step {self._last_step}")
            before = now
            self._thread.join(min(_LOOK_S, self._timeout_s / TELLS_PER_TIMEOUT))
        if self._why:
            return  # it has failed, which is reported
        waited = time.perf_counter() - started
        self._report(
            "save_waited",
            f"the save of step {step} waited {waited:.2f} s for the save of step {self._last_step}: "
            + (trouble or "the store is too slow for checkpoint.every_steps"),
            step,
            seconds=round(waited, 3),
        )

    def _run(self, step: int, snapshot: Snapshot, extra: dict[str, Any], stall_s: float) -> None:
        """Runs in the thread: stores this rank's part, and meanwhile tells the others of progress.
        The committing rank waits for the parts as long as more of each is sent. The other ranks
        wait for the outcome as long as its thread lives, since it knows what it waits for."""
        alive = itertools.count()
        rank, value = self.seat.rank, lambda: self._pace.sent + self._failures
        if rank == COMMITTING_RANK:
            rank, value = _OUTCOME, lambda: next(alive)
        with self._announcements.telling(step, rank, value, self._timeout_s / TELLS_PER_TIMEOUT):
            self._store(step, snapshot, extra, stall_s)

    def _note_progress(self) -> None:
        self._others_progress += 1

    def _store(self, step: int, snapshot: Snapshot, extra: dict[str, Any], stall_s: float) -> None:
        """Uploads, announces, and on the committing rank commits."""
        started = time.monotonic()
        rank = self.seat.rank
        try:
            if self.seat.device == "cuda":
                torch.cuda.set_device(self.seat.device_index)  # a new thread would use device 0, and its memory
            try:
                self._remove_failed()
                snapshot.data()  # waits for the copy, which does not count as upload time
                copied, yielded_s = time.monotonic(), self._pace.yielded_s
                record = self._upload(step, snapshot)
            finally:
                snapshot.release()
            facts: Facts = {
                "stall_s": stall_s + snapshot.held_s,
                "upload_s": time.monotonic() - copied,
                "yielded_s": self._pace.yielded_s - yielded_s,
            }
            self._announcements.announce(step, rank, {"object": record, "facts": facts})
            self._failing = self._failing and rank == COMMITTING_RANK
        except Abandoned:
            return
        except Exception as error:  # noqa: BLE001 - nothing catches it in a thread; every failure becomes an event
            self._own_error, self._why = error, f"rank {rank} could not store its part: {in_words(error)}"
            self._report_failure(step, self._why)
            self._try_announce(step, rank, {"error": in_words(error)})
        if rank != COMMITTING_RANK:
            return
        try:
            self._commit(step, extra, started)
        except Exception as error:  # noqa: BLE001 - as above
            if self._committed == step:
                self._report("prune_failed", f"after the commit: {in_words(error)}", step)
                return
            if not self._closed.is_set():
                self._report_failure(step, in_words(error))
            if self._own_error is None and not isinstance(error, _PartsMissingError):
                self._own_error = error
            self._why = self._why or in_words(error)
            outcome: Announcement = {"committed": False, "error": self._why[:_LONGEST_WHY]}
            self._try_announce(step, _OUTCOME, {**outcome, "void": self._committing != step})

    def _remove_failed(self) -> None:
        """Deletes this rank's objects of saves that failed. On a nearly full disk they would make
        every later save fail, because retention removes them only after a commit. An outcome that
        is not known is not asked for again."""
        for step, key in list(self._unsettled.items()):
            try:
                if self._is_void(step):
                    self.store.delete([key])
            except StoreError as error:
                log.warning("cannot remove %s: %s", key, error)
                continue  # tried again before the next upload
            del self._unsettled[step]

    def _is_void(self, step: int) -> bool:
        """Returns whether this attempt will surely never commit a step that it began to save. Waits
        for the outcome. The committing rank knows it before it begins another upload."""
        try:
            outcome = self._announcements.wait_all(step, [_OUTCOME], self._timeout_s, self._closed.is_set)[_OUTCOME]
            if not outcome.get("void", False):
                return False
            if self.store.head(commit_key(self.run, step)) is None:
                return True
            return read_commit(self.store, self.run, step).attempt != self.seat.attempt
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - the server may be gone, the COMMIT unreadable
            log.debug("the outcome of the save of step %d is not known: %s", step, error)
            return False

    def _upload(self, step: int, snapshot: Snapshot) -> ObjectRecord | None:
        """Uploads this rank's object; returns None if other ranks write all that it holds."""
        if not snapshot.entries:
            return None
        seat = self.seat
        key = rank_key(self.run, step, seat.attempt, seat.rank)
        if self._repeat(step, lambda: self.store.head(commit_key(self.run, step))) is not None:
            self._refuse_own_commit(step)
        self._unsettled[step] = key
        about = {"run": self.run, "step": step, "attempt": seat.attempt, "rank": seat.rank}
        return upload_snapshot(self.store, key, snapshot, about, lambda write: self._repeat(step, write), self._pace)

    def _repeat(self, step: int, request: Callable[[], T]) -> T:
        """Repeats a request until the store carries it out, or the save is given up."""

        def may_pass(error: Exception) -> bool:
            if not isinstance(error, StoreError):
                return False
            self._failures, self._trouble = self._failures + 1, in_words(error)
            if self._is_stuck:
                self._report_failure(step, f"rank {self.seat.rank} tries again: {self._trouble}")
            return True

        answer = _PAUSES.call(request, may_pass, self._given_up.wait)
        self._failures = 0
        return answer

    def _refuse_own_commit(self, step: int) -> None:
        """Raises if the step is committed: objects that a commit names are never overwritten."""
        try:
            attempt = read_commit(self.store, self.run, step).attempt
        except CheckpointError:
            return
        if attempt >= self.seat.attempt:
            raise CheckpointError(f"step {step} is already committed, by attempt {attempt}")

    def _commit(self, step: int, extra: dict[str, Any], started: float) -> None:
        seat = self.seat
        messages = self._announcements.wait_all(
            step, range(seat.world_size), self._timeout_s, self._closed.is_set, self._note_progress
        )
        self._announcements.forget(step, range(seat.world_size))
        failed = {
            rank: message.get("error", "its message has no facts")
            for rank, message in messages.items()
            if "error" in message or "facts" not in message
        }
        if failed:
            raise _PartsMissingError("; ".join(f"rank {rank}: {error}" for rank, error in failed.items()))
        records = tuple(record for message in messages.values() if (record := message.get("object")) is not None)
        commit = Commit(self.run, step, seat.attempt, seat.mesh_sizes.as_dict(), self._job, extra, records)
        self._committing = step
        self._repeat(step, lambda: write_commit(self.store, commit))
        self._committed, self._failing = step, False
        self._report_commit(commit, [message["facts"] for message in messages.values()], time.monotonic() - started)
        self._try_announce(step, _OUTCOME, {"committed": True})
        try:
            prune(
                self.store,
                self.run,
                self.keep,
                keep_every=self.keep_every,
                best=BestOf(self.best, dict(self.eval_losses)),
                newest=step,
                attempt=seat.attempt,
            )
        except RayppError as error:
            self._report("prune_failed", f"cannot remove old checkpoints: {error}", step)

    def _report_commit(self, commit: Commit, facts: Sequence[Facts], seconds: float) -> None:
        """Reports a commit: stall and upload of the slowest rank, the upload rate of all ranks. And
        the longest time for which a rank's upload gave way to its training."""
        stall_s, upload_s = max(fact["stall_s"] for fact in facts), max(fact["upload_s"] for fact in facts)
        yielded_s = max(fact.get("yielded_s", 0.0) for fact in facts)
        rate = commit.size / 1e6 / max(upload_s, 1e-9)
        self._report(
            "committed",
            f"step {commit.step}: {commit.size / 1e6:.1f} MB in {len(commit.objects)} objects, {seconds:.2f} s after a "
            f"stall of {stall_s * 1e3:.0f} ms; {rate:.0f} MB/s",
            commit.step,
            seconds=round(seconds, 3),
            stall_s=round(stall_s, 6),
            upload_s=round(upload_s, 3),
            upload_mb_per_s=round(rate, 1),
            yielded_s=round(yielded_s, 3),
            bytes=commit.size,
            objects=len(commit.objects),
        )

    def _learn_outcome(self, step: int) -> None:
        """Learns how the commit went: from the committing rank, or if it is gone, the store."""
        try:
            messages = self._announcements.wait_all(step, [_OUTCOME], self._timeout_s, self._closed.is_set)
            committed = messages[_OUTCOME].get("committed", False)
            self._why = self._why or messages[_OUTCOME].get("error", "")
        except Exception as error:  # noqa: BLE001 - the server ends with the committing rank, so ask the store
            log.debug("no message about the commit of step %d: %s", step, error)
            try:
                committed = read_commit(self.store, self.run, step).attempt == self.seat.attempt
            except RayppError:
                committed = False
        if committed:
            self._committed = step

    def _try_announce(self, step: int, rank: int, message: Announcement) -> None:
        try:
            self._announcements.announce(step, rank, message)
        except Exception as error:  # noqa: BLE001 - the other ranks' timeout notices it
            log.debug("cannot announce step %d: %s", step, error)

    def _report_failure(self, step: int, why: str) -> None:
        """Reports that saves fail, once until one succeeds."""
        if not self._failing:
            self._failing = True
            self._report_unsaved(step, why)

    def _report_unsaved(self, step: int, why: str, **details: Any) -> None:
        self._report("save_failed", f"step {step} was not saved: {why}", step, **details)

    def _report(self, kind: EventKind, message: str, step: int, **details: Any) -> None:
        self._reporter.event(self.seat.event(kind, message, step, **details))


def upload_snapshot(
    store: ObjectStore,
    key: str,
    snapshot: Snapshot,
    about: dict[str, Any],
    repeat: Callable[[Callable[[], None]], None],
    pace: Pace,
) -> ObjectRecord:
    """Writes a snapshot's first object, which is durable when this returns.

    The header holds a CRC-32 of every block, so these are computed first. The SHA-256 of the whole
    object takes longer and is computed meanwhile. A hash of hashes would run in parallel, but only
    raypp could check it. `snapshot`: must not be released before this returns. `repeat`: calls a
    function again while it fails and that may help. Raises StoreError: the last try failed.
    """
    part = snapshot.parts[0]
    data = snapshot.data()[part.begin : part.begin + part.size]
    header = part.writer.encode(snapshot.digests(0), about)
    abandoned = threading.Event()

    def hash_all() -> str:
        digest = hashlib.sha256(header)
        for start in range(0, len(data), _HASHED_AT_ONCE):
            if abandoned.is_set():
                break
            digest.update(data[start : start + _HASHED_AT_ONCE])
        return digest.hexdigest()

    # Its end waits for its thread: nothing may read the snapshot after this returns or raises.
    with ThreadPoolExecutor(1, thread_name_prefix="raypp-checksum") as pool:
        sha256 = pool.submit(hash_all)
        source = MemorySource((memoryview(header), data), pace)
        try:
            repeat(lambda: store.put_stream(key, source, source.size))
        except BaseException:
            abandoned.set()
            raise
        sums = sha256.result(), hashlib.sha256(header).hexdigest()
        return ObjectRecord(key, source.size, sums[0], about["rank"], len(header), sums[1])
