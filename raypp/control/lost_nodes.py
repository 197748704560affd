"""Nodes that an attempt has lost and that Ray still takes for alive: giving one up takes it seconds to minutes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from raypp.control import process_evidence
from raypp.control.ray_nodes import all_nodes

_ASK_EVERY_S = 1.0
_LONGEST_S = 120.0
"""Then Ray's word counts again: it may reach a node that the controller does not."""


@dataclass
class Doubts:
    """No rank is started on such a node, where nobody would answer; one that answers again is trusted again."""

    _since: dict[str, float] = field(default_factory=dict)
    _asked_at: float = 0.0
    _lost: frozenset[str] = frozenset()

    def add(self, nodes: Iterable[str]) -> None:
        """Nodes that were told as lost, by id."""
        for node in nodes:
            self._since[node] = time.monotonic()
            self._asked_at = 0.0

    def lost(self) -> frozenset[str]:
        """Those that Ray takes for alive and that do not answer, by id."""
        now = time.monotonic()
        if not self._since or now - self._asked_at < _ASK_EVERY_S:
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
        self._lost, self._asked_at = frozenset(self._since), time.monotonic()
        return self._lost
