"""Relays: one process per node that forwards the reports of its ranks in few calls.

An actor call costs the controller the same whatever it carries. A relay therefore takes the batches
of its node's ranks and forwards them in one call. A batch with steps, events or log lines is
answered when the controller has taken it; a mere heartbeat is answered at once, with the
controller's last answer to that rank, and replaces one that waits. A relay holds nothing that
exists nowhere else: when it dies, the ranks whose batches it held get no answer and send the same
batches to the controller. It ends with the controller process that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypp.control.cleanup import end_actor
from raypp.control.protocol import RELAYS_FROM_RANKS, BatchAnswer, ReportBatch
from raypp.control.report.reporter import HEARTBEAT_S

log = logging.getLogger(__name__)

FLUSH_S = 0.25
"""Steps, events and log lines wait at a relay for those of other ranks at most this long."""
_PACE_S_PER_RELAY = 0.02  # at most 50 heartbeat reports a second, of all relays together
_LONGEST_PACE_S = 2.5  # with a rank's own second, below the 5 s after which a heartbeat is overdue
_CONTROLLER_TIMEOUT_S = 5.0
_FRESH_S = 5.0  # an older answer of the controller is not passed on


class Relay:
    """The actor of one relay. All of it runs in one event loop.

    Args:
        heartbeat_s: Seconds between two calls that carry heartbeats only.
        timeout_s: For the controller's answers.
        flush_s: See `FLUSH_S`.
    """

    def __init__(
        self,
        run: str,
        controller: Any,
        heartbeat_s: float,
        timeout_s: float = _CONTROLLER_TIMEOUT_S,
        flush_s: float = FLUSH_S,
    ) -> None:
        self._run, self._controller = run, controller
        self._timeout_s, self._flush_s, self._heartbeat_s = timeout_s, flush_s, heartbeat_s
        self._task: asyncio.Task[None] | None = None
        self._waiting: list[tuple[float, ReportBatch]] = []
        """Batches, with the time each arrived."""
        self._callers: list[asyncio.Future[None]] = []
        self._answers: dict[tuple[int, int], BatchAnswer] = {}
        """The controller's last answer, by attempt and rank."""
        self._urgent = asyncio.Event()
        self.answered = time.monotonic() - _FRESH_S - 1.0
        """When the controller last answered (`time.monotonic`)."""

    def __repr__(self) -> str:
        return f"raypp/{self._run}/relay"

    async def report(self, batch: ReportBatch) -> BatchAnswer:
        """Takes a rank's batch and returns the controller's answer.

        Raises:
            ConnectionError: The controller is not known to have taken the batch.
        """
        self._task = self._task or asyncio.create_task(self._forward_reports())
        seat = batch.attempt, batch.rank
        self._waiting = [one for one in self._waiting if has_content(one[1]) or (one[1].attempt, one[1].rank) != seat]
        self._waiting.append((time.monotonic(), batch))
        if has_content(batch) or seat not in self._answers or time.monotonic() - self.answered > _FRESH_S:
            delivered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._callers.append(delivered)
            self._urgent.set()
            await delivered
        return replace(self._answers[seat], age_s=time.monotonic() - self.answered)

    async def _forward_reports(self) -> None:
        """Sends what the ranks report, forever."""
        sent = 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._urgent.wait(), max(0.0, sent + self._heartbeat_s - time.monotonic()))
            await asyncio.sleep(sent + self._flush_s - time.monotonic())
            self._urgent.clear()
            sent = time.monotonic()
            if self._waiting:
                await self._forward()

    async def _send(self, batches: tuple[ReportBatch, ...]) -> Sequence[BatchAnswer]:
        answers: Sequence[BatchAnswer] = await self._controller.relayed.remote(batches)
        return answers

    async def _forward(self) -> None:
        waiting, self._waiting, callers, self._callers = self._waiting, [], self._callers, []
        now = time.monotonic()
        batches = tuple(replace(batch, idle_s=batch.idle_s + now - at) for at, batch in waiting)
        try:
            answers = await asyncio.wait_for(self._send(batches), self._timeout_s)
        except Exception:  # noqa: BLE001  dead, frozen or cut off
            for caller in callers:
                if not caller.done():
                    caller.set_exception(ConnectionError("the controller does not answer"))
            return
        self.answered = time.monotonic()
        self._answers |= {(one.attempt, one.rank): answer for one, answer in zip(batches, answers, strict=True)}
        for caller in callers:
            if not caller.done():
                caller.set_result(None)


def has_content(batch: ReportBatch) -> bool:
    """Returns whether a batch is more than a heartbeat."""
    return bool(batch.steps or batch.events or batch.logs)


@dataclass
class Relays:
    """The relays of a run, one per node, kept from one attempt to the next while the nodes are the
    same.

    Args:
        from_ranks: Smaller runs have no relays.
    """

    run: str
    controller: Any
    from_ranks: int = RELAYS_FROM_RANKS
    _nodes: tuple[str, ...] = ()
    _by_node: dict[str, Any] = field(default_factory=dict)

    def start(self, nodes: Sequence[str]) -> None:
        """Starts a relay on every node of the run, unless they are there; does not wait for them.

        Args:
            nodes: The node of each bundle.
        """
        wanted = tuple(nodes) if len(nodes) >= self.from_ranks else ()
        if wanted == self._nodes:
            return
        self.stop()
        self._nodes = wanted
        places = list(dict.fromkeys(wanted))
        for node in places:
            self._by_node[node] = self._start(node, len(places))
        if places:
            log.info("%d ranks report through %d relays", len(wanted), len(places))

    def of(self, bundle: int) -> Any:
        """Returns the relay of a bundle; None without relays."""
        return self._by_node[self._nodes[bundle]] if self._nodes else None

    def stop(self) -> None:
        """Ends all relays."""
        for relay in self._by_node.values():
            end_actor(relay)
        self._by_node, self._nodes = {}, ()

    def _start(self, node: str, relays: int) -> Any:
        return (
            ray.remote(Relay)
            .options(
                max_restarts=-1,
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote(self.run, self.controller, relay_pace_s(relays))
        )


def relay_pace_s(relays: int) -> float:
    """Returns the seconds between two heartbeat reports of one relay.

    A report costs the controller the same whatever it carries, so each of many relays reports less
    often.
    """
    return min(max(HEARTBEAT_S, _PACE_S_PER_RELAY * relays), _LONGEST_PACE_S)
