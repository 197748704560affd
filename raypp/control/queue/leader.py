"""The leader of a cluster's line: a detached, restartable actor that starts runs in turn. It lives
while something waits or a rule holds, keeps no state, and has the keys of no store."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import replace

import ray

from raypp.control.queue import cluster_view, rules
from raypp.control.queue.cluster_view import Devices, Line
from raypp.control.queue.line import next_move, with_holds
from raypp.control.queue.rules import Rule
from raypp.control.queue.ticket import Ticket

_LOOK_S = 1.0
_log = logging.getLogger(__name__)


class LineLeader:
    """Starts the runs of a line. One thread decides; Ray calls the methods in others."""

    def __init__(self) -> None:
        self._handle = ray.get_runtime_context().current_actor
        self._line, self._devices, self._rules = Line(), Devices(), list[Rule]()
        self._changed = threading.Condition()
        self._stale, self._leaving = True, False
        threading.Thread(target=self._lead, name="raypp-queue", daemon=True).start()

    def look(self) -> bool:
        """Makes the leader read the line again. Returns False if it is about to end; then the
        caller makes another."""
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
                self._changed.wait_for(lambda: self._stale, _LOOK_S)
                self._leaving = not (self._stale or self._line.waiting or self._line.started or self._rules)
        ray.kill(self._handle, no_restart=True)

    def _turn(self) -> None:
        """Starts the next run, if it is its turn. One at a time asks for devices, and none while
        a run of the cluster waits for room."""
        if self._stale:
            self._stale = False
            self._line = Line.read()
        line, devices, self._rules = self._line, self._devices, rules.read()
        devices.look()
        for ticket in line.started:
            self._attend(ticket)
        paused = any(not rule.node for rule in self._rules)
        if line.started or devices.pending or not line.waiting or paused:
            return
        order = [ticket.waiting for ticket in cluster_view.ready(line.waiting)]
        free, taken = with_holds(devices.free(), devices.running(), rules.held_nodes(self._rules))
        name, _ = next_move(order, free, taken, time.time())
        if name is not None and (chosen := cluster_view.read(name)) is not None:  # else it was just cancelled
            cluster_view.write(replace(chosen, started=True))
            self._submit(chosen)
        self._stale |= name is not None

    def _attend(self, ticket: Ticket) -> None:
        """Takes a started run out of the line once it has its devices, or its job has ended."""
        state = cluster_view.job_state(ticket)
        if state is None:  # an earlier leader ended before it had submitted the job
            self._submit(ticket)
        elif ticket.name in self._devices.held or state.is_terminal():
            cluster_view.remove(ticket)
            self._stale = True

    def _submit(self, ticket: Ticket) -> None:
        """Submits a run's Ray job. Its id was chosen when the run got into line, and Ray refuses
        the same one twice: no two leaders start a run twice."""
        with contextlib.suppress(RuntimeError):  # the cluster has it, or `_attend` tries again
            cluster_view.jobs_client().submit_job(**ticket.document)
