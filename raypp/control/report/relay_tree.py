"""Which relays a run has, where, and who reports to which: few enough speak to the controller, however many ranks."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypp.control.orphan import asks_every_s
from raypp.control.protocol import NAMESPACE
from raypp.control.report.relay import Relay

log = logging.getLogger(__name__)

_MARK = "relay-"


@dataclass(frozen=True)
class Shape:
    """How reports are gathered.

    Attributes:
        from_ranks: Smaller runs have no relays.
        ranks_each: Most ranks that report to one relay.
        relays_each: Most relays that report to one of the next level.
        most_callers: With more relays in a level there is another level above.
    """

    from_ranks: int = 64
    ranks_each: int = 32
    relays_each: int = 64
    most_callers: int = 8


@dataclass(frozen=True)
class Plan:
    """The relays of a run.

    Attributes:
        relay_of: The lowest relay of each bundle.
        levels: The node of every relay, lowest level first. Relay i of a level reports to number i // `relays_each` of
            the next, and those of the last one to the controller.
    """

    relay_of: tuple[int, ...]
    levels: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, nodes: Sequence[str], shape: Shape) -> Plan | None:
        """The relays for bundles on these nodes; None when they need none.

        Nodes share a relay while all their ranks fit; those of one node share theirs.
        """
        if len(nodes) < shape.from_ranks:
            return None
        by_node: dict[str, list[int]] = {}
        for bundle, node in enumerate(nodes):
            by_node.setdefault(node, []).append(bundle)
        groups: list[list[int]] = []
        for bundles in by_node.values():
            if groups and len(groups[-1]) + len(bundles) <= shape.ranks_each:
                groups[-1] += bundles
                continue
            groups += [bundles[at : at + shape.ranks_each] for at in range(0, len(bundles), shape.ranks_each)]
        relay_of = {bundle: number for number, group in enumerate(groups) for bundle in group}
        levels = [tuple(nodes[group[0]] for group in groups)]
        while len(levels[-1]) > shape.most_callers:
            levels.append(levels[-1][:: shape.relays_each])
        return cls(tuple(relay_of[bundle] for bundle in range(len(nodes))), tuple(levels))


@dataclass
class RelayTree:
    """The relays of a run, kept from one attempt to the next while the nodes are the same.

    Args:
        run: The run's name.
        controller: Handle of its controller.
        orphan_timeout_s: As of the run's workers.
    """

    run: str
    controller: Any
    orphan_timeout_s: float
    shape: Shape = field(default_factory=Shape)
    _plan: Plan | None = None
    _lowest: list[Any] = field(default_factory=list)
    _all: list[Any] = field(default_factory=list)

    def staff(self, nodes: Sequence[str]) -> None:
        """Sees to it that the bundles on these nodes have relays; returns before those have started."""
        plan = Plan.of(nodes, self.shape)
        if plan == self._plan and (plan is not None or not self._all):
            return
        self.dismiss()
        if plan is None:
            return
        self._plan, ask_every_s = plan, asks_every_s(len(nodes))
        above: list[Any] = []
        for level, places in reversed(list(enumerate(plan.levels))):
            ups = [above[number // self.shape.relays_each] if above else None for number in range(len(places))]
            above = [
                self._start(node, f"{level}-{number}", ups[number], ask_every_s) for number, node in enumerate(places)
            ]
            self._all += above
        self._lowest = above
        told = " and ".join(str(len(level)) for level in plan.levels)
        log.info("%d ranks report by relays (%s, from the lowest level)", len(nodes), told)

    def of(self, bundle: int) -> Any:
        """The relay of a bundle; None when it has none."""
        return None if self._plan is None else self._lowest[self._plan.relay_of[bundle]]

    def take_over(self) -> None:
        """Holds those that an earlier life of the controller started, whose ranks know them. `staff` replaces them."""
        self._all += actors_of(self.run)[1]

    def dismiss(self) -> None:
        """Ends all of them."""
        for relay in self._all:
            end_actor(relay)
        self._all, self._lowest, self._plan = [], [], None

    def _start(self, node: str, place: str, above: Any, ask_every_s: float) -> Any:
        # A name is taken until Ray has buried its last bearer, which may have been told to end just now.
        name = f"raypp/{self.run}/{_MARK}{place}-{secrets.token_hex(3)}"
        return (
            ray.remote(Relay)
            .options(
                name=name,
                namespace=NAMESPACE,
                lifetime="detached",
                max_restarts=-1,
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote(self.run, self.controller, above, self.orphan_timeout_s, ask_every_s)
        )


def is_relay(name: str) -> bool:
    """Whether an actor of this name is a relay of some run."""
    return name.count("/") == 2 and name.rpartition("/")[2].startswith(_MARK)


def actors_of(run: str) -> tuple[list[Any], list[Any]]:
    """The living workers and the living relays of a run, whoever started them."""
    workers: list[Any] = []
    relays: list[Any] = []
    for entry in ray.util.list_named_actors(all_namespaces=True):
        name = entry["name"]
        if entry["namespace"] == NAMESPACE and name.startswith(f"raypp/{run}/"):
            with contextlib.suppress(ValueError):
                (relays if is_relay(name) else workers).append(ray.get_actor(name, namespace=NAMESPACE))
    return workers, relays


def end_actor(actor: Any) -> None:
    """Ends a process of a run for good; one that is gone already is fine."""
    with contextlib.suppress(RayActorError, ValueError):
        ray.kill(actor, no_restart=True)
