"""Two embedded clusters that start at the same time on one machine."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from laptop import bare_environment
from programs import run_python

from raypp.clusters.dashboard import Dashboard
from raypp.ports import port_is_free

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[2]
UP = """
import sys
from raypp.clusters import local

local._DASHBOARD_PORT = int(sys.argv[1])  # another cluster of this machine may have the usual one
cluster, started = local.up(1)
assert started
print(cluster.dashboard, cluster.token())
"""
DOWN = "from raypp.clusters import local; local.down(delete_data=True)"


@pytest.mark.slow
def test_only_one_of_two_clusters_gets_the_usual_port_of_the_dashboard(tmp_path: Path) -> None:
    port = next(port for port in random.SystemRandom().sample(range(6_000, 9_000), 100) if port_is_free(port))
    homes = [
        bare_environment() | {"PYTHONPATH": str(ROOT), "RAYPP_HOME": str(tmp_path / name)}
        for name in ("first", "second")
    ]
    try:
        out: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        starts = [subprocess.Popen([sys.executable, "-c", UP, str(port)], env=home, **out) for home in homes]
        outputs = [process.communicate() for process in starts]
        assert [process.returncode for process in starts] == [0, 0], outputs
        clusters = [out.split() for out, _ in outputs]
        assert sum(address.endswith(f":{port}") for address, _ in clusters) == 1, clusters
        nodes = [Dashboard(address, token).nodes() for address, token in clusters]
        assert [len(listed) for listed in nodes] == [1, 1] and nodes[0][0].node_id != nodes[1][0].node_id
    finally:
        for home in homes:
            run_python("-c", DOWN, env=home, timeout=120)
