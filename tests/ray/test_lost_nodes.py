"""A node is lost or drained: spares, smaller meshes, larger ones again. The ranks are stand-ins."""

import subprocess
import time
from typing import Any

import pytest
from held_back import held_back

from raypp.control.clusters.find import Cluster
from tests.ray.conftest import Started, StartRun
from tests.ray.extra_nodes import ExtraNodes, Node, ray_command

pytestmark = pytest.mark.timeout(600)
_CPUS = 20
"""CPUs per rank. Two ranks fit on each extra node, none on the head."""


def _start(start_run: StartRun, name: str, **more: Any) -> Started:
    resources = {"cpus_per_rank": _CPUS, **more.pop("resources", {})}
    return start_run(name, resources=resources, **more)


def _places(run: Started) -> set[str]:
    return {rank["node"] for rank in run.status()["ranks"]}


def _kill_one_of(run: Started, nodes: list[Node]) -> Node:
    victim = next(node for node in nodes if node.address in _places(run))
    victim.kill()
    return victim


def _committed_in(run: Started, attempt: int) -> bool:
    return any(event.kind == "committed" and event.attempt >= attempt for event in run.reader.events())


@pytest.mark.slow
def test_spares_take_the_place_of_a_lost_node(nodes: ExtraNodes, start_run: StartRun) -> None:
    three = nodes.add(31, 32, 33)
    run = _start(start_run, "spares", steps=100_000, resources={"spares": 2})
    run.wait(lambda: "spares_held" in run.kinds(), "the spares")
    before = _places(run)
    assert len(before) == 2
    victim = _kill_one_of(run, three)
    run.wait_attempt(2)
    assert _places(run) == {node.address for node in three} - {victim.address}
    run.wait(lambda: "spares_missing" in run.kinds(), "word of the missing spares")
    kinds = run.kinds()
    assert kinds.index("spares_released") < len(kinds) - 1 - kinds[::-1].index("seated")
    assert run.stop()["state"] == "STOPPED" and run.status()["restarts"] == 1
    run.assert_nothing_left()


@pytest.mark.slow
def test_spares_that_nobody_has_hold_up_nothing(start_run: StartRun) -> None:
    run = start_run("nospares", steps=100_000, resources={"cpus_per_rank": 1, "spares": 1000})
    run.wait_step(1)
    run.wait(lambda: "spares_missing" in run.kinds(), "word of the missing spares")
    run.wait_step(run.status()["step"] + 10)
    assert run.stop()["state"] == "STOPPED" and run.status()["restarts"] == 0
    run.assert_nothing_left()


def _mesh(run: Started) -> dict[str, int]:
    return {axis: size for axis, size in run.status()["mesh"].items() if size > 1}


def _trains_on(run: Started, mesh: dict[str, int]) -> None:
    def trains() -> bool:
        status = run.status()
        if status.get("state") != "RUNNING" or _mesh(run) != mesh:
            return False
        return any(rank["state"] == "step" for rank in status["ranks"])

    run.wait(trains, f"training on {mesh}")


def _assert_no_step_twice_or_left_out(run: Started) -> None:
    """Asserts that the current attempt, once it took a step, began where the last ended."""
    grown = run.status()["attempt"]
    run.wait(lambda: run.taken()[-1][0] == grown, f"a step of attempt {grown}")
    taken = run.taken()
    before = max(attempt for attempt, _ in taken if attempt < grown)
    last = max(step for attempt, step in taken if attempt == before)
    assert min(step for attempt, step in taken if attempt == grown) == last + 1


@pytest.mark.gate
def test_an_elastic_run_shrinks_when_a_node_stays_away_and_grows_when_one_comes(
    nodes: ExtraNodes, start_run: StartRun
) -> None:
    two = nodes.add(41, 42)
    run = _start(start_run, "elastic", steps=100_000, recovery={"elastic": {"min_ranks": 2, "grace_s": 3}})
    _trains_on(run, {"pp": 2, "fsdp": 2})
    victim = _kill_one_of(run, two)
    _trains_on(run, {"pp": 2})
    assert len(run.status()["ranks"]) == 2 and victim.address not in _places(run)
    shrunk = run.event("reshaped")
    assert (shrunk.details["from"]["fsdp"], shrunk.details["to"]["fsdp"]) == (2, 1)
    rows = [facts["fsdp"] * facts["microbatches"] for facts in (shrunk.details["from"], shrunk.details["to"])]
    assert rows[0] == rows[1]
    restarts = run.status()["restarts"]
    assert restarts == 1

    (third,) = nodes.add(43)
    _trains_on(run, {"pp": 2, "fsdp": 2})
    assert third.address in _places(run) and run.status()["restarts"] == restarts
    _assert_no_step_twice_or_left_out(run)
    assert run.stop()["state"] == "STOPPED"
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_run_begins_small_where_others_hold_the_devices_and_grows_when_they_go(start_run: StartRun) -> None:
    other = start_run("other", steps=100_000, resources={"cpus_per_rank": 2.5})
    other.wait_step(1)
    run = start_run(
        "grows", steps=100_000, resources={"cpus_per_rank": 3}, recovery={"elastic": {"grace_s": 1}, "standby": False}
    )
    _trains_on(run, {"pp": 2})
    assert other.command("stop", False)["state"] == "STOPPED"
    _trains_on(run, {"pp": 2, "fsdp": 2})
    status = run.status()
    assert (len(status["ranks"]), status["restarts"]) == (4, 0)
    _assert_no_step_twice_or_left_out(run)
    assert run.stop()["state"] == "STOPPED"
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_node_that_is_lost_twice_is_left_out(nodes: ExtraNodes, start_run: StartRun) -> None:
    two = nodes.add(51, 52)
    run = _start(start_run, "badnode", steps=100_000, recovery={"elastic": {"grace_s": 3}})
    for _ in range(2):
        _trains_on(run, {"pp": 2, "fsdp": 2})
        victim = two[1]
        victim.kill()
        _trains_on(run, {"pp": 2})
        two[1:] = nodes.add(52)
    run.wait(lambda: "node_left_out" in run.kinds(), "word of the bad node")
    assert run.event("node_left_out").node == "127.0.0.52"
    nodes.add(53)
    _trains_on(run, {"pp": 2, "fsdp": 2})
    assert _places(run) == {"127.0.0.51", "127.0.0.53"}
    assert run.stop()["state"] == "STOPPED"
    run.assert_nothing_left()


@pytest.mark.slow
def test_after_a_hang_without_a_culprit_a_node_that_fails_its_test_is_left_out(
    nodes: ExtraNodes, start_run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")  # the ranks of a test cannot meet there
        nodes.add(54)
    nodes.add(55)
    run = _start(start_run, "unfit", steps=12, fault="stall:0:4:1", hold=3, recovery={"hang_timeout_s": 5})
    run.wait_step(2)
    nodes.add(56)
    run.let_go()
    assert run.wait_end()["state"] == "SUCCEEDED"
    failed, tested = run.event("rank_failed"), run.event("network")
    assert failed.rank is None and "torch was built without a flight recorder" in failed.details["cause"]
    assert "tested 2 nodes by themselves" in tested.message and "127.0.0.54: " in tested.message
    assert run.event("node_left_out").node == "127.0.0.54"
    assert {event.node for event in run.reader.events() if event.kind == "seated" and event.attempt == 2} == {
        "127.0.0.55",
        "127.0.0.56",
    }


def _real() -> dict[str, Any]:
    return {
        "rank_function": None,
        "mesh": {"pp": 2, "dp_replicate": 2},
        "model": {"num_layers": 4, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 2, "ffn_size": 64},
        "data": {"kind": "synthetic", "seq_len": 32, "num_documents": 200},
        "resources": {"env": {"OMP_NUM_THREADS": "1"}},
    }


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_real_ranks_shrink_and_grow_and_take_the_steps_of_an_undisturbed_run(
    nodes: ExtraNodes, start_run: StartRun
) -> None:
    two = nodes.add(61, 62)
    own: dict[str, Any] = {"steps": 150, "pipeline": {"microbatches": 4}, "recovery": {"elastic": {"grace_s": 3}}}
    reference = _start(start_run, "whole", **own, **_real())
    assert reference.wait_end()["state"] == "SUCCEEDED"
    run = _start(start_run, "disturbed", **own, **_real())
    run.wait(lambda: "committed" in run.kinds(), "a commit")
    _kill_one_of(run, two)
    run.wait(lambda: run.kinds().count("reshaped") == 1, "the smaller mesh")
    smaller = run.event("reshaped").attempt
    run.wait(lambda: _committed_in(run, smaller), "a commit of the smaller mesh")
    with held_back(run.pids()):  # or a fast machine ends the run before the node has come
        nodes.add(63)
        run.wait(lambda: run.kinds().count("reshaped") == 2, "the larger mesh")
    status = run.wait_end()
    assert (status["state"], status["step"]) == ("SUCCEEDED", 150)
    actual, expected = (
        [(row["step"], row["loss"], row["tokens"]) for row in one.reader.history()] for one in (run, reference)
    )
    assert [(step, tokens) for step, _, tokens in actual] == [(step, tokens) for step, _, tokens in expected]
    assert [loss for _, loss, _ in actual] == pytest.approx([loss for _, loss, _ in expected], rel=1e-5)
    run.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_real_ranks_go_on_without_a_lost_site_and_take_it_back_at_an_outer_step(
    nodes: ExtraNodes, start_run: StartRun
) -> None:
    (_,), (lost,) = nodes.add(71, labels="site=a"), nodes.add(72, labels="site=b")
    run = _start(
        start_run,
        "sites",
        every=20,
        pipeline={"microbatches": 2},
        train={"steps": 100_000, "sync": {"kind": "outer", "every_steps": 4}},
        recovery={"site_timeout_s": 3},
        **_real(),
    )
    run.wait(lambda: "committed" in run.kinds(), "a commit")
    lost.kill()
    run.wait(lambda: run.kinds().count("reshaped") == 1, "the run without the site")
    alone = run.event("reshaped")
    assert (alone.details["to"]["dp_replicate"], alone.details["to"]["pp"]) == (1, 2)
    run.wait(lambda: _committed_in(run, alone.attempt), "a commit of the site that is left")
    assert _places(run) == {"127.0.0.71"}
    nodes.add(72, labels="site=b")
    run.wait(lambda: run.kinds().count("reshaped") == 2, "both sites")
    _trains_on(run, {"pp": 2, "dp_replicate": 2})
    assert _places(run) == {"127.0.0.71", "127.0.0.72"}
    assert run.stop()["state"] == "STOPPED"
    resumed = [event.step for event in run.reader.events() if event.kind == "resumed"]
    assert len(resumed) == 2 and resumed[0] and resumed[1] and resumed[1] % 4 == 0, resumed
    words = [event.message for event in run.reader.events() if event.kind == "sync"]
    assert "of 1 replicas that trained apart, 2 go on" in words[-1]
    assert [row["step"] for row in run.reader.history()] == list(range(1, 1 + run.status()["step"]))
    run.assert_nothing_left()


def _drain(cluster: Cluster, node: Node, deadline_s: int) -> None:
    assert cluster.embedded is not None
    command, environment = ray_command(
        cluster.embedded, "drain-node", f"--address={cluster.embedded.gcs}", f"--node-id={node.node_id}",
        "--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=the cloud wants it back",
        f"--deadline-remaining-seconds={deadline_s}",
    )  # fmt: skip
    subprocess.run(command, env=environment, check=True, timeout=60, capture_output=True)


@pytest.mark.slow
def test_a_drained_node_is_left_after_a_last_save_and_that_counts_for_no_failure(
    cluster: Cluster, nodes: ExtraNodes, start_run: StartRun
) -> None:
    three = nodes.add(41, 42, 43)
    resources, recovery = {"cpus_per_rank": 20}, {"max_restarts": 0}
    run = start_run("drained", steps=900, every=500, hold=21, resources=resources, recovery=recovery)
    run.wait_step(20)
    used = {rank["node"] for rank in run.status()["ranks"]}
    victim = next(node for node in three if node.address in used)
    at = time.time()
    _drain(cluster, victim, 120)
    run.let_go()
    run.wait_attempt(2)
    assert {rank["node"] for rank in run.status()["ranks"]} == {node.address for node in three} - {victim.address}
    victim.kill()  # as the cloud does at the deadline
    status = run.wait_end()
    assert (status["state"], status["step"]) == ("SUCCEEDED", 900)
    notice, failed = run.event("preemption_notice"), run.event("rank_failed")
    saved = next(event for event in run.reader.events() if event.kind == "committed" and event.time > at)
    assert notice.node == victim.address and "drains" in notice.message
    assert failed.details["kind"] == "preempted" and f"a checkpoint at step {saved.step}" in failed.message
    second = [step for attempt, step in run.taken() if attempt == 2]
    assert second == list(range(saved.step + 1, 901)), "the next attempt went on behind the save"
    run.assert_nothing_left()
