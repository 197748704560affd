"""The embedded cluster of one machine: a Ray head and an S3 server, both on loopback, and a
Prometheus where it is installed.

State lives in `$RAYPP_HOME/local/`: `state.json` (pids, addresses, keys; readable by its owner
only), `token` (the cluster's own random token), the logs of the servers, the S3 server's data and
Prometheus' data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from annotated_types import Ge, Lt

from raypp.clusters.dashboard import Dashboard
from raypp.clusters.ray_head import LOOPBACK_ONLY, NODE_IP, RAY_FILES, SlowStartError, start_ray_head, wait_for_ray
from raypp.clusters.seaweed import SeaweedServer
from raypp.clusters.user_folder import locked, private_directory, raypp_home, write_private
from raypp.environment import need
from raypp.errors import RayppError, UnreachableError
from raypp.memory.files import remove_dead
from raypp.own_process import OwnProcess
from raypp.ports import free_ports, held_port
from raypp.proxies import loopback_without_proxy
from raypp.untrusted.documents import parse_as
from raypp.untrusted.files import read_file

BUCKET = "raypp"
_STARTS = 4
"""How often Ray is started, whose own time for a start is too short for an overloaded machine."""
_STATE_BYTES = 64 << 10
_DASHBOARD_PORT = 8265
"""Ray's own, for the dashboard of the first cluster on a machine. Others get one that is free."""
_RAY_PARENT, _RAY_PREFIX = "/tmp", "raypp-"
_TARGETS = "prom_metrics_service_discovery.json"
"""The file in Ray's folder that names the metrics ports of all nodes."""
_SCRAPE_INTERVAL = "5s"
_KEPT_TIME, _KEPT_SIZE = "15d", "512MB"


@dataclass(frozen=True)
class LocalCluster:
    """A running embedded cluster.

    Attributes:
        dashboard: `http://127.0.0.1:port`, a value for `--address`.
        gcs: `host:port` that a process on this machine passes to `ray.init`.
        num_cpus: Number of logical CPU slots.
        ray: The Ray head's process.
        s3: The S3 server; it holds the bucket `raypp`.
        token_path: File with the token that this cluster requires.
        ray_dir: Only its owner may enter it; contains Ray's folder, of session files and logs.
            Removed by `down`.
        python: The interpreter that runs the cluster.
        prometheus_port: Where on 127.0.0.1 the dashboard looks for Prometheus.
        prometheus: Its process; None if it was not started.
    """

    dashboard: str
    gcs: str
    num_cpus: int
    ray: OwnProcess
    s3: SeaweedServer
    token_path: str
    ray_dir: str
    python: str
    prometheus_port: Annotated[int, Ge(1), Lt(65536)]
    prometheus: OwnProcess | None = None

    def dead(self) -> tuple[str, ...]:
        """Returns the names of those of its two servers that do not run."""
        running = {"Ray head": self.ray.find() is not None, "S3 server": self.s3.running()}
        return tuple(name for name, runs in running.items() if not runs)

    def token(self) -> str:
        fix = "restart the embedded cluster: raypp local down, then raypp local up"
        return (
            read_file(Path(self.token_path), _STATE_BYTES, UnreachableError, fix=fix).decode(errors="replace").strip()
        )

    def client(self) -> Dashboard:
        return Dashboard(self.dashboard, self.token())

    def prometheus_url(self) -> str:
        return f"http://127.0.0.1:{self.prometheus_port}"

    def has_prometheus(self) -> bool:
        """Returns whether its Prometheus runs."""
        return self.prometheus is not None and self.prometheus.find() is not None

    def ray_environment(self) -> dict[str, str]:
        """Returns the variables with which a process on this machine can join the cluster."""
        ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": self.token_path, "RAY_ADDRESS": self.gcs}
        ray |= LOOPBACK_ONLY if self.gcs.startswith(f"{NODE_IP}:") else {}
        return ray | loopback_without_proxy()


def directory() -> Path:
    """Returns the directory of the embedded cluster's state."""
    return raypp_home() / "local"


def find() -> LocalCluster | None:
    """Returns the embedded cluster of this RAYPP_HOME if both its servers run; else None."""
    cluster = remains()
    return None if cluster is None or cluster.dead() else cluster


def remains() -> LocalCluster | None:
    """Returns the embedded cluster of this RAYPP_HOME if any of its servers runs; else None."""
    cluster = _read_state()
    return None if cluster is None or len(cluster.dead()) == 2 else cluster


def up(num_cpus: int | None = None) -> tuple[LocalCluster, bool]:
    """Starts the embedded cluster unless it runs; returns when both servers answer.

    If only one of them runs, it goes on, and the other is started beside it, at the same address.
    Prometheus is started, too, if it is installed and does not run. A Prometheus that fails stops
    nothing: see `LocalCluster.has_prometheus`.

    Returns:
        The cluster, and whether this call started it.

    Raises:
        JobError: Ray is not installed.
        UnreachableError: A server did not start; the message contains the end of its log.
    """
    with locked(directory() / "lock"):
        left = remains()
        if left is not None and not left.dead():
            return _with_prometheus(left), False
        need("ray", "local", "raypp local up")
        if left is not None and left.s3.running():
            _end_ray(left)
            # The port of its dashboard, by which known runs name their cluster.
            return _start(num_cpus or left.num_cpus, urlsplit(left.dashboard).port, left.s3), True
        if left is not None:
            return _with_prometheus(_with_s3(left)), True
        _end_leftovers()
        # At least 8: on a laptop, several ranks deliberately share a core.
        num_cpus = num_cpus or max(8, os.cpu_count() or 1)
        with held_port(_DASHBOARD_PORT) as free:
            return _start(num_cpus, _DASHBOARD_PORT if free else None), True


def down(*, delete_data: bool = False) -> bool:
    """Ends exactly the processes that `up` started, and waits for them.

    Args:
        delete_data: Also deletes the data of the S3 server and of Prometheus.

    Returns:
        Whether anything was running.
    """
    with locked(directory() / "lock"):
        ended = _end_leftovers()
        if delete_data:
            for name in ("s3", "prometheus"):
                shutil.rmtree(directory() / name, ignore_errors=True)
        return ended


def _read_state() -> LocalCluster | None:
    path = directory() / "state.json"
    try:
        cluster = parse_as(LocalCluster, read_file(path, _STATE_BYTES), str(path))
    except RayppError:
        return None
    processes = [one for one in (cluster.ray, cluster.s3, cluster.prometheus) if one is not None]
    pids, times = [one.pid for one in processes], [one.started for one in processes]
    ours = Path(cluster.ray_dir).parent == Path(_RAY_PARENT) and Path(cluster.ray_dir).name.startswith(_RAY_PREFIX)
    if not ours or not all(0 < pid < 2**31 for pid in pids) or not all(map(math.isfinite, times)):
        return None  # `down` ends these processes and removes this folder
    return cluster


def _end_leftovers() -> bool:
    cluster = _read_state()
    if cluster is None:
        return False
    alive = len(cluster.dead()) < 2
    _end_ray(cluster)
    cluster.s3.stop()
    (directory() / "state.json").unlink(missing_ok=True)
    remove_dead()
    return alive


def _end_ray(cluster: LocalCluster) -> None:
    """Ends the Ray head, and Prometheus, which reads its folder."""
    cluster.ray.end(patience_s=15)
    if cluster.prometheus is not None:
        cluster.prometheus.end(patience_s=10)
    shutil.rmtree(cluster.ray_dir, ignore_errors=True)


def _with_s3(cluster: LocalCluster) -> LocalCluster:
    """Starts the S3 server again, at its address, which the runs of the Ray head know."""

    def write(s3: SeaweedServer) -> None:
        _write_state(dataclasses.replace(cluster, s3=s3))

    s3 = SeaweedServer.start(
        directory() / "s3", buckets=(BUCKET,), detached=True, ports=cluster.s3.ports, launched=write
    )
    return dataclasses.replace(cluster, s3=s3)


def _start(num_cpus: int, wanted_port: int | None, storage: SeaweedServer | None = None) -> LocalCluster:
    """Starts the servers, the dashboard on any free port unless one is wanted.

    Args:
        num_cpus: Slots of Ray.
        wanted_port: Of the dashboard.
        storage: An S3 server that runs already.
    """
    home = private_directory(directory())
    write_private(home / "token", secrets.token_hex(32))
    # A short path: Ray creates sockets in it, whose paths may not exceed 107 bytes.
    ray_dir = tempfile.mkdtemp(prefix=_RAY_PREFIX, dir=_RAY_PARENT)
    (gcs_port, client_port, free_port, prometheus_port) = free_ports(4)
    dashboard_port = wanted_port or free_port
    settings = (home, ray_dir, num_cpus, gcs_port, client_port, dashboard_port, f"http://127.0.0.1:{prometheus_port}")
    head = start_ray_head(*settings)
    own = OwnProcess.of(head.pid)  # at once, so that a process that ends early can be identified
    kept = storage

    def cluster_with(s3: SeaweedServer) -> LocalCluster:
        return LocalCluster(
            dashboard=f"http://127.0.0.1:{dashboard_port}",
            gcs=f"{NODE_IP}:{gcs_port}",
            num_cpus=num_cpus,
            ray=own,
            s3=s3,
            token_path=str(home / "token"),
            ray_dir=ray_dir,
            python=sys.executable,
            prometheus_port=prometheus_port,
        )

    try:
        # Written before the servers answer, so that `down` also ends what an interrupted `up`
        # started.
        if kept is None:
            storage = SeaweedServer.start(
                home / "s3", buckets=(BUCKET,), detached=True, launched=lambda s3: _write_state(cluster_with(s3))
            )
        assert storage is not None
        cluster = cluster_with(storage)
        _write_state(cluster)
        for again in reversed(range(_STARTS)):
            try:
                wait_for_ray(cluster.client(), head, home / "ray.log")
                break
            except SlowStartError:
                if not again:
                    raise
            own.end(patience_s=10)
            head.wait()
            head = start_ray_head(*settings)
            own = OwnProcess.of(head.pid)
            cluster = dataclasses.replace(cluster, ray=own)
            _write_state(cluster)
    except BaseException:
        own.end(patience_s=10)
        head.wait()
        shutil.rmtree(ray_dir, ignore_errors=True)
        if storage is not None and kept is None:
            storage.stop()
            (home / "state.json").unlink(missing_ok=True)
        raise
    return _with_prometheus(cluster)


def _with_prometheus(cluster: LocalCluster) -> LocalCluster:
    """Starts Prometheus if it is installed and does not run, at the address that the head knows."""
    program = find_prometheus()
    if program is None or cluster.has_prometheus():
        return cluster
    server = _start_prometheus(program, directory() / "prometheus", cluster.ray_dir, cluster.prometheus_port)
    cluster = dataclasses.replace(cluster, prometheus=server)
    _write_state(cluster)
    _wait_for_prometheus(cluster.prometheus_url(), server)
    return cluster


def find_prometheus() -> str | None:
    """Returns the path of the program, if it is installed."""
    return shutil.which("prometheus")


def _start_prometheus(program: str, directory: Path, ray_dir: str, port: int) -> OwnProcess:
    """Starts a Prometheus on loopback that scrapes the embedded cluster, and outlives this process.

    What an earlier one stored in `directory` is kept; one server per directory at a time. Ray's
    folder may get `_TARGETS` later.
    """
    private_directory(directory)
    targets = {"files": [str(Path(ray_dir) / RAY_FILES / _TARGETS)], "refresh_interval": _SCRAPE_INTERVAL}
    config = {
        "global": {"scrape_interval": _SCRAPE_INTERVAL},
        "scrape_configs": [{"job_name": "ray", "file_sd_configs": [targets]}],
    }
    write_private(directory / "prometheus.yml", json.dumps(config, indent=2))  # JSON is YAML
    command = [
        program,
        f"--config.file={directory / 'prometheus.yml'}",
        f"--web.listen-address=127.0.0.1:{port}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--storage.tsdb.retention.time={_KEPT_TIME}",
        f"--storage.tsdb.retention.size={_KEPT_SIZE}",
        "--log.level=warn",
    ]
    with (directory / "prometheus.log").open("wb") as log:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=directory,
            env={"PATH": os.environ.get("PATH", os.defpath)},
            start_new_session=True,
        )
    return OwnProcess.of(server.pid)


def _wait_for_prometheus(url: str, server: OwnProcess, patience_s: float = 30.0) -> bool:
    """Waits until it answers queries; returns whether it does."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + patience_s
    while time.monotonic() < end and server.find() is not None:
        with contextlib.suppress(OSError), opener.open(f"{url}/-/ready", timeout=5):
            return True
        time.sleep(0.05)
    return False


def _write_state(cluster: LocalCluster) -> None:
    write_private(directory() / "state.json", json.dumps(dataclasses.asdict(cluster), indent=2))
