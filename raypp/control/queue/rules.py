"""What people ask of a cluster's line: a pause, and nodes on which it starts nothing."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put

from raypp.control.ray_state import all_nodes
from raypp.errors import CheckpointError, RayppError
from raypp.untrusted.documents import Bounds, Time, parse_as

_SPACE = "raypp-queue-rules"
"""Namespace in Ray's key-value store. An entry each, so that no two users overwrite each other."""
_PAUSE = "*"
_BOUNDS = Bounds(size=1 << 16)


@dataclass(frozen=True)
class Rule:
    """A held node, or a pause. `node`: its address; empty: a pause. `until`: its end, if any."""

    node: str
    user: str
    since: Time
    until: Time | None = None

    @classmethod
    def parse(cls, data: bytes, place: str) -> Rule:
        """Parses a rule. Raises CheckpointError: it is damaged, or of another raypp."""
        fix = "give the command again"
        return parse_as(cls, data, place, _BOUNDS, CheckpointError, fix, kind="a rule", unknown="ignore")


def read(damaged: list[str] | None = None) -> list[Rule]:
    """Returns what holds now, and forgets what has run out. `damaged`: gets what cannot be read."""
    rules = []
    for key in sorted(_internal_kv_list("", namespace=_SPACE)):
        try:
            data = _internal_kv_get(key, namespace=_SPACE)
            rule = data and Rule.parse(data, f"the rule {key.decode(errors='replace')} of the line")
        except RayppError as error:
            (damaged if damaged is not None else []).append(str(error))
            continue
        if rule and rule.until is not None and rule.until <= time.time():
            _internal_kv_del(key, namespace=_SPACE)
        elif rule:
            rules.append(rule)
    return rules


def write(rule: Rule) -> None:
    """Puts a rule in force, or replaces it."""
    _internal_kv_put(rule.node or _PAUSE, json.dumps(asdict(rule)).encode(), namespace=_SPACE)


def remove(node: str) -> None:
    _internal_kv_del(node or _PAUSE, namespace=_SPACE)


def held_nodes(rules: list[Rule] | None = None) -> dict[str, float | None]:
    """Returns until when each held node is, by id; None: unknown. `rules`: None reads them."""
    held = {rule.node: rule.until for rule in (read() if rules is None else rules) if rule.node}
    nodes = ((node["NodeID"], node["NodeManagerAddress"]) for node in (all_nodes() if held else ()) if node["Alive"])
    return {node: held[address] for node, address in nodes if address in held}
