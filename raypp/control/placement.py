"""The devices a run holds: a placement group, and another one of spares. Both outlive attempts and controllers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

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
    """

    name: str
    world: int
    bundle: dict[str, float]
    spares: int = 0
    group: PlacementGroup | None = None
    spare_group: PlacementGroup | None = None
    asked_at: float = 0.0
    infeasible_since: float | None = None

    def take_over(self) -> None:
        """Goes on with the groups that an earlier life of the controller made, where they fit."""
        self.group = _existing(self.name)
        if self.group is not None and self.group.bundle_count != self.world:
            self.remove()
        self.spare_group = _existing(f"{self.name}/spares")

    def ask(self) -> None:
        """Makes the group unless it is there; the wait for it starts again."""
        self.asked_at = time.monotonic()
        self.infeasible_since = None
        if self.group is None:
            self.group = _make(self.name, self.world, self.bundle)

    def hold_spares(self) -> None:
        """Asks for the spares, unless they are held or asked for already."""
        if self.spares and self.spare_group is None:
            self.spare_group = _make(f"{self.name}/spares", self.spares, self.bundle)

    def nodes(self) -> list[str] | None:
        """The node of each bundle; None while not all are placed."""
        table = self._table()
        if table.get("state") == "CREATED":
            where = {int(index): str(node) for index, node in table["bundles_to_node_id"].items()}
            alive = {node["NodeID"] for node in all_nodes() if node["Alive"]}
            if set(where.values()) <= alive:
                return [where[index] for index in range(self.world)]
        if self.spare_group is not None and time.monotonic() - self.asked_at > _SPARES_AFTER_S:
            remove_placement_group(self.spare_group)
            self.spare_group = None
        return None

    def hopeless(self) -> str | None:
        """Why waiting on makes no sense, or None."""
        now = time.monotonic()
        state = (self._table().get("stats") or {}).get("scheduling_state")
        if state != "INFEASIBLE":
            self.infeasible_since = None
        elif self.infeasible_since is None:
            self.infeasible_since = now
        want = ", ".join(f"{amount:g} {name}" for name, amount in self.bundle.items())
        if self.infeasible_since is not None and now - self.infeasible_since > _INFEASIBLE_GRACE_S:
            return f"the cluster cannot hold {self.world} ranks of {want}: it has {capacity()}"
        if now - self.asked_at > _PLACEMENT_TIMEOUT_S:
            waited = f"did not become free within {_PLACEMENT_TIMEOUT_S:.0f} s"
            return f"{self.world} ranks of {want} {waited}; the cluster has {capacity()}"
        return None

    def remove(self) -> None:
        """Gives everything back; Ray ends what runs in it."""
        for group in (self.group, self.spare_group):
            if group is not None:
                remove_placement_group(group)
        self.group = self.spare_group = None

    def _table(self) -> dict[str, Any]:
        return dict(placement_group_table(self.group)) if self.group is not None else {}


def group_name(run: str) -> str:
    """The name of a run's placement group."""
    return f"raypp/{run}"


def holds_devices(run: str) -> bool:
    """Whether a run still has its placement group."""
    return _existing(group_name(run)) is not None


def remove_groups_of(run: str) -> None:
    """Gives back every device of a run, whoever holds them."""
    for name in (f"{group_name(run)}/spares", group_name(run)):
        group = _existing(name)
        if group is not None:
            remove_placement_group(group)


def all_nodes() -> list[dict[str, Any]]:
    """Every node Ray has known, dead ones too (`Alive`)."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def capacity() -> str:
    """What the living nodes have, for people."""
    parts = [
        f"{node['NodeManagerAddress']} ({has.get('CPU', 0):g} CPU, {has.get('GPU', 0):g} GPU)"
        for node in all_nodes()
        if node["Alive"] and (has := node["Resources"]) is not None
    ]
    return ", ".join(parts) or "no living node"


def _make(name: str, bundles: int, bundle: dict[str, float]) -> PlacementGroup:
    existing = _existing(name)
    if existing is not None:
        remove_placement_group(existing)
    made: PlacementGroup = placement_group([dict(bundle)] * bundles, strategy="PACK", name=name, lifetime="detached")
    return made


def _existing(name: str) -> PlacementGroup | None:
    try:
        existing: PlacementGroup = ray.util.get_placement_group(name)
    except ValueError:
        return None
    return existing
