"""The memory tier of one rank in one attempt: when a snapshot is taken, where it goes, which ones must stay.

All ranks take the same steps, because they decide by the same numbers: what `signals` returns travels with the
collective that starts each step, as the maximum over all ranks. A file is written again only when its step is none of
these: the newest that every rank has whole; the newest that every partner has whole; the one on its way to the
partners. So at every moment there is a step that all ranks could go on from.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Literal

import torch

from raypp.checkpoint.snapshot import Snapshot
from raypp.checkpoint.state import Slice
from raypp.errors import DataError, JobError, in_words
from raypp.memory.files import SlotName
from raypp.memory.peer import CopyReceiver, CopySender, own_address, partner_of
from raypp.memory.rank_slots import COPIES, RankSlots, RunLife
from raypp.memory.slot import Slot
from raypp.pipeline.agreement import SnapshotState
from raypp.records import Event, Reporter, Seat
from raypp.storage.rate_limit import Pace

log = logging.getLogger(__name__)

_ALONE, _WITH_PARTNER = 2, 4
"""Files of a rank: without a partner; with one (two more wait for the link)."""
_NO_COPIES, _OFF = 1, 2
_CLOSE_S = 10.0
_SHARE = 0.02
"""Of a step's time that snapshots may cost when checkpoint.memory_every_steps is auto."""


@dataclass
class SnapshotCosts:
    """What a snapshot costs and a step takes, in seconds, from the last few."""

    snapshots: deque[float] = field(default_factory=lambda: deque(maxlen=5))
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=9))
    last: Snapshot | None = None
    last_s: float = 0.0
    begun: float | None = None

    def every(self) -> int:
        """How many steps apart snapshots cost at most `_SHARE` of the time."""
        if len(self.snapshots) < 2 or len(self.steps) < 2:
            return 1
        return max(1, math.ceil(median(self.snapshots) / (_SHARE * median(self.steps))))


class MemoryTier:
    """Keeps the newest snapshots of one rank in host memory, and copies of them on another node.

    Every rank of the attempt makes one. Between `start` and `close` every rank calls `signals` and `step_begins`
    once per step.

    Args:
        life: The run's, the same on every rank.
        seat: This rank's place.
        every: checkpoint.memory_every_steps.
        reporter: Where events go: memory_tier, memory_tier_reduced, memory_tier_off.
        pace: How fast copies may go to the partner.
    """

    def __init__(
        self,
        life: RunLife,
        seat: Seat,
        every: int | Literal["auto"],
        reporter: Reporter,
        pace: Pace | None = None,
    ) -> None:
        self.life, self.seat, self._pace = life, seat, pace or Pace()
        self._slots = RankSlots(life, seat)
        self.directory = self._slots.directory
        self.trouble = 0
        self.committed = -1
        """The newest commit this rank knows of; a snapshot is refused when the store has gone back behind its own."""
        self._every, self._reporter = every, reporter
        self._known: tuple[list[Any], list[Slice]] | None = None
        self._optimizer: Any = None
        self._nodes: list[int] = [0] * seat.world_size
        self._sender: CopySender | None = None
        self._receiver: CopyReceiver | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._work, name="raypp-seal", daemon=True)
        self._started = self._asked = self._ready = self._told = False
        self._own_step = self._taken = self._begun_at = self._expected = -1
        self._common = self._copied = self._ticket = -1
        self._superseded = False
        self._costs = SnapshotCosts()
        self._hook: Any = None

    # Starting ------------------------------------------------------------------------------------------------------

    def listen(self) -> tuple[str, int] | None:
        """Opens the way for other nodes' copies; where they reach it. None when they cannot."""
        try:
            address = own_address(self.seat.node, self.seat.master_addr)
            self._receiver = CopyReceiver(address, self.life.secret, self._slots.place_copy)
        except OSError as error:
            log.warning("no copies of other nodes' snapshots can be taken: %s", error)
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
    ) -> None:
        """Begins; all ranks with the same nodes, addresses and step.

        Args:
            nodes: The node of every rank.
            addresses: Where every rank takes copies.
            step: That the attempt starts from.
            restored: The snapshot of it that was loaded; stays whole until a newer one is. None: from the store.
            optimizer: Its update waits for a copy of the state that is under way.
            committed: The newest commit.
        """
        self.committed = committed
        self._started, self._nodes, self._begun_at, self._taken = True, list(nodes), step, step
        if restored is not None:
            self._slots.add(restored)
            self._own_step = self._common = self._expected = step
        self._optimizer = optimizer
        self._hook = optimizer.register_step_pre_hook(self._before_update)
        partner = partner_of(self.seat.rank, nodes)
        if any(address is None for address in addresses):
            partner = None
        if partner is not None:
            there = addresses[partner]
            assert there is not None
            self._sender = CopySender(self.seat.rank, there, self.life.secret, self._pace)
        elif self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        self._worker.start()

    def earlier(self) -> list[tuple[SlotName, Path]]:
        """This node's files of this run's earlier attempts, of any rank, whole or not."""
        return self._slots.earlier()

    # Every step ----------------------------------------------------------------------------------------------------

    def signals(self) -> SnapshotState:
        """Where this rank's snapshots stand; agreed on at the next step's start."""
        unready = not self._ready  # looked at before `trouble`, which is set before it
        self._learn_cost()
        every = self._every if isinstance(self._every, int) else self._costs.every()
        arrived = -1 if self._sender is None or self._sender.arrived is None else self._sender.arrived
        return SnapshotState(every, self._own_step, arrived, self.trouble, unready)

    def step_begins(
        self, done: int, agreed: SnapshotState, slices: Callable[[], Iterable[Slice]], extra: Callable[[], str]
    ) -> None:
        """Takes a snapshot of the step that is done, when one is due. Before anything changes weights or state.

        Args:
            done: Optimizer steps done.
            agreed: The `signals` of all ranks.
            slices: The state, asked for only when it is needed.
            extra: JSON text to be kept with it, asked for only when it is needed.
        """
        if not self._started:
            return
        self._costs.steps.extend([] if self._costs.begun is None else [time.perf_counter() - self._costs.begun])
        self._costs.begun = time.perf_counter()
        if agreed.trouble >= _OFF:
            self._turn_off()
            return
        if agreed.trouble == _NO_COPIES:
            self._do_without_copies()
        self._common, self._copied = max(self._common, agreed.own), max(self._copied, agreed.arrived)
        if done == 0:
            return  # there is no optimizer state yet
        if not self._asked:
            self._asked = True
            size = sum(part.tensor.numel() * part.tensor.element_size() for part in slices())
            self._jobs.put(lambda: self._prepare(size))
        if agreed.unready:
            return
        self._tell_ready(agreed.every)
        self._forget_earlier(agreed.arrived if self._sender is not None else agreed.own)
        link_free = self._sender is not None and self._ticket <= self._copied
        if done - self._taken >= agreed.every and agreed.own == self._expected:
            self._take(done, self._state(slices), extra(), link_free)
        elif link_free and self._common > self._copied:
            self._ticket = self._common
            self._send(next(slot for slot in self._slots.slots if slot.step == self._ticket))

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Ends with the attempt; an `ExitStack`'s callback. What no attempt will come back for is removed."""
        self.close(delete=kind is None or isinstance(error, (JobError, DataError)))

    def close(self, *, delete: bool) -> None:
        """Ends threads and connections. Files stay for the next attempt, unless `delete`. May be called twice."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        free = self._end_copies()
        if self._started and self._worker.is_alive():
            self._jobs.put(None)
            self._worker.join(_CLOSE_S)
            free = free and not self._worker.is_alive()
        if not free:
            log.warning("a thread of the memory tier does not end; its files stay")
            return
        self._costs.last = self._known = self._optimizer = None
        self._slots.close(delete=delete)

    # The training thread's part ------------------------------------------------------------------------------------

    def _state(self, gather: Callable[[], Iterable[Slice]]) -> list[Slice]:
        """The slices; the last time's list when the optimizer holds the same tensors and none is anything special."""
        values = [value for state in self._optimizer.state.values() for value in state.values()]
        known = self._known
        if (
            known is None
            or len(known[0]) != len(values)
            or any(a is not b for a, b in zip(known[0], values, strict=True))
        ):
            slices = list(gather())
            self._known = known = (values, slices)
            if any(part.moving or part.python for part in slices):
                self._known = None
        return known[1]

    def _take(self, done: int, slices: list[Slice], extra: str, copy: bool) -> None:
        started = time.perf_counter()
        keep = {self._common, self._copied, self._ticket} - {-1}
        free = [slot for slot in self._slots.slots if slot.step not in keep]
        if not free:
            return
        slot = min(free, key=lambda slot: -1 if slot.step is None else slot.step)
        snapshot, about = self._slots.copy(slot, slices, self.committed)
        self._taken = self._expected = done
        self._costs.last, self._costs.last_s = snapshot, time.perf_counter() - started
        if copy:
            self._ticket = done
        self._jobs.put(lambda: self._seal(slot, snapshot, done, about, extra))
        if copy:
            self._jobs.put(lambda: self._send(slot))

    def _before_update(self, *_unused: Any) -> None:
        self._slots.before_update()

    def _learn_cost(self) -> None:
        """The last snapshot's cost, once its file is whole: what training waited, and on the CPU the work beside it."""
        last = self._costs.last
        if last is not None and self._own_step == self._taken:
            self._costs.snapshots.append(self._costs.last_s + last.held_s)
            self._costs.last = None

    def _send(self, slot: Slot) -> None:
        """Offers a whole snapshot to the partner; it stays until every partner has that step."""
        if (sender := self._sender) is not None:
            sender.offer(slot)

    def _tell_ready(self, every: int) -> None:
        if self._told:
            return
        self._told = True
        if self.seat.rank == 0:
            size = sum(slot.capacity for slot in self._slots.slots)
            where = "with copies on the next node" if self._sender is not None else "without copies on another node"
            self._tell("memory_tier", f"snapshots stay in host memory, {where}", every=every, bytes=size)

    def _forget_earlier(self, safe: int) -> None:
        """Removes this node's files of earlier attempts once nobody would go back to them.

        Args:
            safe: The newest step of which this attempt's ranks have whatever they may need.
        """
        if not self._superseded and safe > self._begun_at and self.seat.local_rank == 0:
            self._superseded = True
            self._slots.forget_earlier()

    def _turn_off(self) -> None:
        """On all ranks at the same step, because one of them cannot."""
        self.close(delete=True)
        self._started = False
        self.trouble = _OFF

    def _do_without_copies(self) -> None:
        """On all ranks at the same step; the files that waited for the link go."""
        if self._sender is not None:
            self._end_copies()
        if self._ready and self._own_step == self._expected:
            self._slots.give_back(_ALONE, keep=self._common)

    def _end_copies(self) -> bool:
        self._ticket = self._copied = -1
        free = self._sender is None or self._sender.close()
        if self._receiver is not None:
            self._receiver.close()
        self._sender = self._receiver = None
        return free

    # The worker thread's part --------------------------------------------------------------------------------------

    def _work(self) -> None:
        if self.seat.device == "cuda":
            torch.cuda.set_device(self.seat.device_index)
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # noqa: BLE001 - a thread has nobody above it; the ranks end the tier together
                self._fail(f"rank {self.seat.rank} could not keep its snapshot: {in_words(error)}", _OFF)

    def _prepare(self, size: int) -> None:
        """Takes the memory, once: files of earlier attempts first."""
        clients = sum(partner_of(rank, self._nodes) == self.seat.rank for rank in range(len(self._nodes)))
        files = _WITH_PARTNER if self._sender is not None else _ALONE
        copies = COPIES * clients if self._sender is not None else 0
        there = self._slots.room()
        ranks = self.seat.local_world_size
        if copies and (files + copies) * size * ranks > there:
            self._fail(f"{_need(files + copies, size, ranks, there)}: no copies on another node", _NO_COPIES)
            files = _ALONE
        if files * size * ranks > there:
            self._fail(f"{_need(files, size, ranks, there)}: no snapshots stay in host memory", _OFF)
            return
        self._slots.take_memory(files, size)
        self._ready = True

    def _seal(self, slot: Slot, snapshot: Snapshot, step: int, about: dict[str, Any], extra: str) -> None:
        seconds = self._slots.seal(slot, snapshot, step, about, extra)
        if self.seat.device == "cpu":
            self._costs.last_s += seconds
        self._own_step = step

    def _fail(self, why: str, trouble: int) -> None:
        self.trouble = max(self.trouble, trouble)
        self._tell("memory_tier_off" if trouble >= _OFF else "memory_tier_reduced", why)

    def _tell(self, kind: str, message: str, **details: Any) -> None:
        seat = self.seat
        self._reporter.event(
            Event(kind, message, attempt=seat.attempt, rank=seat.rank, node=seat.node, details=details)
        )


def _need(files: int, size: int, ranks: int, there: int) -> str:
    return (
        f"{ranks} ranks of this node need {files} × {size / 1e6:.1f} MB each, "
        f"{there / 1e6:.1f} MB of host memory can be had"
    )
