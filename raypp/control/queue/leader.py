"""The leader of a cluster's line: a detached, restartable actor that starts runs in turn. It lives
while something waits or a rule holds, keeps no state, and has the keys of no store."""

import contextlib
import logging
import threading
import time
from dataclasses import replace

import ray

from raypp.control.protocol import NAMESPACE
from raypp.control.queue import cluster_view, rules
from raypp.control.queue.cluster_view import Devices, Line
from raypp.control.queue.line import next_move, who_gives, with_holds
from raypp.control.queue.rules import Rule
from raypp.control.queue.ticket import Ticket

_LOOK_S, _STARTING_S, _ASK_S = 2.0, 1.0, 10.0
_MOST_STARTING = 8
_log = logging.getLogger(__name__)


class LineLeader:
    """Starts the runs of a line. One thread decides; Ray calls the methods in others."""

    def __init__(self) -> None:
        self._handle = ray.get_runtime_context().current_actor
        self._line, self._devices, self._rules = Line(), Devices(), list[Rule]()
        self._asked = dict[str, float]()
        self._changed = threading.Condition()
        self._stale, self._leaving = True, False
        threading.Thread(target=self._lead, name="raypp-queue", daemon=True).start()

    def look(self) -> bool:
        """Makes the leader read the line again. Returns False if it ends; then make another."""
        with self._changed:
            self._stale = True
            self._changed.notify_all()
            return not self._leaving

    def _lead(self) -> None:
        while not self._leaving:
            try:
                self._turn()
            except Exception:  # noqa: BLE001 - the cluster may be busy, or lose its head
                _log.exception("the line stands still; it is looked at again")
                self._stale = True
            with self._changed:
                self._changed.wait_for(lambda: self._stale, _STARTING_S if self._line.started else _LOOK_S)
                self._leaving = not (self._stale or self._line.waiting or self._line.started or self._rules)
        ray.kill(self._handle, no_restart=True)

    def _turn(self) -> None:
        """Starts the next run, if it is its turn, or asks others to make room for it. None asks for
        devices while a run of the cluster waits for room."""
        if self._stale:
            self._stale = False
            self._line = Line.read()
        line, devices, self._rules = self._line, self._devices, rules.read()
        devices.look()
        for ticket in line.started:
            self._attend(ticket)
        paused = any(not rule.node for rule in self._rules)
        if len(line.started) >= _MOST_STARTING or devices.pending or not line.waiting or paused:
            return
        ready = cluster_view.ready(line.waiting, line.started)
        order = [ticket.waiting for ticket in ready]
        held, running = rules.held_nodes(self._rules), devices.running()
        free, taken = with_holds(devices.free(), running, held)
        name, _ = next_move(order, free, taken, time.time(), [ticket.waiting for ticket in line.started])
        if name is not None and (chosen := cluster_view.read(name)) is not None:  # else it was just cancelled
            cluster_view.write(replace(chosen, started=True))
            self._asked[name] = time.monotonic()
            self._begin(chosen)
        elif ready and not line.started:
            running = [replace(one, holds={n: has for n, has in one.holds.items() if n not in held}) for one in running]
            why = f"{ready[0].run}, of priority {ready[0].priority}, needs {ready[0].need}"
            for giver, ranks in who_gives(order[0], free, running, time.time()).items():
                devices.ask_room(giver, ranks, why)
        self._stale |= name is not None

    def _attend(self, ticket: Ticket) -> None:
        """Takes a started run out of the line once it has its devices, or has ended."""
        ended = ticket.name in self._devices.held
        if not ended and time.monotonic() - self._asked.get(ticket.name, -_ASK_S) >= _ASK_S:
            self._asked[ticket.name] = time.monotonic()
            state = None if ticket.gave_way else cluster_view.job_state(ticket)
            ended = state.is_terminal() if state is not None else not self._begin(ticket)
        if ended:
            cluster_view.remove(ticket)
            self._asked.pop(ticket.name, None)
            self._stale = True

    def _begin(self, ticket: Ticket) -> bool:
        """Submits a run's Ray job. Its id was chosen when the run got into line, and Ray refuses
        the same one twice: no two leaders start a run twice. Tells a run that gave way that it has
        its turn; returns False if that has ended."""
        if ticket.gave_way:
            try:
                ray.get_actor(f"raypp/{ticket.name}", namespace=NAMESPACE).take_turn.remote()
            except ValueError:
                return False
        else:
            with contextlib.suppress(RuntimeError):  # the cluster has it, or `_attend` tries again
                cluster_view.jobs_client().submit_job(**ticket.document)
        return True
