"""The cluster's head dies and restarts from its storage, and runs on other nodes continue."""

import contextlib
import dataclasses
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from raypp.control.clusters.dashboard import Dashboard
from raypp.control.clusters.find import Cluster
from raypp.control.clusters.ray_head import agent_ports
from raypp.errors import RayppError
from raypp.ports import free_ports
from tests.ray.conftest import runs_on
from tests.ray.extra_nodes import ExtraNodes, ray_command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
_ADDRESS = "127.0.0.30"
_PATIENCE_S = 180.0


class Head:
    """A head without devices that keeps its state in a directory (see `docs/control.md`)."""

    def __init__(self, beside: Cluster, directory: Path) -> None:
        assert beside.embedded is not None
        self.directory = directory
        gcs, client, dashboard = free_ports(3)
        self._ports = (f"--port={gcs}", f"--ray-client-server-port={client}", f"--dashboard-port={dashboard}")
        facts = dataclasses.replace(
            beside.embedded,
            gcs=f"{_ADDRESS}:{gcs}",
            dashboard=f"http://127.0.0.1:{dashboard}",
            num_cpus=0,
            ray_dir=str(directory),
        )
        self.cluster = Cluster(facts.dashboard, Dashboard(facts.dashboard, facts.token()), facts)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert self.cluster.embedded is not None
        command, environment = ray_command(
            self.cluster.embedded,
            *("start", "--head", "--block", "--disable-usage-stats", f"--node-ip-address={_ADDRESS}", "--num-cpus=0"),
            *self._ports,
            "--dashboard-host=127.0.0.1",
            *agent_ports(),
            "--min-worker-port=0",
            "--max-worker-port=0",
            "--object-store-memory=100000000",
            f"--temp-dir={self.directory}",
        )
        environment |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(self.directory / "gcs")}
        del environment["RAY_ADDRESS"]
        with (self.directory / "head.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        end = time.monotonic() + _PATIENCE_S
        while not self._answers():
            if time.monotonic() > end or self._process.poll() is not None:
                raise TimeoutError(f"the head did not start:\n{(self.directory / 'head.log').read_text()[-3000:]}")
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            self.cluster.dashboard.jobs()
            return bool(self.cluster.dashboard.get_json("/api/v0/nodes?detail=1"))
        except (RayppError, KeyError, TypeError):
            return False

    def kill(self) -> None:
        """Kills all processes of the head at once, like a power failure."""
        if self._process is None:
            return
        start = psutil.Process(self._process.pid)
        for process in [start, *start.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._process = None
        # If this file existed, Ray would mistake the raylets of the other nodes, which run on this
        # machine too, for a running head.
        (self.directory / "ray_current_cluster").unlink(missing_ok=True)


@pytest.fixture
def head(cluster: Cluster) -> Iterator[Head]:
    with tempfile.TemporaryDirectory(prefix="raypp-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        (Path(directory) / "gcs").mkdir()
        head = Head(cluster, Path(directory))
        head.start()
        try:
            yield head
        finally:
            head.kill()


def test_ranks_train_on_while_the_head_is_away_and_are_led_on_when_it_is_back(head: Head, tmp_path: Path) -> None:
    with ExtraNodes(head.cluster) as nodes:
        nodes.add(31, 32)
        with runs_on(head.cluster, tmp_path) as start:
            run = start("headless", steps=1500, every=20, resources={"cpus_per_rank": 20})
            run.wait_step(20)
            before = run.pids()
            head.kill()
            gone = run.taken()[-1][1]
            run.wait(lambda: run.taken()[-1][1] > gone + 20, "steps while the head is away")
            head.start()
            back = run.taken()[-1][1]
            run.wait_step(min(back + 20, 1500))
            assert run.pids() == before
            status = run.wait_end()
            assert (status["state"], status["step"], status["attempt"]) == ("SUCCEEDED", 1500, 1)
            assert run.taken() == [(1, step) for step in range(1, 1501)]
            assert [row["step"] for row in run.reader.history()] == list(range(1, 1501))
            run.assert_nothing_left()
