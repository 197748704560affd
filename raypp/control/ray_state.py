"""What Ray knows of the cluster: nodes, those lost unnoticed, and runs' placement groups."""

import contextlib
import importlib
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private import state as private_state
from ray.util.placement_group import PlacementGroup, remove_placement_group

from raypp.control import process_evidence

_PROBE_EVERY_S = 1.0
_LONGEST_S = 120.0
"""After that Ray's view counts again: it may reach a node that the controller does not."""


def all_nodes() -> list[dict[str, Any]]:
    """Returns every node Ray has known, including dead ones (`Alive`)."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def capacity() -> str:
    """Describes the resources of the living nodes."""
    parts = [
        f"{node['NodeManagerAddress']} ({has.get('CPU', 0):g} CPU, {has.get('GPU', 0):g} GPU)"
        for node in all_nodes()
        if node["Alive"] and (has := node["Resources"]) is not None
    ]
    return ", ".join(parts) or "no living node"


def places(bundle: Mapping[str, float], held: Counter[str], excluded: Collection[str] = ()) -> Counter[str]:
    """Returns how many bundles each living node can hold, with those that the run has (`held`)."""
    found = Counter[str]()
    for name, free in free_per_node().items():
        if name not in excluded:
            fit = min(int((free.get(resource, 0.0) + 1e-6) // need) for resource, need in bundle.items())
            found[name] = held[name] + fit
    return found


def free_per_node() -> dict[str, Mapping[str, float]]:
    """Returns what is free on each living node, by id. What is used up has no entry."""
    free: dict[str, dict[str, float]] = private_state.available_resources_per_node()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: free.get(node["NodeID"], {}) for node in all_nodes() if node["Alive"]}


def draining_nodes() -> dict[str, int]:
    """Returns the nodes that Ray drains, with the deadline in milliseconds since 1970 (0: none)."""
    with contextlib.suppress(Exception):  # Ray has no public way to ask
        state: Any = importlib.import_module("ray._private.state").state
        return dict(state.get_draining_nodes())
    return {}


def existing_group(name: str) -> PlacementGroup | None:
    """Returns the placement group of that name; None when there is none."""
    try:
        existing: PlacementGroup = ray.util.get_placement_group(name)
    except ValueError:
        return None
    return existing


def group_name(run: str) -> str:
    return f"raypp/{run}"


def run_of(group: str) -> str:
    """Returns the run of a placement group's name; the name itself if it is no run's."""
    run = group.removeprefix("raypp/").partition("/")[0]
    return run.rpartition(".")[0] or group


def holds_devices(run: str) -> bool:
    """Returns whether a run still has its placement group."""
    return existing_group(group_name(run)) is not None


def remove_groups_of(run: str) -> None:
    """Releases every device of a run by the run's name."""
    for name in (f"{group_name(run)}/spares", group_name(run)):
        group = existing_group(name)
        if group is not None:
            remove_placement_group(group)


@dataclass
class LostNodes:
    """Nodes that an attempt has lost while Ray still lists them as alive, which it does for seconds
    to minutes. No rank is started on such a node. A node that answers again is trusted again."""

    _since: dict[str, float] = field(default_factory=dict)
    _probed_at: float = 0.0
    _lost: frozenset[str] = frozenset()

    def add(self, nodes: Iterable[str]) -> None:
        """Adds nodes that an attempt has lost, by id."""
        for node in nodes:
            self._since[node] = time.monotonic()
            self._probed_at = 0.0

    def unreachable(self) -> frozenset[str]:
        """Returns those that Ray lists as alive and that do not answer, by id."""
        now = time.monotonic()
        if not self._since or now - self._probed_at < _PROBE_EVERY_S:
            return self._lost
        alive = {node["NodeID"]: node for node in all_nodes() if node["Alive"]}
        for name, since in list(self._since.items()):
            node = alive.get(name)
            if (
                node is None
                or now - since > _LONGEST_S
                or process_evidence.host_answers(node["NodeManagerAddress"], int(node["NodeManagerPort"]))
            ):
                del self._since[name]
        self._lost, self._probed_at = frozenset(self._since), time.monotonic()
        return self._lost
