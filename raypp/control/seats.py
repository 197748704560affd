"""The ranks of an attempt as the controller sees them, and the seats they get."""

import dataclasses
import secrets
from collections import Counter
from dataclasses import dataclass
from typing import Any

from raypp.control.protocol import WorkerInfo
from raypp.failure_kinds import FailureKind
from raypp.planning.geometry import Mesh
from raypp.planning.seating import seat_order
from raypp.records import Coordinates, NodeFacts, RankFailure, RankResult, Seat
from raypp.state.run_records.status import ENDED

SITE = "site"
"""The label of a Ray node that names its site: `ray start --labels site=…`."""


@dataclass
class Rank:
    """One rank of an attempt.

    Attributes:
        bundle: The bundle whose resources it uses.
        pending: The pending call to its process: `info` while starting, then `begin`, then
            `outcome`.
        info: Where its process runs, once known.
        result: Its result when it has ended normally.
        reusable: Its process can take another seat.
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
    info: WorkerInfo | None = None
    seat: Seat | None = None
    actor: Any = None
    pending: Any = None
    result: RankResult | None = None
    reusable: bool = False

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def failure(self, kind: FailureKind, cause: str, details: str = "") -> RankFailure:
        """Returns the record of a failure of this rank."""
        return RankFailure(self.rank, self.label, self.node, self.pid, kind, cause, self.step, details[-4000:])

    def set_info(self, info: WorkerInfo, device_index: int) -> None:
        """Records where its process runs."""
        self.info = dataclasses.replace(info, facts=dataclasses.replace(info.facts, device_index=device_index))
        self.pid, self.node = info.facts.pid, info.facts.ip


def plan_facts(nodes: list[str], known: list[dict[str, Any]]) -> list[NodeFacts]:
    """Returns what is known of each bundle's process before it starts: its node."""
    by_id = {node["NodeID"]: node for node in known}
    return [
        NodeFacts(
            node,
            by_id[node]["NodeManagerAddress"],
            by_id[node]["NodeManagerHostname"],
            0,
            "",
            site=by_id[node].get("Labels", {}).get(SITE, ""),
        )
        for node in nodes
    ]


def planned_ranks(mesh: Mesh, nodes: list[str], known: list[dict[str, Any]], *, apart: bool = False) -> list[Rank]:
    """Returns the ranks of a placement in order, seated by their nodes; none has a process yet.
    `nodes`: the node of each bundle. `known`: the cluster's nodes, as Ray lists them. `apart`:
    replicas train apart (`train.sync: {kind: outer}`)."""
    facts = plan_facts(nodes, known)
    ranks = []
    for bundle, number in enumerate(seat_order(mesh, facts, apart=apart)):
        coordinates = mesh.coordinates(number)
        ranks.append(Rank(number, coordinates.label(mesh.sizes), coordinates, bundle, nodes[bundle], facts[bundle].ip))
    return sorted(ranks, key=lambda rank: rank.rank)


def seats_for(run: str, attempt: int, mesh: Mesh, ranks: list[Rank], device: str) -> list[Seat]:
    """Returns the seats in rank order; the rendezvous is on rank 0's node. Their secret is new."""
    present = [rank.info for rank in ranks if rank.info is not None]
    sizes = Counter(info.facts.node_id for info in present)
    nodes, taken = list(sizes), Counter[str]()
    secret = secrets.token_hex(32)
    seats = []
    for rank, info in zip(ranks, present, strict=True):
        facts = info.facts
        seats.append(
            Seat(
                run=run,
                attempt=attempt,
                rank=rank.rank,
                world_size=mesh.world,
                coordinates=rank.coordinates,
                mesh_sizes=mesh.sizes,
                local_rank=taken[facts.node_id],
                local_world_size=sizes[facts.node_id],
                node_rank=nodes.index(facts.node_id),
                node=facts.ip,
                master_addr=present[0].facts.ip,
                master_port=present[0].free_port,
                interface=facts.interface,
                device=device,
                device_index=facts.device_index if device == "cuda" else 0,
                nodes=tuple(dict.fromkeys(one.facts.ip for one in present)),
                secret=secret,
            )
        )
        taken[facts.node_id] += 1
    return seats
