"""Placement groups and nodes, as Ray has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import ray
from ray._private import state as ray_state
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

_NODE_LABEL = "ray.io/node-id"


def make_group(name: str, bundles: int, bundle: Mapping[str, float], avoided: Collection[str] = ()) -> PlacementGroup:
    """Asks for a group of equal bundles that outlives whoever asks; one of that name is removed.

    Args:
        avoided: Nodes that none of it may be on, by id.
    """
    existing = existing_group(name)
    if existing is not None:
        remove_placement_group(existing)
    options: dict[str, Any] = {}
    if avoided:
        options["bundle_label_selector"] = [{_NODE_LABEL: f"!in({','.join(sorted(avoided))})"}] * bundles
    made: PlacementGroup = placement_group(
        [dict(bundle)] * bundles, strategy="PACK", name=name, lifetime="detached", **options
    )
    return made


def existing_group(name: str) -> PlacementGroup | None:
    """The group of that name, when there is one."""
    try:
        existing: PlacementGroup = ray.util.get_placement_group(name)
    except ValueError:
        return None
    return existing


def all_nodes() -> list[dict[str, Any]]:
    """Every node Ray has known, dead ones too (`Alive`)."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def places(bundle: Mapping[str, float], held: Counter[str], left_out: Collection[str] = ()) -> int:
    """How many bundles the living nodes can hold: free ones, and those held already.

    Args:
        held: Bundles held on each node.
        left_out: Nodes that are not to be used.
    """
    free: dict[str, dict[str, float]] = ray_state.available_resources_per_node()  # type: ignore[no-untyped-call]
    count = 0
    for node in all_nodes():
        name = node["NodeID"]
        if node["Alive"] and name not in left_out:
            here = free.get(name, {})
            count += held[name] + min(int((here.get(what, 0.0) + 1e-6) // need) for what, need in bundle.items())
    return count
