"""The memory tier of one rank in one attempt: when to take snapshots, and which ones to keep.

All ranks snapshot the same steps: the collective that starts a step takes the maximum of `signals`
over them. Never overwritten are four files, so all ranks always have some common step:

    newest complete on every rank | newest complete on every partner | being sent | being uploaded

Replicas that train apart decide each for itself between two outer steps (a *period*):

    replica 0   … 14 15 16 | 17 18 19    keeps 16 until all are known to have one after the bar
    replica 1   … 14 15    | 17

A restart takes each replica's newest step of the same period. No replica begins a third period
before it has heard (`hear`) that all have the second. At multiples of `every_steps` all begin anew.
"""

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist

from raypp.errors import DataError, JobError, in_words
from raypp.job.job import Job
from raypp.planning.decision import COPIES, OWN_ALONE, OWN_FEWEST, OWN_WITH_PARTNER
from raypp.planning.geometry import Mesh
from raypp.records import EventKind, Reporter, Seat
from raypp.stages.parallel.outer_sync import OuterSync
from raypp.stages.pipeline.agreement import SnapshotState
from raypp.state.checkpoint.snapshot import Snapshot, same_objects
from raypp.state.checkpoint.state import Slice
from raypp.state.memory.files import LARGEST_STEP, SlotName
from raypp.state.memory.peer import CopyReceiver, CopySender, own_address, partner_of
from raypp.state.memory.rank_slots import RankSlots, RunLife
from raypp.state.memory.slot import Slot
from raypp.storage.rate_limit import Pace

log = logging.getLogger(__name__)

State = Sequence[list[Slice]]
"""The slices of each object of a snapshot: `state.state_in_objects`."""
_GAP = 64
"""The objects of a snapshot are that many bytes apart at most."""
_FEWER, _NO_COPIES, _OFF = 1, 2, 3
"""What is wrong, worse last: memory for `OWN_FEWEST` files only, for no copies, for nothing."""
_CLOSE_S = 10.0
_MOST_FAILURES = 4
"""With few files a snapshot waits for its copy. After this many failures in a row it stops waiting,
and the ranks do without copies."""
_SHARE = 0.02
"""Share of a step's time that snapshots may cost with checkpoint.memory_every_steps: auto."""


@dataclass
class SnapshotCosts:
    """Recent costs of snapshots and durations of steps, in seconds. `steps`: of the last, by the
    host's clock, which waits once in each. `unread`: complete snapshots, and what each cost apart
    from the update that it held. A device may reach that update only after the next snapshot."""

    snapshots: deque[float] = field(default_factory=lambda: deque(maxlen=5))
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=9))
    unread: deque[tuple[float, Snapshot]] = field(default_factory=deque)
    begun: float | None = None

    def read(self) -> None:
        """Adds the costs that are known by now to `snapshots`, without waiting."""
        while self.unread:
            cost_s, snapshot = self.unread[0]
            held_s = snapshot.held.seconds if snapshot.held is not None else 0.0
            if held_s is None:
                return
            self.snapshots.append(cost_s + held_s)
            self.unread.popleft()

    def every(self) -> int:
        """Returns the smallest interval, in steps, at which snapshots cost at most `_SHARE`."""
        if len(self.snapshots) < 2 or len(self.steps) < 2:
            return 1
        return max(1, math.ceil(median(self.snapshots) / (_SHARE * median(self.steps))))


@dataclass(frozen=True)
class Apart:
    """What a tier knows of replicas that train apart. `outer`: this rank's outer steps."""

    job: Job
    outer: OuterSync
    group: dist.ProcessGroup | None


class MemoryTier:
    """Keeps the newest snapshots of one rank in host memory, and copies of them on another node.
    Every rank of the attempt creates one. Between `start` and `close`, every rank calls `signals`
    and `step_begins` once per step. `every`: checkpoint.memory_every_steps. `reporter`: receives
    the events memory_tier, memory_tier_reduced, memory_tier_off and refused_connection."""

    def __init__(
        self,
        life: RunLife,
        seat: Seat,
        every: int | Literal["auto"],
        reporter: Reporter,
        pace: Pace | None = None,
        apart: Apart | None = None,
    ) -> None:
        self.life, self.seat, self._pace, self.apart = life, seat, pace or Pace(), apart
        self._sites = [] if apart is None else [place.dp_replicate for place in Mesh.of(apart.job.mesh).places()]
        """The site of every rank, where links between sites are slow."""
        self._alone = apart is None or apart.outer.replicas == 1
        self._slots = RankSlots(life, seat)
        self.trouble = 0
        self.committed = -1
        """The newest commit that this rank knows. A restore refuses a snapshot that was taken after
        a commit which the store no longer has."""
        self._every, self._reporter = every, reporter
        self._known: tuple[list[Any], State] | None = None
        self._near = True
        self._optimizer: Any = None
        self._nodes: list[int] = [0] * seat.world_size
        self._sender: CopySender | None = None
        self._receiver: CopyReceiver | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._work, name="raypp-seal", daemon=True)
        self._started = self._asked = self._ready = self._announced = False
        self._own_step = self._taken = self._begun_at = self._expected = -1
        self._common = self._copied = self._ticket = -1
        self._superseded = self._fewer = self._closed = False
        self._pinned = -1
        self._newest = self._before = (-1, -1)
        self._heard, self._others = (-1, -1), -1
        self._latest: Snapshot | None = None
        self._lock = threading.Lock()
        self._costs = SnapshotCosts()
        self._hook: Any = None

    # Starting -------------------------------------------------------------------------------------

    def listen(self) -> tuple[str, int] | None:
        """Opens the port for other nodes' copies; returns its address, or None if that fails."""
        try:
            address = own_address(self.seat.node, self.seat.master_addr)
            tell = partial(self._report, "refused_connection")
            self._receiver = CopyReceiver(
                address, self.life.secret, self.seat.world_size, self._slots.slot_for_copy, tell
            )
        except OSError as error:
            log.warning("cannot receive copies of other nodes' snapshots: %s", error)
            return None
        return address, self._receiver.port

    def start(
        self,
        nodes: Sequence[int],
        addresses: Sequence[tuple[str, int] | None],
        step: int,
        restored: Slot | None,
        optimizer: torch.optim.Optimizer,
        committed: int,
        kept: tuple[int, Mapping[int, int]] | None = None,
    ) -> None:
        """Starts the tier. All ranks pass the same nodes, addresses, commit and `kept`, those of a
        replica the same step. `restored`: the snapshot that was restored, kept until a newer one is
        complete; None: not from memory. `optimizer`: its update waits for a copy of the state in
        progress. `kept`: attempt, and by rank the step, of the snapshots that were restored, if no
        rank passes its own: they stay, and the first snapshot follows at once."""
        self.committed = committed
        self._started, self._nodes, self._begun_at, self._taken = True, list(nodes), step, step
        if restored is not None:
            self._slots.add(restored)
            self._own_step = self._common = self._expected = step
        elif kept is not None:
            self._slots.keep_restored(*kept)
            self._taken = -LARGEST_STEP
        self._optimizer = optimizer
        self._hook = optimizer.register_step_pre_hook(self._slots.before_update)
        partner = partner_of(self.seat.rank, nodes, self._sites)
        if any(address is None for address in addresses):
            partner = None
        if partner is not None:
            partner_address = addresses[partner]
            assert partner_address is not None
            self._near = not self._sites or self._sites[partner] == self._sites[self.seat.rank]
            self._sender = CopySender(self.seat.rank, partner_address, self.life.secret, self._pace)
        elif self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        self._worker.start()

    def earlier(self) -> list[tuple[SlotName, Path]]:
        """Returns this node's files of the run's earlier attempts, of any rank, complete or not."""
        return self._slots.files_of_earlier_attempts()

    # Every step -----------------------------------------------------------------------------------

    def signals(self) -> SnapshotState:
        """Returns the state of this rank's snapshots, to agree on at the start of the next step."""
        # Read before `trouble`, because it is set after it.
        unready = not self._ready or self._own_step != self._expected
        self._costs.read()
        if self._fewer and self._sender is not None and self._sender.failures > _MOST_FAILURES:
            why = f"the copies of rank {self.seat.rank} do not arrive ({self._sender.error})"
            self._fail(f"{why}: no copies on another node", _NO_COPIES)
        every = self._every if isinstance(self._every, int) else self._costs.every()
        arrived = -1 if self._sender is None or self._sender.arrived is None else self._sender.arrived
        sending = self._sender is not None and self._ticket > arrived
        return SnapshotState(every, self._own_step, arrived, self.trouble, unready, sending, *self._heard)

    def kept(self, done: int) -> tuple[int, int]:
        """Returns the newest step of which all ranks of the replica have a snapshot of this
        attempt, and the newest that all their partners have; -1: none, or it may be replaced before
        this replica hears what the others had after step `done`."""
        at_once = self.apart is None or self.apart.job.all_meet(done)
        own, arrived = (
            step if step > self._begun_at and (at_once or self._period(step) == self._period(begun)) else -1
            for step, begun in zip(self._newest, (self._taken, self._ticket), strict=True)
        )
        return own, arrived

    def hear(self, kept: Sequence[tuple[int, int]]) -> None:
        """Takes all replicas' `kept` when they had done one step, to tell the ranks of this one
        those that are of one period. Nothing may be left out that replicas have sent."""
        own, arrived = (
            min(steps) if min(steps) >= 0 and len({self._period(step) for step in steps}) == 1 else known
            for steps, known in zip(zip(*kept, strict=True), self._heard, strict=True)
        )
        self._heard = own, arrived

    def step_begins(
        self,
        done: int,
        agreed: SnapshotState,
        slices: Callable[[], State],
        extra: Callable[[], str],
        saving: bool = False,
        *,
        may: bool = True,
    ) -> None:
        """Takes a snapshot of the completed step if one is due.

        Must be called before anything changes weights or optimizer state.

        Args:
            agreed: The `signals` of all ranks, as agreed on.
            slices: Returns the state; called only if needed.
            extra: Returns JSON text to store with the snapshot; called only if needed.
            saving: Whether a save is in progress on any rank, as agreed on.
            may: Whether the state after this step may be kept, the same on all ranks of a replica.
        """
        if not self._started:
            return
        if not saving:
            self._pinned = -1
        self._costs.steps.extend([] if self._costs.begun is None else [time.perf_counter() - self._costs.begun])
        self._costs.begun = time.perf_counter()
        if agreed.trouble >= _OFF:  # on all ranks at the same step, because one of them failed
            self.close(delete=True)
            self._started, self.trouble = False, _OFF
            return
        if agreed.trouble == _NO_COPIES:
            self._end_copies()
        self._fewer = agreed.trouble == _FEWER
        if agreed.trouble and self._ready and self._own_step == self._expected:
            self._slots.remove_spare_files(self._files, keep=self._needed | {self._own_step})
        self._before, self._newest = self._newest, (agreed.own, agreed.arrived)
        self._others = agreed.others
        own, arrived = zip(self._newest, self._before, strict=True)
        self._common = self._kept_step(self._common, own, self._others)
        self._copied = self._kept_step(self._copied, arrived, agreed.others_arrived)
        if done == 0:
            return  # there is no optimizer state yet
        if not self._asked:
            self._asked = True
            size = sum(part.tensor.numel() * part.tensor.element_size() for group in slices() for part in group)
            size += _GAP
            size += 0 if self.apart is None or self.apart.outer.differs else self.apart.outer.own_bytes
            self._jobs.put(lambda: self._prepare(size))
        if agreed.unready:
            return
        self._announce_ready(agreed.every)
        self._forget_earlier(agreed.others if self._sender is None else agreed.others_arrived)
        together = not self._alone and done > self._begun_at and self._savable(done)
        link_free = self._sender is not None and not agreed.sending and (together or self._ticket <= self._copied)
        may_send = link_free and self._common > self._copied and self._is_copied(self._common, together)
        # With fewer files, the newest step must be with all partners before another is taken.
        may = may and self._is_free(agreed.own) and (not self._fewer or (link_free and not may_send))
        if may and self._is_due(done, agreed.every, together):
            self._take(done, self._state(slices), extra(), link_free and self._is_copied(done, together))
        elif may_send:
            self._ticket = self._common
            self._offer(self._slots.slot_of_step(self._ticket))

    def pin(self, done: int, slices: Callable[[], State], extra: Callable[[], str]) -> Snapshot | None:
        """Returns the snapshot of the completed step for a save, which uploads it from its file.
        Takes it if there is none yet. All ranks call it at the same steps, when no save is in
        progress on this one; the caller releases the snapshot. May be collective over the world, or
        over the replica if it trains apart. Returns None, on all these ranks, if the files do not
        exist yet or none of them is free."""
        self._pinned = -1
        if not self._started or not self._announced:
            return None
        if self._taken != done:
            if not self._is_free(self._taken):
                # The latest snapshot is complete on all ranks in a moment: the one before may go.
                sealed = threading.Event()
                self._jobs.put(sealed.set)
                sealed.wait()
                own = torch.tensor([self._own_step])
                dist.all_reduce(own, op=dist.ReduceOp.MIN, group=None if self.apart is None else self.apart.group)
                self._common = self._kept_step(self._common, [int(own), self._newest[0]], self._others)
            if not self._is_free(self._taken):
                return None
            self._take(done, self._state(slices), extra(), copy=False)
        assert self._latest is not None
        self._pinned = done
        return self._latest.share()

    def _kept_step(self, kept: int, newest: Sequence[int], others: int) -> int:
        """Returns the step that a restart may need: this replica's newest, once all replicas have
        one of the same period."""
        last = newest[0]
        if self._alone or last <= kept or kept < 0:
            return max(last, kept)
        if kept > self._begun_at and self._period(kept) == self._period(last):
            return last
        same = (step for step in newest if others >= 0 and self._period(step) == self._period(others))
        return max(kept, next(same, kept))

    def _is_due(self, done: int, every: int, together: bool) -> bool:
        """Whether a snapshot of the completed step is due. Where replicas train apart, these are
        few enough that all take some in the same periods."""
        if self._alone:
            return done - self._taken >= every
        assert self.apart is not None
        outer = self.apart.job.train.sync
        if together:
            return done % (math.ceil(every / outer.every) * outer.every) == 0
        fits = every < outer.every // outer.fragments or self._taken < 0
        periods = {self._period(step) for step in (self._common, self._newest[0], done) if step >= 0}
        return done - self._taken >= every and fits and len(periods) <= 2

    def _is_copied(self, step: int, together: bool) -> bool:
        """Whether a snapshot is sent to the partner: to another site, only those of outer steps.
        A period begins to be copied where all replicas agree."""
        if not self._near and not self._savable(step):
            return False
        return self._alone or together or (self._copied >= 0 and self._period(self._copied) == self._period(step))

    def _period(self, step: int) -> int:
        return 0 if self.apart is None else self.apart.job.period(step)

    def _savable(self, step: int) -> bool:
        return self.apart is not None and self.apart.job.savable(step)

    def _is_free(self, taken: int) -> bool:
        """Returns whether a file may be overwritten, besides `taken`'s; the same on all ranks."""
        return sum(step >= 0 for step in self._needed | {taken}) < self._files

    @property
    def _files(self) -> int:
        return OWN_ALONE if self._sender is None else OWN_FEWEST if self._fewer else OWN_WITH_PARTNER

    @property
    def _needed(self) -> set[int]:
        return {self._common, self._copied, self._ticket, self._pinned}

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Closes the tier as an `ExitStack` callback; removes files that nobody resumes from."""
        self.close(delete=kind is None or isinstance(error, (JobError, DataError)))

    def close(self, *, delete: bool) -> None:
        """Ends threads and connections; keeps the files, unless `delete`. Idempotent."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        free = self._end_copies()
        self._closed = True
        if self._worker.is_alive():
            self._jobs.put(None)
            self._worker.join(_CLOSE_S)
            free = free and not self._worker.is_alive()
        if not free:
            log.warning("a thread of the memory tier does not end: its memory is freed with this process")
            if delete:
                self._slots.unlink()
            return
        self._costs.unread.clear()
        self._known = self._optimizer = self._latest = None
        self._slots.close(delete=delete)

    # The training thread's part -------------------------------------------------------------------

    def _state(self, gather: Callable[[], State]) -> State:
        """Returns the state's slices. Reuses the previous lists if the optimizer holds the same
        tensors and no slice moves or holds a Python value."""
        values = [value for state in self._optimizer.state.values() for value in state.values()]
        values += [self.apart is not None and self.apart.outer.differs]
        known = self._known
        if known is None or not same_objects(known[0], values):
            slices = gather()
            self._known = known = (values, slices)
            if any(part.moving or part.python for group in slices for part in group):
                self._known = None
        return known[1]

    def _take(self, done: int, slices: State, extra: str, copy: bool) -> None:
        started = time.perf_counter()
        slot = self._slots.next_slot(self._needed | {self._taken})
        snapshot = self._latest = self._slots.copy(slot, slices, self.committed)
        self._taken = self._expected = done
        cost_s = time.perf_counter() - started
        if copy:
            self._ticket = done
        self._jobs.put(lambda: self._seal(slot, snapshot, done, extra, cost_s, copy))

    def _announce_ready(self, every: int) -> None:
        if self._announced:
            return
        self._announced = True
        if self.seat.rank == 0:
            size = sum(slot.capacity for slot in self._slots.slots)
            where = "with copies on the next node" if self._sender is not None else "without copies on another node"
            self._report("memory_tier", f"snapshots stay in host memory, {where}", every=every, bytes=size)

    def _forget_earlier(self, others: int) -> None:
        """Removes this node's files of earlier attempts once no rank would resume from them."""
        kept = self._common if self._sender is None else self._copied
        known = kept > self._begun_at and (self._alone or others >= 0)
        if known and not self._superseded and self.seat.local_rank == 0:
            self._superseded = True
            self._slots.remove_earlier_files()

    def _end_copies(self) -> bool:
        self._ticket = self._copied = -1
        free = self._sender is None or self._sender.close()
        if self._receiver is not None:
            self._receiver.close()
        self._sender = self._receiver = None
        return free

    # The worker thread's part ---------------------------------------------------------------------

    def _work(self) -> None:
        if self.seat.device == "cuda":
            torch.cuda.set_device(self.seat.device_index)
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # noqa: BLE001 - nothing catches it in a thread; all ranks turn the tier off
                if self._closed:
                    return
                self._fail(f"rank {self.seat.rank} could not keep its snapshot: {in_words(error)}", _OFF)

    def _prepare(self, size: int) -> None:
        """Allocates the memory, once; reuses files of earlier attempts."""
        partners = [partner_of(rank, self._nodes, self._sites) for rank in range(len(self._nodes))]
        clients = partners.count(self.seat.rank)
        files = OWN_WITH_PARTNER if self._sender is not None else OWN_ALONE
        copies = COPIES * clients if self._sender is not None else 0
        available = self._slots.room()
        ranks = self.seat.local_world_size
        if copies and (files + copies) * size * ranks > available:
            short, files = _need(files + copies, size, ranks, available), OWN_FEWEST
            if (files + copies) * size * ranks <= available:
                self._fail(f"{short}: with {files + copies}, snapshots wait for their copies", _FEWER)
            else:
                self._fail(f"{_need(files + copies, size, ranks, available)}: no copies on another node", _NO_COPIES)
                files = OWN_ALONE
        if files * size * ranks > available:
            self._fail(f"{_need(files, size, ranks, available)}: no snapshots stay in host memory", _OFF)
            return
        self._slots.allocate_files(files, size)
        self._ready = True

    def _seal(self, slot: Slot, snapshot: Snapshot, step: int, extra: str, cost_s: float, copy: bool) -> None:
        seconds = self._slots.seal(slot, snapshot, step, extra)
        self._costs.unread.append((cost_s + (seconds if self.seat.device == "cpu" else 0.0), snapshot))
        self._own_step = step
        if copy:
            self._offer(slot)

    def _offer(self, slot: Slot) -> None:
        """Sends a complete snapshot to the partner; keeps it until every partner has it."""
        if (sender := self._sender) is not None:
            sender.offer(slot)

    def _fail(self, why: str, trouble: int) -> None:
        with self._lock:  # the training thread fails, too
            self.trouble = max(self.trouble, trouble)
        self._report("memory_tier_off" if trouble >= _OFF else "memory_tier_reduced", why)

    def _report(self, kind: EventKind, message: str, **details: Any) -> None:
        self._reporter.event(self.seat.event(kind, message, **details))


def _need(files: int, size: int, ranks: int, there: int) -> str:
    return (
        f"{ranks} ranks of this node need {files} × {size / 1e6:.1f} MB each, "
        f"{there / 1e6:.1f} MB of host memory are available"
    )
