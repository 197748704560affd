"""What the line needs to know of a cluster, from inside: tickets, room, who has devices."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

import ray
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient
from ray.util.placement_group import placement_group_table

from raypp.control.clusters.known_runs import cluster_name
from raypp.control.driver import on_the_head
from raypp.control.protocol import NAMESPACE
from raypp.control.queue import rules
from raypp.control.queue.line import PRIORITIES, Need, Priority, Room, Running, expected_starts, next_move, with_holds
from raypp.control.queue.ticket import Ticket
from raypp.control.ray_state import free_per_node
from raypp.errors import RayppError

_SPACE = "raypp-queue"
"""Namespace of the tickets in Ray's key-value store."""
_ASK_EVERY_S, _ASK_S, _WAKE_S = 5.0, 3.0, 60.0


def ready(waiting: Sequence[Ticket], started: Sequence[Ticket] = ()) -> list[Ticket]:
    """Returns the runs that wait for devices only: what they come after has ended, somehow."""
    names = {run: cluster_name(*run.rsplit("/", 1)) for ticket in waiting for run in ticket.after}
    awaited = set(names.values())
    living = awaited & {ticket.name for ticket in (*waiting, *started)}
    for name in awaited - living:
        with contextlib.suppress(ValueError):  # it has no controller
            ray.get_actor(f"raypp/{name}", namespace=NAMESPACE)
            living.add(name)
    if awaited - living:  # a job that has just begun has no controller yet
        living |= {name for name, job in _jobs_of_runs() if not job.status.is_terminal()}
    return [ticket for ticket in waiting if not any(names[run] in living for run in ticket.after)]


@dataclass
class Line:
    """The tickets of a cluster, in order. `damaged`: what could not be read, and why."""

    waiting: list[Ticket] = field(default_factory=list)
    started: list[Ticket] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    @classmethod
    def read(cls) -> Line:
        """Reads them all; the rest goes on without a damaged one."""
        line = cls()
        for key in _internal_kv_list("", namespace=_SPACE):
            try:
                ticket = read(key.decode(errors="replace"))
            except RayppError as error:
                line.damaged.append(str(error))
                continue
            if ticket is not None:
                (line.started if ticket.started else line.waiting).append(ticket)
        line.waiting.sort(key=lambda ticket: ticket.waiting.turn)
        return line


def write(ticket: Ticket) -> None:
    """Puts a ticket into the line, or replaces it."""
    _internal_kv_put(ticket.name, ticket.encoded(), namespace=_SPACE)


def read(name: str) -> Ticket | None:
    """Returns the ticket of a run, by its name on the cluster. Raises CheckpointError: damaged."""
    data = _internal_kv_get(name, namespace=_SPACE)
    return None if data is None else Ticket.read(data, f"the ticket {name} in the line")


def join_again(ticket: Ticket) -> None:
    """Puts a run that gave way into the line, unless it is there."""
    there = read(ticket.name)
    if there is None or there.submission_id != ticket.submission_id:
        write(ticket)
    wake()


def wake() -> None:
    """Makes the leader look at the line; makes a leader if there is none."""
    from raypp.control.queue.leader import LineLeader

    end = time.monotonic() + _WAKE_S
    while True:
        leader = on_the_head(LineLeader, "raypp/queue", 8)
        try:
            if ray.get(leader.look.remote()):
                return
        except ray.exceptions.RayActorError:  # it has just ended, or restarts
            if time.monotonic() > end:
                raise
        time.sleep(0.2)


def others_wait(own: str, priority: Priority) -> bool:
    """Returns whether a run of no lower priority than `own` waits, or has no devices yet."""
    line = Line.read()
    others = (one for one in (*line.waiting, *line.started) if one.name != own)
    return any(PRIORITIES[one.priority] <= PRIORITIES[priority] for one in others)


def remove(ticket: Ticket) -> None:
    """Takes a run out of the line; unless it has started, its package and keys go, too."""
    _internal_kv_del(ticket.name, namespace=_SPACE)
    if ticket.started or ticket.gave_way:
        return
    environment = ticket.document["runtime_env"]
    for key in (environment["working_dir"], *environment["env_vars"].values()):
        if key.startswith("gcs://"):
            _internal_kv_del(key)


@cache
def jobs_client() -> JobSubmissionClient:
    """Returns a client of this cluster's dashboard. Raises ConnectionError: it does not answer."""
    return JobSubmissionClient(ray.get_runtime_context().gcs_address)


def _jobs_of_runs() -> list[tuple[str, JobDetails]]:
    """Returns the Ray jobs of runs, each with the name by which the cluster calls its run."""
    jobs = [(job.metadata or {}, job) for job in jobs_client().list_jobs()]
    return [(cluster_name(known["raypp_url"], known["raypp_run"]), job) for known, job in jobs if "raypp_run" in known]


def job_state(ticket: Ticket) -> JobStatus | None:
    """Returns the state of the run's Ray job; None: it was not submitted."""
    jobs = jobs_client().list_jobs()
    return next((job.status for job in jobs if job.submission_id == ticket.submission_id), None)


class Devices:
    """Who holds devices and until when, and which are free. `held`: what each run has, by its name
    on the cluster. `pending`: runs whose placement group waits for room."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, tuple[float, float]]] = {}
        self.pending: list[str] = []
        self._known: dict[str, tuple[float, Running]] = {}

    def look(self) -> None:
        """Asks Ray for placement groups."""
        self.held, self.pending = {}, []
        for group in placement_group_table().values():
            run, _, spares = str(group["name"]).removeprefix("raypp/").partition("/")
            if not group["name"].startswith("raypp/") or group["state"] == "REMOVED":
                continue
            if group["state"] != "CREATED":
                self.pending += [] if spares else [run]
                continue
            here = self.held.setdefault(run, {})
            for index, node in group["bundles_to_node_id"].items():
                bundle, (cpus, gpus) = group["bundles"][index], here.get(node, (0.0, 0.0))
                here[node] = (cpus + bundle.get("CPU", 0.0), gpus + bundle.get("GPU", 0.0))

    def free(self) -> Room:
        """Returns what is free on each living node, by id."""
        return {node: (free.get("CPU", 0.0), free.get("GPU", 0.0)) for node, free in free_per_node().items()}

    def running(self) -> list[Running]:
        """Returns the runs that hold devices. Their controllers say when they end and whether they
        can give way; each is asked every some seconds."""
        now, asked = time.monotonic(), dict[Any, str]()
        for name in self.held:
            if name not in self._known or now - self._known[name][0] >= _ASK_EVERY_S:
                self._known[name] = (now, Running(name, {}))
                with contextlib.suppress(ValueError):  # its controller is gone
                    asked[ray.get_actor(f"raypp/{name}", namespace=NAMESPACE).for_line.remote()] = name
                    self._known[name] = (now, Running(name, {}, gives=True))
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_ASK_S) if asked else ([], [])
        for one in ready:
            with contextlib.suppress(ray.exceptions.RayError):
                told, name = ray.get(one), asked[one]
                ends = None if told["left_s"] is None else time.time() + float(told["left_s"])
                more = {"need": Need(**told["need"]), "sizes": tuple(told["sizes"]), "gives": told["gives"]}
                self._known[name] = (now, Running(name, {}, ends, priority=PRIORITIES[told["priority"]], **more))
        self._known = {name: self._known[name] for name in self.held}
        return [replace(self._known[name][1], holds=holds) for name, holds in self.held.items()]

    def ask_room(self, name: str, ranks: int, why: str) -> None:
        """Asks a run to go on with fewer ranks; 0: to wait in the line."""
        self._known[name] = (time.monotonic(), replace(self._known[name][1], gives=True))
        with contextlib.suppress(ValueError, ray.exceptions.RayError):  # it has just ended
            ray.get(ray.get_actor(f"raypp/{name}", namespace=NAMESPACE).give_way.remote(ranks, why), timeout=_ASK_S)


def view(line: Line, devices: Devices) -> dict[str, Any]:
    """Returns the line and the runs that hold devices, as `raypp queue --json` shows them."""
    devices.look()
    order, running, now = [one.waiting for one in ready(line.waiting, line.started)], devices.running(), time.time()
    asked = rules.read(line.damaged)
    free, taken = with_holds(devices.free(), running, rules.held_nodes(asked))
    starts, (_, why) = expected_starts(order, free, taken, now), next_move(order, free, taken, now)
    if any(not rule.node for rule in asked):
        starts, why = {}, ""  # while the line is paused
    waiting = [
        {key: getattr(one, key) for key in ("run", "url", "user", "priority", "number")}
        | {"needs": str(one.need), "place": place, "since": one.at, "planned_s": one.seconds}
        | {"expected_start": starts.get(one.name), "after": one.after}
        for place, one in enumerate(line.waiting, 1)
    ]
    shown = {"rules": [asdict(rule) for rule in asked], "why": why, "damaged": line.damaged}
    return {"running": _running(running), "waiting": waiting, **shown}


def _running(running: Iterable[Running]) -> list[dict[str, Any]]:
    its = {name: (job.metadata or {}, job.start_time) for name, job in _jobs_of_runs()}
    rows = []
    for one in running:
        known, since = its.get(one.name, ({}, None))
        names = {key: known.get(f"raypp_{key}") for key in ("url", "user")}
        cpus, gpus = (sum(amounts) for amounts in zip(*one.holds.values(), strict=True))
        times = {"since": since and since / 1000, "expected_end": one.ends}
        if one.need is not None:  # its controller has answered
            names["priority"] = next(name for name, value in PRIORITIES.items() if value == one.priority)
        rows.append({"run": known.get("raypp_run", one.name), **names, "cpus": cpus, "gpus": gpus, **times})
    return rows
