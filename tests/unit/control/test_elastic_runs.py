"""Which mesh a run has when devices are missing, and what of the job follows from that."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raypp.control import elastic
from raypp.control.attempt import Attempt, AttemptPhase
from raypp.control.elastic import ElasticSizing
from raypp.control.machine import Machine, NodesFailed, RunPhase, step
from raypp.control.placement import Placement
from raypp.control.recovery.policy import AttemptEnd, bad_nodes
from raypp.control.reshape import reshaped, shape_of
from raypp.control.watchers import Turn
from raypp.failure_kinds import FailureKind
from raypp.job.job import Job
from raypp.job.job_file import load_job
from raypp.job.load import parse_job
from raypp.planning.check import check_plan
from raypp.records import Event, RankFailure

REPOSITORY = Path(__file__).parents[3]


def job_of(elastic_options: Any = True, **sections: Any) -> Job:
    return parse_job(
        {
            "name": "a",
            "mesh": {"pp": 2, "dp_replicate": 2},
            "pipeline": {"microbatches": 4, "layers_per_stage": [3, 1]},
            "model": {"num_layers": 4},
            "data": {"kind": "synthetic"},
            "recovery": {"elastic": elastic_options},
            **sections,
        }
    )


@pytest.mark.parametrize(("room", "world"), [(4, 4), (3, 2), (2, 2), (1, 1), (0, None)])
def test_the_mesh_follows_the_room_and_every_step_takes_the_same_rows(room: int, world: int | None) -> None:
    job = job_of()
    best = ElasticSizing(job, lambda event: None).best(room)
    assert (best.world if best else None) == world
    if best is None:
        return
    smaller = reshaped(job, best)
    assert smaller.mesh.world == world and check_plan(smaller) == []
    assert smaller.mesh.replicas * smaller.pipeline.microbatches == job.mesh.replicas * job.pipeline.microbatches
    assert smaller.train == job.train and smaller.data == job.data
    assert smaller.pipeline.layers_per_stage == ([3, 1] if best.pp == 2 else None)
    assert shape_of(smaller) == best


def test_without_elastic_there_is_the_jobs_mesh_or_none() -> None:
    sizing = ElasticSizing(job_of(False), lambda event: None)
    assert sizing.best(3) is None and sizing.best(4) == sizing.wanted


def test_the_job_says_how_small_and_how_large() -> None:
    sizing = ElasticSizing(job_of({"min_ranks": 2, "max_ranks": 3}), lambda event: None)
    assert sizing.best(1) is None
    assert sizing.largest().world == 2


@pytest.mark.parametrize(("gib", "three"), [(0, 3), (20, None), (80, 3), (1, None)])
def test_a_smaller_mesh_fits_into_the_smallest_gpu_or_the_run_waits(gib: int, three: int | None) -> None:
    """Where the memory is unknown, any mesh may. The job's own mesh runs, or is refused as such."""
    job = load_job(REPOSITORY / "jobs" / "full-8b.yaml", ["recovery.elastic=true"]).job
    sizing = ElasticSizing(job, lambda event: None)
    sizing.gpu_bytes = gib << 30
    assert sizing.best(4) == sizing.largest() == sizing.wanted
    best = sizing.best(3)
    assert (best.world if best else None) == three


class _Room(Placement):
    """A group that has waited a minute, with room for three ranks."""

    def waited_s(self) -> float:
        return 60.0

    def room(self, excluded: frozenset[str] = frozenset()) -> int:
        return 3


@pytest.mark.parametrize("gib", [20, 80])
def test_a_run_that_waits_because_of_memory_says_so_once(gib: int) -> None:
    events: list[Event] = []
    sizing = ElasticSizing(load_job(REPOSITORY / "jobs" / "full-8b.yaml", ["recovery.elastic=true"]).job, events.append)
    sizing.gpu_bytes = gib << 30
    machine, placing = Machine(phase=RunPhase.LAUNCHING), SimpleNamespace(phase=AttemptPhase.PLACING)
    for _ in range(2):
        sizing._checked_at = 0.0
        nothing: Any = None
        turn = Turn(machine, cast(Attempt, placing), nothing, _Room("r", 4, {}), nothing, nothing, 9.0)
        reshape = sizing.check(turn)
        assert (reshape.shape.pp if reshape else None) == (None if gib == 20 else 3)
    assert [event.kind for event in events] == ["no_smaller_mesh"] * (gib == 20)
    why = "waits for 4 ranks, with room for 3: on fewer, ranks are planned to need more memory than a GPU has (20 GiB)"
    assert all(event.message == why for event in events)


SITES: Any = {"train": {"sync": {"kind": "outer"}}, "recovery": {"site_timeout_s": 9}}


@pytest.mark.parametrize(("room", "replicas"), [(6, 3), (5, 2), (3, 1), (1, None)])
def test_sites_have_whole_replicas_of_the_jobs_shape(room: int, replicas: int | None) -> None:
    job = job_of(mesh={"fsdp": 2, "dp_replicate": 3}, pipeline={"microbatches": 4}, **SITES)
    best = ElasticSizing(job, lambda event: None).best(room)
    assert (best and (best.dp_replicate, best.fsdp)) == (replicas and (replicas, 2))
    assert best is None or best.microbatches_per_step == 24


class _Nodes(Placement):
    """A group with room for a rank on each node."""

    def room(self, excluded: frozenset[str] = frozenset()) -> int:
        return len({one["NodeID"] for one in elastic.all_nodes() if one["Alive"]} - excluded)


@pytest.mark.parametrize(
    ("alive", "replicas", "excluded"),
    [
        ("a1 a2 b1 b2", 2, ""),
        ("a1 a2 b1", 1, "b1"),
        ("a1 a2 b1", 2, ""),  # at the start, the other of b is waited for
        ("b1 a2 b2 c1", 1, "a2 c1"),
        ("a1 b1", 1, ""),
    ],
)
def test_a_replica_is_not_spread_over_what_is_left_of_sites(
    monkeypatch: pytest.MonkeyPatch, alive: str, replicas: int, excluded: str
) -> None:
    nodes = [{"NodeID": name, "Labels": {"site": name[0]}, "Alive": True} for name in alive.split()]
    monkeypatch.setattr(elastic, "all_nodes", lambda: nodes)
    lost = tuple(RankFailure(0, "", node, 1, FailureKind("node_lost"), "") for node in alive.split())
    machine = Machine(shape=None, history=(AttemptEnd(1, lost, None), AttemptEnd(2, lost, None)))
    sizing = ElasticSizing(job_of(**SITES), lambda event: None)
    assert sizing._excluded(machine, _Nodes("r", 4, {}), 2 * replicas) == frozenset(excluded.split())


def test_a_node_that_failed_a_test_is_left_out_while_the_others_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["n0", "n1", "n2"]
    nodes = [{"NodeID": name, "NodeManagerAddress": f"at-{name}", "Alive": True} for name in names]
    monkeypatch.setattr(elastic, "all_nodes", lambda: nodes)
    machine, _ = step(Machine(), NodesFailed((("at-n1", "hangs"), ("gone", "hangs"))))
    assert machine.unfit == (("at-n1", "hangs"), ("gone", "hangs"))
    for pp, excluded in ((2, {"n1"}), (3, set())):
        heard: list[Event] = []
        sizing = ElasticSizing(job_of(False, mesh={"pp": pp}), heard.append)
        assert sizing._excluded(machine, _Nodes("r", 4, {})) == excluded
        assert [event.message for event in heard] == ["at-n1 failed its test (hangs) and is excluded from now on"][
            : 3 - pp
        ]


def test_a_node_is_bad_when_two_attempts_lost_it_and_not_when_ranks_died_on_it() -> None:
    def end(attempt: int, *kinds: str) -> AttemptEnd:
        failures = tuple(RankFailure(n, "", "10.0.0.3", 1, FailureKind(kind), "") for n, kind in enumerate(kinds))
        return AttemptEnd(attempt, failures, None)

    assert bad_nodes([end(1, "node_lost", "node_lost"), end(2, "killed"), end(3, "out_of_memory")]) == {}
    assert bad_nodes([end(1, "node_lost"), end(2, "raylet_lost", "lost_peer")]) == {"10.0.0.3": 2}
