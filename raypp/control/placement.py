"""The devices a run holds: a placement group, and spares beside it. Both outlive attempts and controllers."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from raypp.control.lost_nodes import Doubts
from raypp.control.ray_nodes import all_nodes as all_nodes
from raypp.control.ray_nodes import existing_group, make_group, places
from raypp.control.spares import Spares

_PLACEMENT_TIMEOUT_S = 300.0
_INFEASIBLE_GRACE_S = 15.0
_SPARES_AFTER_S = 1.0


@dataclass
class Placement:
    """The run's placement group, kept from one attempt to the next: Ray moves the bundles of a lost node itself.

    Args:
        name: Of the group; `name/spares` is that of the spares.
        world: Bundles, one per rank.
        bundle: What each holds.
        spares: Bundles held ready beside them. They are let go when the group waits for room.
        patience_s: How much longer than usual to wait for room.
    """

    name: str
    world: int
    bundle: dict[str, float]
    spares: int = 0
    patience_s: float = 0.0
    group: PlacementGroup | None = None
    left_out: frozenset[str] = frozenset()
    """Nodes that are not to be used, by id."""
    asked_at: float = 0.0
    infeasible_since: float | None = None
    beside: Spares = field(init=False)
    doubts: Doubts = field(default_factory=Doubts)
    _used: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.beside = Spares(f"{self.name}/spares", self.spares, self.bundle)

    def take_over(self) -> None:
        """Goes on with the groups that an earlier life of the controller made, where they fit."""
        self.group = existing_group(self.name)
        if self.group is not None and self.group.bundle_count != self.world:
            self.remove()
        self.beside.take_over()

    def ask(self) -> None:
        """Makes the group unless it is there; the wait for it starts again."""
        self.asked_at = time.monotonic()
        self.infeasible_since = None
        if self.group is None:
            self.group = make_group(self.name, self.world, self.bundle, self.left_out | self.doubts.lost())

    def hold_spares(self) -> None:
        """Asks for the spares, unless they are held or asked for already."""
        self.beside.hold(self._used, self.left_out)

    def nodes(self) -> list[str] | None:
        """The node of each bundle; None while not all are placed, or one is on a node whose loss Ray has yet to see."""
        table = self._table()
        where = _where(table)
        lost = self.doubts.lost()
        where = {bundle: node for bundle, node in where.items() if node not in lost}
        if table.get("state") == "CREATED" and len(where) == self.world:
            self._used = set(where.values())
            return [where[index] for index in range(self.world)]
        if time.monotonic() - self.asked_at > _SPARES_AFTER_S:
            self.beside.release("the run needs the room")
        return None

    def waited_s(self) -> float:
        """How long the group has been waited for."""
        return time.monotonic() - self.asked_at

    def room(self, avoided: frozenset[str] = frozenset()) -> int:
        """How many ranks there is room for now; what the run holds counts, what is left out does not.

        Args:
            avoided: More nodes to leave out, by id.
        """
        held = Counter(_where(self._table()).values()) + self.beside.where()
        return places(self.bundle, held, self.left_out | avoided | self.doubts.lost())

    def hopeless(self) -> str | None:
        """Why waiting on makes no sense, or None."""
        now = time.monotonic()
        state = (self._table().get("stats") or {}).get("scheduling_state")
        if state != "INFEASIBLE":
            self.infeasible_since = None
        elif self.infeasible_since is None:
            self.infeasible_since = now
        want = ", ".join(f"{amount:g} {name}" for name, amount in self.bundle.items())
        if self.infeasible_since is not None and now - self.infeasible_since > _INFEASIBLE_GRACE_S + self.patience_s:
            return f"the cluster cannot hold {self.world} ranks of {want}: it has {capacity()}"
        if now - self.asked_at > _PLACEMENT_TIMEOUT_S + self.patience_s:
            waited = f"did not become free within {_PLACEMENT_TIMEOUT_S + self.patience_s:.0f} s"
            return f"{self.world} ranks of {want} {waited}; the cluster has {capacity()}"
        return None

    def remove(self) -> None:
        """Gives everything back; Ray ends what runs in it."""
        if self.group is not None:
            remove_placement_group(self.group)
        self.group = None
        self.beside.release()

    def _table(self) -> dict[str, Any]:
        return dict(placement_group_table(self.group)) if self.group is not None else {}


def _where(table: dict[str, Any]) -> dict[int, str]:
    """The living node of each bundle that has one."""
    if table.get("state") not in ("CREATED", "RESCHEDULING"):
        return {}
    alive = {node["NodeID"] for node in all_nodes() if node["Alive"]}
    where = {int(index): str(node) for index, node in table["bundles_to_node_id"].items()}
    return {index: node for index, node in where.items() if node in alive}


def group_name(run: str) -> str:
    """The name of a run's placement group."""
    return f"raypp/{run}"


def holds_devices(run: str) -> bool:
    """Whether a run still has its placement group."""
    return existing_group(group_name(run)) is not None


def remove_groups_of(run: str) -> None:
    """Gives back every device of a run, whoever holds them."""
    for name in (f"{group_name(run)}/spares", group_name(run)):
        group = existing_group(name)
        if group is not None:
            remove_placement_group(group)


def capacity() -> str:
    """What the living nodes have, for people."""
    parts = [
        f"{node['NodeManagerAddress']} ({has.get('CPU', 0):g} CPU, {has.get('GPU', 0):g} GPU)"
        for node in all_nodes()
        if node["Alive"] and (has := node["Resources"]) is not None
    ]
    return ", ".join(parts) or "no living node"
