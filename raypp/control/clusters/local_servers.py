"""Starts and ends the servers of the embedded cluster."""

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from raypp.control.clusters.local import (
    NODE_IP,
    RAY_PARENT,
    RAY_PREFIX,
    LocalCluster,
    S3Process,
    directory,
    read_state,
    remains,
)
from raypp.control.clusters.ray_head import RAY_FILES, SlowStartError, start_ray_head, wait_for_ray
from raypp.control.clusters.seaweed import SeaweedServer
from raypp.environment import need
from raypp.own_process import OwnProcess
from raypp.ports import free_ports, held_port
from raypp.state.memory.files import remove_dead
from raypp.user_folder import locked, private_directory, write_private

BUCKET = "raypp"
_STARTS = 4
"""How often Ray is started, whose own time for a start is too short for an overloaded machine."""
_DASHBOARD_PORT = 8265
"""Ray's own, for the dashboard of the first cluster on a machine. Others get one that is free."""
_TARGETS = "prom_metrics_service_discovery.json"
"""The file in Ray's folder that names the metrics ports of all nodes."""
_SCRAPE_INTERVAL = "5s"
_KEPT_TIME, _KEPT_SIZE = "15d", "512MB"


def up(num_cpus: int | None = None) -> tuple[LocalCluster, bool]:
    """Starts the embedded cluster unless it runs; returns when both servers answer.

    If only one of them runs, it goes on, and the other is started beside it, at the same address.
    Prometheus is started, too, if it is installed and does not run. A Prometheus that fails stops
    nothing: see `LocalCluster.has_prometheus`. Returns the cluster, and whether this call started
    it. Raises JobError: Ray is not installed; UnreachableError: a server did not start; the message
    contains the end of its log."""
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
    """Ends exactly the processes that `up` started, and waits for them. `delete_data`: also deletes
    the data of the S3 server and of Prometheus. Returns whether anything was running."""
    with locked(directory() / "lock"):
        ended = _end_leftovers()
        if delete_data:
            for name in ("s3", "prometheus"):
                shutil.rmtree(directory() / name, ignore_errors=True)
        return ended


def _end_leftovers() -> bool:
    cluster = read_state()
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
        _write_state(dataclasses.replace(cluster, s3=S3Process(**vars(s3))))

    s3 = SeaweedServer.start(
        directory() / "s3", buckets=(BUCKET,), detached=True, ports=cluster.s3.ports, launched=write
    )
    return dataclasses.replace(cluster, s3=S3Process(**vars(s3)))


def _start(num_cpus: int, wanted_port: int | None, storage: S3Process | None = None) -> LocalCluster:
    """Starts the servers, the dashboard on any free port unless one is wanted. `num_cpus`: slots of
    Ray. `wanted_port`: of the dashboard. `storage`: an S3 server that runs already."""
    home = private_directory(directory())
    write_private(home / "token", secrets.token_hex(32))
    # A short path: Ray creates sockets in it, whose paths may not exceed 107 bytes.
    ray_dir = tempfile.mkdtemp(prefix=RAY_PREFIX, dir=RAY_PARENT)
    (gcs_port, client_port, free_port, prometheus_port) = free_ports(4)
    dashboard_port = wanted_port or free_port
    settings = (home, ray_dir, num_cpus, gcs_port, client_port, dashboard_port, f"http://127.0.0.1:{prometheus_port}")
    head = start_ray_head(*settings)
    own = OwnProcess.of(head.pid)  # at once, so that a process that ends early can be identified
    kept = storage

    def cluster_with(s3: S3Process) -> LocalCluster:
        return LocalCluster(
            dashboard=f"http://127.0.0.1:{dashboard_port}",
            gcs=f"{NODE_IP}:{gcs_port}",
            num_cpus=num_cpus,
            ray=own,
            s3=S3Process(**vars(s3)),
            token_path=str(home / "token"),
            ray_dir=ray_dir,
            python=sys.executable,
            prometheus_port=prometheus_port,
        )

    try:
        # Written before the servers answer: `down` also ends what an interrupted `up` started.
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
    Keeps what `directory` has; one server per directory. Ray's folder may get `_TARGETS` later."""
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
