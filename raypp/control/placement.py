"""The devices of a run: its placement group, and one for spares, which outlive controllers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypp.control.ray_state import LostNodes, all_nodes, capacity, existing_group, group_name, places, run_of
from raypp.job.job import Job
from raypp.records import EventKind

_NODE_LABEL = "ray.io/node-id"
_PLACEMENT_TIMEOUT_S = 300.0
_INFEASIBLE_GRACE_S = 15.0
_RELEASE_SPARES_AFTER_S = 1.0
_SPARES_CHECK_S = 1.0
_SPARES_TIMEOUT_S = 5.0
_TELL_WAIT_S = 3.0
_MOST_NEXT_NODES, _NEXT_NODES_S = 2, 30.0


@dataclass
class SpareDevices:
    """Devices reserved in case a node of the run is lost. The run never waits for them. They are
    requested on unused nodes, else on any. `count`: bundles, one per rank that can be replaced."""

    name: str
    count: int
    bundle: dict[str, float]
    group: PlacementGroup | None = None
    _other_nodes: bool = False
    _asked_at: float = 0.0
    _checked_at: float = 0.0
    _held: bool = False
    _reported_missing: bool = False
    _events: list[tuple[EventKind, str]] = field(default_factory=list)

    def take_over(self) -> None:
        """Takes over the group that an earlier controller process made."""
        self.group = existing_group(self.name) if self.count else None
        self._held = self.group is not None

    def hold(self, used: Collection[str], excluded: Collection[str] = ()) -> None:
        """Requests the spares unless that is done, and records what has become of the request.
        `used`: nodes of the run, by id. `excluded`: nodes that must not be used at all."""
        now = time.monotonic()
        if not self.count or now - self._checked_at < _SPARES_CHECK_S:
            return
        self._checked_at = now
        if self.group is None:
            self._request({*used, *excluded}, other_nodes=True)
            return
        placed = dict(placement_group_table(self.group)).get("state") == "CREATED"
        amount = f"{self.count} spare{'s' if self.count > 1 else ''}"
        if placed and not self._held:
            self._events.append(("spares_held", f"{amount} reserved"))
            self._reported_missing = False
        elif not placed and self._held:
            self._asked_at = now  # their node was lost; Ray looks for another
        elif not placed and now - self._asked_at > _SPARES_TIMEOUT_S:
            if self._other_nodes:
                self.release()
                self._request(excluded, other_nodes=False)
            elif not self._reported_missing:
                self._reported_missing = True
                self._events.append(("spares_missing", f"no room for {amount}; the run continues without spares"))
        self._held = placed

    def take_events(self) -> list[tuple[EventKind, str]]:
        """Returns the events since the last call, each as kind and message."""
        events, self._events = self._events, []
        return events

    def per_node(self) -> Counter[str]:
        """Returns how many are held on each node."""
        table = dict(placement_group_table(self.group)) if self.group is not None else {}
        return Counter(map(str, table["bundles_to_node_id"].values())) if table.get("state") == "CREATED" else Counter()

    def release(self, why: str = "") -> None:
        """Releases the spares. `why`: for the event; "" records none."""
        if self.group is None:
            return
        remove_placement_group(self.group)
        if why and self._held:
            amount = f"{self.count} spare{'s' if self.count > 1 else ''}"
            self._events.append(("spares_released", f"released {amount}: {why}"))
        self.group, self._held = None, False

    def _request(self, avoided: Collection[str], other_nodes: bool) -> None:
        self.group = make_group(self.name, self.count, self.bundle, avoided)
        self._other_nodes, self._asked_at, self._held = other_nodes, time.monotonic(), False


@dataclass
class Placement:
    """The run's placement group, kept between attempts. Ray itself moves a lost node's bundles.

    Args:
        name: Of the group; `name/spares` is that of the spares.
        bundle: Resources of one bundle.
        spare_count: Spare bundles. They are released when the group waits for room.
        extra_wait_s: How much longer than usual to wait for room.
        lifetime: `detached`; None: Ray removes the group with the job that requests it.
    """

    name: str
    world: int
    bundle: dict[str, float]
    spare_count: int = 0
    extra_wait_s: float = 0.0
    lifetime: str | None = "detached"
    group: PlacementGroup | None = None
    excluded: frozenset[str] = frozenset()
    """Nodes that must not be used, by id."""
    held: Callable[[], Collection[str]] = frozenset
    """Returns nodes to which the run must not come, by id; those that it uses it keeps."""
    spares: SpareDevices = field(init=False)
    lost_nodes: LostNodes = field(default_factory=LostNodes)
    _asked_at: float = 0.0
    _infeasible_since: float | None = None
    _used: set[str] = field(default_factory=set)
    _waits: str | None = None
    _looked_at: float = 0.0
    _next: list[str] = field(default_factory=list)
    _seen_at: float | None = None

    @classmethod
    def of(cls, job: Job, name: str, world: int, device: str, lifetime: str | None = "detached") -> Placement:
        """Returns the placement of a job. `name`: of its run. `world`: ranks of its mesh now."""
        bundle = {"CPU": float(job.resources.cpus_per_rank)} | ({"GPU": 1.0} if device == "cuda" else {})
        elastic = job.recovery.elastic_options
        return cls(group_name(name), world, bundle, job.resources.spares, elastic.grace_s if elastic else 0.0, lifetime)

    def __post_init__(self) -> None:
        self.spares = SpareDevices(f"{self.name}/spares", self.spare_count, self.bundle)

    def take_over(self) -> None:
        """Takes over the groups that an earlier controller process made, where they fit."""
        self.group = existing_group(self.name)
        if self.group is not None and self.group.bundle_count != self.world:
            self.remove()
        self.spares.take_over()

    def request(self) -> None:
        """Requests the group unless it exists, and restarts the wait for it."""
        self._asked_at = time.monotonic()
        self._infeasible_since, self._waits, self._looked_at = None, None, self._asked_at
        if self.group is None:
            self.group = make_group(self.name, self.world, self.bundle, self._avoided(self.excluded), self.lifetime)

    def hold_spares(self) -> None:
        """Requests the spares unless they are held or requested already."""
        if self.spares.count:
            self.spares.hold(self._used, self.excluded | {*self.held()})

    def nodes(self) -> list[str] | None:
        """Returns the node of each bundle; None until all are placed on nodes that answer."""
        table = self._table()
        lost = self.lost_nodes.unreachable()
        where = {bundle: node for bundle, node in _living_nodes(table).items() if node not in lost}
        if table.get("state") == "CREATED" and len(where) == self.world:
            self._used = set(where.values())
            return [where[index] for index in range(self.world)]
        if time.monotonic() - self._asked_at > _RELEASE_SPARES_AFTER_S:
            self.spares.release("the run needs the room")
        return None

    def options(self, bundle: int) -> dict[str, Any]:
        """Returns Ray's options for an actor that uses the resources of a bundle."""
        strategy = PlacementGroupSchedulingStrategy(cast(PlacementGroup, self.group), bundle)
        return {"num_cpus": self.bundle["CPU"], "num_gpus": self.bundle.get("GPU", 0), "scheduling_strategy": strategy}

    def waited_s(self) -> float:
        """Returns how long the run has waited for the group."""
        return time.monotonic() - self._asked_at

    def waits_for(self) -> str | None:
        """Returns what the run waits for, and who has it, as it was lately; None for a while."""
        if time.monotonic() - self._looked_at < _TELL_WAIT_S:
            return self._waits
        self._looked_at, held = time.monotonic(), Counter[str]()
        for group in placement_group_table().values():
            if group["state"] == "CREATED" and group["name"] != self.name:
                held[run_of(group["name"])] += len(group["bundles"])
        who = ", ".join(f"{name} has {count}" for name, count in held.items()) or "no run has any"
        want = ", ".join(f"{amount:g} {name}" for name, amount in self.bundle.items())
        self._waits = f"waits for {self.world} places of {want}, of which {self.room()} are free: {who}"
        return self._waits

    def room(self, excluded: frozenset[str] = frozenset()) -> int:
        """Returns how many ranks there is room for now, counting what the run holds already."""
        held = Counter(_living_nodes(self._table()).values()) + self.spares.per_node()
        return places(self.bundle, held, self._avoided(excluded)).total()

    def next_nodes(self) -> list[str]:
        """Returns at most two nodes to which ranks may move, as it was lately: those that the run
        does not use, and that hold its spares or have room."""
        if self._seen_at is None or time.monotonic() - self._seen_at > _NEXT_NODES_S:
            self._seen_at = time.monotonic()
            held = self.spares.per_node()
            room = places(self.bundle, held, self._used | self._avoided(self.excluded))
            self._next = sorted((node for node in room if room[node]), key=lambda node: (-held[node], node))
        return self._next[:_MOST_NEXT_NODES]

    def hopeless(self) -> str | None:
        """Returns why waiting longer makes no sense; None while it does."""
        now = time.monotonic()
        state = (self._table().get("stats") or {}).get("scheduling_state")
        if state != "INFEASIBLE":
            self._infeasible_since = None
        elif self._infeasible_since is None:
            self._infeasible_since = now
        want = ", ".join(f"{amount:g} {name}" for name, amount in self.bundle.items())
        grace_s, timeout_s = _INFEASIBLE_GRACE_S + self.extra_wait_s, _PLACEMENT_TIMEOUT_S + self.extra_wait_s
        if self._infeasible_since is not None and now - self._infeasible_since > grace_s:
            return f"the cluster cannot hold {self.world} ranks of {want}: it has {self._capacity()}"
        if now - self._asked_at > timeout_s:
            waited = f"did not become free within {timeout_s:.0f} s"
            return f"{self.world} ranks of {want} {waited}; the cluster has {self._capacity()}"
        return None

    def remove(self) -> None:
        """Releases everything; Ray ends the processes in it."""
        if self.group is not None:
            remove_placement_group(self.group)
        self.group = None
        self.spares.release()

    def _capacity(self) -> str:
        return capacity() + ("; people hold nodes of it, `raypp queue` names them" if self.held() else "")

    def _avoided(self, excluded: frozenset[str]) -> frozenset[str]:
        return excluded | self.lost_nodes.unreachable() | ({*self.held()} - self._used)

    def _table(self) -> dict[str, Any]:
        return dict(placement_group_table(self.group)) if self.group is not None else {}


def make_group(
    name: str,
    bundles: int,
    bundle: Mapping[str, float],
    avoided: Collection[str] = (),
    lifetime: str | None = "detached",
) -> PlacementGroup:
    """Requests a placement group of equal bundles; removes an existing one of that name. `avoided`:
    nodes that none of it may be on, by id. `lifetime`: as of `Placement`."""
    existing = existing_group(name)
    if existing is not None:
        remove_placement_group(existing)
    options: dict[str, Any] = {}
    if avoided:
        options["bundle_label_selector"] = [{_NODE_LABEL: f"!in({','.join(sorted(avoided))})"}] * bundles
    made: PlacementGroup = placement_group(
        [dict(bundle)] * bundles, strategy="PACK", name=name, lifetime=lifetime, **options
    )
    return made


def _living_nodes(table: dict[str, Any]) -> dict[int, str]:
    """Returns the living node of each bundle that has one."""
    if table.get("state") not in ("CREATED", "RESCHEDULING"):
        return {}
    alive = {node["NodeID"] for node in all_nodes() if node["Alive"]}
    where = {int(index): str(node) for index, node in table["bundles_to_node_id"].items()}
    return {index: node for index, node in where.items() if node in alive}
