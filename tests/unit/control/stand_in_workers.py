"""Workers, devices and answers for an attempt and a leader to command. No process, no Ray."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError
from stand_in_clock import StandInClock

from raypp.control import attempt, rank_ends
from raypp.control.attempt import Attempt
from raypp.control.placement import Placement
from raypp.control.process_evidence import Death
from raypp.control.protocol import RankEnd, RunRequest, WorkerInfo
from raypp.control.rank_ends import RankEnds
from raypp.control.seats import Rank
from raypp.control.worker_group import Member, WorkerGroup
from raypp.failure_kinds import FailureKind
from raypp.records import NodeFacts, RankFailure, RankResult

NODES = [{"NodeID": name, "NodeManagerAddress": f"10.0.0.{name}", "NodeManagerHostname": name} for name in "12"]


def stand_still(monkeypatch: pytest.MonkeyPatch, *modules: Any, at: float = 1e6) -> StandInClock:
    """Stops the clock of attempts and of these modules at a time later than what came before."""
    clock = StandInClock()
    for module in (attempt, rank_ends, *modules):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(attempt, "all_nodes", lambda: NODES)
    for module in (attempt, rank_ends):
        monkeypatch.setattr(module, "cause_of_worker_death", lambda *_: Death(FailureKind.KILLED, "gone"))
    clock.advance(at)
    return clock


def info_of(rank: int) -> WorkerInfo:
    """What the worker of a rank says that runs on the node of its bundle."""
    node = "12"[rank // 2]
    return WorkerInfo(NodeFacts(node, f"10.0.0.{node}", node, 100 + rank, "eth0"), 2000 + rank)


class Actor:
    """Keeps the calls that it is sent: `actor.leave.remote(3)` is `("leave", 3)`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self.calls.append((method, *arguments)) or object())


class Workers(WorkerGroup):
    """Starts and ends members that are no processes. `done` lists what it did to which bundle."""

    def __init__(self) -> None:
        self.request = RunRequest("r", {})
        self.device = "cpu"
        self.seated: dict[int, Member] = {}
        self.standbys: dict[str, Any] = {}
        self.devices: dict[int, tuple[str, int]] = {}
        self.done: list[tuple[str, int]] = []
        self.standby_starts = 0

    def fill_bundle(self, bundle: int, node: str, label: str, attempt: int, placement: Placement) -> None:
        self.done.append(("start", bundle))
        self.seated[bundle] = Member(Actor(), node)

    def kill(self, bundle: int) -> None:
        if self.seated.pop(bundle, None) is not None:
            self.done.append(("kill", bundle))

    def kill_frozen(self, bundle: int, pid: int) -> None:
        self.done.append(("kill frozen", bundle))
        self.seated.pop(bundle, None)

    def start_standbys(self, next_nodes: Sequence[str] = ()) -> None:
        self.standby_starts += 1


@dataclass
class Devices(Placement):
    """Two bundles on each of two nodes, where there is room."""

    name: str = "raypp/r"
    world: int = 4
    bundle: dict[str, float] = field(default_factory=dict)
    full: str = ""
    """Why waiting for room makes no sense."""
    removed: int = 0

    def request(self) -> None:
        pass

    def next_nodes(self) -> list[str]:
        return []

    def take_over(self) -> None:
        pass

    def nodes(self) -> list[str] | None:
        return None if self.full else ["1", "1", "2", "2"][: self.world]

    def hopeless(self) -> str | None:
        return self.full or None

    def remove(self) -> None:
        self.removed += 1


class Ends(RankEnds):
    """The ends that ranks tell, from a list: `tell(rank, answer)`."""

    def tell(self, rank: Rank, answer: RankEnd | RayError | None) -> None:
        self.__dict__.setdefault("ends", []).append((rank, answer))

    def _answers(self, timeout_s: float) -> list[tuple[Rank, RankEnd | RayError | None]]:
        return self.__dict__.pop("ends", [])


class StandIns(Attempt):
    """An attempt whose workers say where they run when `says` is asked to."""

    workers: Workers

    def __post_init__(self) -> None:
        super().__post_init__()
        self._ends = Ends(self.number, self.ranks, self.workers, self.on_unwritten)
        self._infos: list[tuple[Rank, WorkerInfo | RayError]] = []

    def says(self, rank: Rank, answer: WorkerInfo | RayError | None = None) -> None:
        """A rank's worker answers: by default, that it runs on the node of its bundle."""
        facts = NodeFacts(rank.node_id, f"10.0.0.{rank.node_id}", rank.node_id, 100 + rank.rank, "eth0")
        self._infos.append((rank, answer or WorkerInfo(facts, 2000 + rank.rank)))

    def tells(self, number: int, end: RankResult | RankFailure | RayError | None, reusable: bool = True) -> None:
        """A rank's worker tells how the rank ended."""
        answer = RankEnd(end, reusable) if isinstance(end, RankResult | RankFailure) else end
        self._ends.tell(self.ranks[number], answer)  # type: ignore[attr-defined]

    def _answers(self, timeout_s: float) -> list[tuple[Rank, WorkerInfo | RayError]]:
        infos, self._infos = self._infos, []
        return infos
