"""A model is used by ranks on several nodes, placed by the mesh."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raypp.api.inference import reports_of, turn_of
from raypp.control.clusters.find import Cluster
from raypp.errors import RunFailedError
from raypp.job.job import Job
from raypp.tools.inference.prompts import Encoded
from raypp.tools.inference.source import Source, find_source
from tests.ray.extra_nodes import CPUS, ExtraNodes

pytestmark = pytest.mark.timeout(600)
TINY = Path(__file__).parents[2] / "jobs" / "data" / "tiny-qwen3"
CHOICE: dict[str, Any] = {"temperature": 1.3, "top_p": 0.9, "seed": 5}


def asked(source: Source, prompts: list[Encoded], job: Job, cluster: Cluster | None = None) -> Iterator[list[Any]]:
    request = turn_of(prompts, CHOICE) | {"ends": [], "rows": 2}
    return (one["token"] for one in reports_of(cluster, "generate", source, job, request) if "token" in one)


def wait_for_two_free(cluster: Cluster) -> None:
    end = time.monotonic() + 120
    while sum(node.free_cpus >= CPUS for node in cluster.dashboard.nodes()) < 2:
        assert time.monotonic() < end, cluster.dashboard.nodes()
        time.sleep(0.5)


@pytest.mark.slow
def test_ranks_on_two_nodes_give_the_tokens_of_one_process_and_a_lost_node_is_named(
    cluster: Cluster, nodes: ExtraNodes
) -> None:
    two = nodes.add(51, 52)
    wait_for_two_free(cluster)
    source = find_source(str(TINY))
    prompts = [Encoded("", [7 + number, 3, 11], 9) for number in range(5)]
    alone = sorted(asked(source, prompts, source.job()), key=lambda token: token[0])
    job = source.job(2)
    # A rank fills a node, and none fits on the head. Threads would change how sums are rounded.
    resources = job.resources.model_copy(update={"cpus_per_rank": CPUS, "env": {"OMP_NUM_THREADS": "1"}})
    job = job.model_copy(update={"resources": resources})

    assert sorted(asked(source, prompts, job, cluster), key=lambda token: token[0]) == alone

    wait_for_two_free(cluster)
    many = asked(source, [Encoded("", [1, 2], 60)] * 4000, job, cluster)
    assert next(many)
    two[1].kill()
    with pytest.raises(RunFailedError, match=r"the process of rank \d on 127\.0\.0\.52 \(pid \d+\) ended: "):
        for _ in many:
            pass
