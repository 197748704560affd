"""The ranks of an attempt as the controller sees them, and the seats they are given."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from raypp.control.protocol import Presence
from raypp.failure_kinds import FailureKind
from raypp.mesh.geometry import Mesh
from raypp.records import Coordinates, NodeFacts, RankFailure, RankResult, Seat


@dataclass
class Rank:
    """One rank of an attempt.

    Attributes:
        bundle: Whose resources it uses.
        actor: Its process, once there is one.
        node_id: Of the bundle's node.
        pending: The answer awaited from its process: `where` while starting, then `begin`, then `outcome`.
        result: How it ended, once it has, when that was in order.
        failed: It ended otherwise.
        usable: Its process can take another seat.
    """

    rank: int
    label: str
    coordinates: Coordinates
    bundle: int
    node_id: str
    node: str = ""
    pid: int = 0
    state: str = "starting"
    step: int = 0
    presence: Presence | None = None
    seat: Seat | None = None
    actor: Any = None
    pending: Any = None
    result: RankResult | None = None
    failed: bool = False
    usable: bool = False

    @property
    def ended(self) -> bool:
        return self.failed or self.result is not None

    def failure(self, kind: FailureKind, cause: str, details: str = "") -> RankFailure:
        """Evidence of how it failed."""
        return RankFailure(self.rank, self.label, self.node, self.pid, kind, cause, self.step, details[-4000:])

    def sits(self, presence: Presence, device_index: int) -> None:
        """Its process said where it is."""
        self.presence = dataclasses.replace(
            presence, facts=dataclasses.replace(presence.facts, device_index=device_index)
        )
        self.pid, self.node = presence.facts.pid, presence.facts.ip


def plan_facts(nodes: list[str], known: list[dict[str, Any]]) -> list[NodeFacts]:
    """What is known of each bundle's future process before there is one: its node."""
    by_id = {node["NodeID"]: node for node in known}
    return [
        NodeFacts(node, by_id[node]["NodeManagerAddress"], by_id[node]["NodeManagerHostname"], 0, "") for node in nodes
    ]


def seats_for(run: str, attempt: int, mesh: Mesh, ranks: list[Rank], device: str) -> list[Seat]:
    """The seats, in rank order; rank 0's node is where the ranks meet."""
    present = [rank.presence for rank in ranks if rank.presence is not None]
    nodes = list(dict.fromkeys(presence.facts.node_id for presence in present))
    locals_: dict[str, int] = {}
    seats = []
    for rank, presence in zip(ranks, present, strict=True):
        facts = presence.facts
        local = locals_.get(facts.node_id, 0)
        locals_[facts.node_id] = local + 1
        seats.append(
            Seat(
                run=run,
                attempt=attempt,
                rank=rank.rank,
                world_size=mesh.world,
                coordinates=rank.coordinates,
                mesh_sizes=mesh.sizes,
                local_rank=local,
                node_rank=nodes.index(facts.node_id),
                node=facts.ip,
                master_addr=present[0].facts.ip,
                master_port=present[0].free_port,
                interface=facts.interface,
                device=device,
                device_index=facts.device_index if device == "cuda" else 0,
                nodes=tuple(dict.fromkeys(one.facts.ip for one in present)),
            )
        )
    return [
        dataclasses.replace(seat, local_world_size=locals_[presence.facts.node_id])
        for seat, presence in zip(seats, present, strict=True)
    ]
