"""Where ranks may run, how long a run waits for room, and which processes it keeps."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from stand_in_clock import StandInClock
from stand_in_workers import Actor

from raypp.control import placement, ray_state, watchers, worker_group
from raypp.control.elastic import ElasticSizing
from raypp.control.machine import Machine, RunPhase
from raypp.control.placement import Placement
from raypp.control.protocol import RunRequest
from raypp.control.ray_state import LostNodes
from raypp.control.watchers import Turn
from raypp.control.worker_group import WorkerGroup
from raypp.job.load import job_document, parse_job

ANSWERS: dict[str, bool | None] = {}
NODES = [
    {"NodeID": name, "NodeManagerAddress": name, "NodeManagerPort": 1, "Alive": True, "Resources": {"CPU": 2.0}}
    for name in ("a", "b")
]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StandInClock:
    """Two nodes that live and answer; `ANSWERS` says which do not."""
    clock = StandInClock()
    for module in (placement, ray_state, watchers):
        monkeypatch.setattr(module, "time", clock)
    for module in (placement, ray_state):
        monkeypatch.setattr(module, "all_nodes", lambda: NODES)
    ANSWERS.clear()
    answers = lambda host, port: ANSWERS.get(host, True)  # noqa: E731
    monkeypatch.setattr(ray_state.process_evidence, "host_answers", answers)
    clock.advance(1000)
    return clock


@dataclass
class Asked(Placement):
    """A placement whose group is as `table` says."""

    table: dict[str, Any] = field(default_factory=lambda: {"state": "PENDING"})
    released: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.group = cast(Any, "made")
        self.spares.release = lambda why="": self.released.append(why)  # type: ignore[method-assign]

    def _table(self) -> dict[str, Any]:
        return self.table


def asked(**more: Any) -> Asked:
    placement = Asked("raypp/r", 2, {"CPU": 1.0}, **more)
    placement.request()
    return placement


PLACED = {"state": "CREATED", "bundles_to_node_id": {0: "a", 1: "b"}}


def test_ranks_start_when_every_bundle_is_on_a_node_that_answers(clock: StandInClock) -> None:
    placement = asked()
    assert placement.nodes() is None
    placement.table = PLACED
    assert placement.nodes() == ["a", "b"]
    placement.lost_nodes.add(["b"])
    ANSWERS["b"] = False
    assert placement.nodes() is None, "Ray lists a node as alive for seconds after it is lost"
    ANSWERS["b"] = True
    clock.advance(2)
    assert placement.nodes() == ["a", "b"]
    placement.table = PLACED | {"state": "RESCHEDULING"}
    assert placement.nodes() is None


def test_a_run_that_waits_for_room_gives_up_its_spares_after_a_second(clock: StandInClock) -> None:
    placement = asked()
    placement.nodes()
    assert placement.released == []
    clock.advance(1.5)
    placement.nodes()
    assert placement.released == ["the run needs the room"]


def test_a_run_that_waits_says_for_what_and_who_has_it_now(
    clock: StandInClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [("raypp/run-a.12345678", 3), ("raypp/run-a.12345678/spares", 1), ("mine", 2), ("raypp/me.87654321", 2)]
    table = {
        i: {"name": name, "state": "CREATED", "bundles": {j: {} for j in range(n)}}
        for i, (name, n) in enumerate(groups)
    }
    monkeypatch.setattr(placement, "placement_group_table", lambda: table)
    waiting = asked()
    waiting.name, waiting.room = "raypp/me.87654321", lambda excluded=frozenset(): 1  # type: ignore[method-assign]
    assert waiting.waits_for() is None
    clock.advance(4)
    assert waiting.waits_for() == "waits for 2 places of 1 CPU, of which 1 are free: run-a has 4, mine has 2"
    del table[0]
    assert "run-a has 4" in (waiting.waits_for() or ""), "it does not look each time"
    clock.advance(4)
    assert waiting.waits_for() == "waits for 2 places of 1 CPU, of which 1 are free: run-a has 1, mine has 2"


@pytest.mark.parametrize("extra_s", [0.0, 100.0], ids=["fixed", "elastic"])
def test_waiting_ends_soon_where_the_cluster_is_too_small_and_late_where_it_is_busy(
    clock: StandInClock, extra_s: float
) -> None:
    small, busy = (asked(extra_wait_s=extra_s) for _ in range(2))
    small.table = {"state": "PENDING", "stats": {"scheduling_state": "INFEASIBLE"}}
    assert small.hopeless() is None
    clock.advance(14 + extra_s)
    assert small.hopeless() is None
    clock.advance(2)
    why = "the cluster cannot hold 2 ranks of 1 CPU: it has a (2 CPU, 0 GPU), b (2 CPU, 0 GPU)"
    assert small.hopeless() == why and busy.hopeless() is None
    small.table = {"state": "PENDING"}
    assert small.hopeless() is None, "a node has come"
    small.table = {"state": "PENDING", "stats": {"scheduling_state": "INFEASIBLE"}}
    assert small.hopeless() is None, "its wait begins anew"
    clock.advance(285)
    assert f"did not become free within {300 + extra_s:.0f} s" in (busy.hopeless() or "")


def test_a_lost_node_is_avoided_until_it_answers_or_ray_alone_reaches_it(clock: StandInClock) -> None:
    lost = LostNodes()
    ANSWERS["a"] = ANSWERS["b"] = False
    lost.add(["a", "b", "gone"])
    assert lost.unreachable() == {"a", "b"}, "Ray knows of the third one"
    ANSWERS["a"] = True
    assert lost.unreachable() == {"a", "b"}, "it is asked once a second"
    clock.advance(1.5)
    assert lost.unreachable() == {"b"}
    clock.advance(121)
    assert lost.unreachable() == set()


def test_a_run_grows_when_there_has_been_room_for_seconds(clock: StandInClock, monkeypatch: pytest.MonkeyPatch) -> None:
    job = parse_job({"name": "r", "mesh": {"pp": 2, "fsdp": 2}, "recovery": {"elastic": True}})
    sizing = ElasticSizing(job, lambda event: None)
    machine = Machine(phase=RunPhase.RUNNING, shape=sizing.best(2))
    placement = asked()
    room = 4
    monkeypatch.setattr(Asked, "room", lambda self, excluded=frozenset(): room)

    def grows() -> bool:
        clock.advance(1.1)
        nothing: Any = None
        record: Any = SimpleNamespace(unsaved=lambda committed_step: "")
        turn = Turn(machine, nothing, nothing, placement, nothing, record)
        return sizing.check(turn) is not None

    assert not grows() and not grows()
    room = 3
    assert not grows(), "a node that comes and goes is not worth a restart"
    room = 4
    assert [grows() for _ in range(4)] == [False, False, False, True]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The workers that a group starts, and `ended` those that it ends."""
    made: list[Any] = []

    def start(self: WorkerGroup, name: str, label: str, **options: Any) -> Actor:
        made.append(Actor())
        return made[-1]

    monkeypatch.setattr(WorkerGroup, "_start", start)
    monkeypatch.setattr(worker_group, "end_actor", lambda actor: actor.ended.remote())
    return made


def group(device: str = "cpu") -> WorkerGroup:
    job = parse_job({"name": "r", "mesh": {"pp": 2}})
    return WorkerGroup(RunRequest("r", job_document(job)), job, None, device)


def fill(workers: WorkerGroup, *nodes: str) -> list[Any]:
    workers.fill(list(nodes), ["pp0", "pp1"], 2, asked())
    return [workers.seated[bundle].actor for bundle in range(2)]


def test_a_bundle_keeps_its_process_else_gets_the_standby_of_its_node_else_a_new_one(
    started: list[Any], clock: StandInClock
) -> None:
    workers = group()
    first = fill(workers, "a", "b")
    assert first == started and all(member.fresh for member in workers.seated.values())
    standby = Actor()
    workers.standbys["b"] = standby
    workers.kill(1)
    assert first[1].calls == [("ended",)]
    assert fill(workers, "a", "b") == [first[0], standby] and len(started) == 2 and not workers.standbys
    assert not any(member.fresh for member in workers.seated.values())
    moved = fill(workers, "a", "a")
    assert moved == [first[0], started[2]] and standby.calls == [("ended",)]


@pytest.mark.parametrize("known", [True, False])
def test_a_standby_takes_a_bundle_with_a_gpu_only_if_its_device_is_known(
    started: list[Any], clock: StandInClock, known: bool
) -> None:
    """Ray gives a standby no device: it uses that of the process before it."""
    workers = group("cuda")
    standby = Actor()
    workers.standbys["b"] = standby
    if known:
        workers.device_index(1, "b", 5)
    assert (fill(workers, "a", "b")[1] is standby) == known
    if known:
        assert workers.device_index(1, "b", 0) == 5


def test_nodes_that_a_rank_may_move_to_have_a_standby_too(
    started: list[Any], clock: StandInClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c, d, dead, full = (letter * 56 for letter in "abcdef")
    nodes = [{"NodeID": name, "Alive": name != dead} for name in (a, b, c, d, dead, full)]
    free = {name: {"CPU": 1.0 if name != full else 0.5} for name in (a, b, c, d, dead, full)}
    monkeypatch.setattr(ray_state, "all_nodes", lambda: nodes)
    monkeypatch.setattr(ray_state.private_state, "available_resources_per_node", lambda: free)
    place = asked()
    place._used = {a}
    assert place.next_nodes() == [b, c]
    del free[b], free[c]
    assert place.next_nodes() == [b, c], "it does not ask all the time"
    clock.advance(31)
    assert place.next_nodes() == [d]
    workers = group()
    fill(workers, a, a)
    workers.start_standbys([b, c])
    assert workers.standbys.keys() == {a, b, c}
    left, kept = workers.standbys[b], workers.standbys[c]
    workers.start_standbys([c])
    assert workers.standbys.keys() == {a, c} and left.calls[-1] == ("ended",)
    assert fill(workers, a, c)[1] is kept and workers.standbys.keys() == {a}


def test_a_process_is_examined_by_the_others_of_its_node(started: list[Any], clock: StandInClock) -> None:
    workers = group()
    fill(workers, "a", "a")
    standby, elsewhere = Actor(), Actor()
    workers.standbys |= {"a": standby, "b": elsewhere}
    assert workers.helpers("a", except_bundle=0) == [standby, started[1]]
    workers.kill_frozen(0, 77)
    assert [one.calls[-1] for one in (standby, started[1])] == [("end_process", 77)] * 2
    assert started[0].calls == [("ended",)] and elsewhere.calls == [] and 0 not in workers.seated
