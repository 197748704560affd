"""Ray drains a node, as autoscalers and clouds do: the run saves a last checkpoint and continues on
another node."""

from __future__ import annotations

import subprocess
import time

import pytest

from raypp.clusters.find import Cluster
from tests.ray.conftest import StartRun
from tests.ray.extra_nodes import ExtraNodes, Node, ray_command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _drain(cluster: Cluster, node: Node, deadline_s: int) -> None:
    assert cluster.embedded is not None
    command, environment = ray_command(
        cluster.embedded,
        "drain-node",
        f"--address={cluster.embedded.gcs}",
        f"--node-id={node.node_id}",
        "--reason=DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message=the cloud wants it back",
        f"--deadline-remaining-seconds={deadline_s}",
    )
    subprocess.run(command, env=environment, check=True, timeout=60, capture_output=True)


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
