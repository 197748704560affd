"""A rank's process is examined by the others of its node, of which the standby is dead."""

import os
import signal
from typing import Any

import pytest

from raypp.control.clusters.find import Cluster
from tests.ray.conftest import Started, StartRun
from tests.ray.extra_nodes import ExtraNodes, Node

pytestmark = pytest.mark.timeout(600)


def _wait_for_standby(run: Started, node: Node) -> int:
    def living() -> list[int]:
        standbys = [one for one in run.actors() if "/standby-" in one["name"] and one["state"] == "ALIVE"]
        return [one["pid"] for one in standbys if one["node_id"] == node.node_id and one["pid"]]

    run.wait(living, f"a standby on {node.address}")
    return living()[0]


def _failed(run: Started, attempt: int) -> Any:
    def failures() -> list[Any]:
        return [event for event in run.reader.events() if event.kind == "rank_failed" and event.attempt == attempt]

    run.wait(failures, f"the end of attempt {attempt}")
    return failures()[0]


def _wait_attempt(run: Started, attempt: int) -> None:
    run.wait(lambda: any(taken == attempt for taken, _ in run.taken()), f"a step of attempt {attempt}")


@pytest.mark.slow
def test_a_dead_standby_does_not_hide_the_evidence_of_its_node(cluster: Cluster, start_run: StartRun) -> None:
    with ExtraNodes(cluster) as nodes:
        both = nodes.add(71, 72)
        # Two ranks of 20 CPUs fit on each of these nodes, and none on the head.
        run = start_run(
            "helpers", steps=100_000, resources={"cpus_per_rank": 20}, recovery={"hang_timeout_s": 2, "max_restarts": 9}
        )
        run.wait_step(2)
        victim = run.status()["ranks"][3]
        node = next(one for one in both if one.address == victim["node"])

        os.kill(_wait_for_standby(run, node), signal.SIGKILL)
        os.kill(victim["pid"], signal.SIGSEGV)
        failed = _failed(run, 1)
        assert (failed.rank, failed.details["kind"]) == (3, "segfault"), failed.details
        assert "SIGSEGV" in failed.details["cause"]

        _wait_attempt(run, 2)
        os.kill(_wait_for_standby(run, node), signal.SIGKILL)
        run.wait_step(run.status()["step"] + 2)
        assert run.status()["attempt"] == 2, "a standby that ended took a rank with it"

        os.kill(run.pids()[3], signal.SIGSTOP)
        failed = _failed(run, 2)
        assert (failed.rank, failed.details["kind"]) == (3, "hung"), failed.details
        stacks = {event.rank: event.details["stacks"] for event in run.reader.events() if event.kind == "stacks"}
        assert "process state: stopped" in stacks[3], stacks
        _wait_attempt(run, 3)
        assert run.stop()["state"] == "STOPPED"
        run.assert_nothing_left()
