"""A Prometheus on loopback that scrapes the embedded cluster, where Prometheus is installed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

from raypp.clusters.user_folder import private_directory, write_private
from raypp.own_process import OwnProcess

TARGETS = "prom_metrics_service_discovery.json"
"""The file in Ray's folder that names the metrics ports of all nodes."""
_SCRAPE_INTERVAL = "5s"
_KEPT_TIME, _KEPT_SIZE = "15d", "512MB"


def find_prometheus() -> str | None:
    """Returns the path of the program, if it is installed."""
    return shutil.which("prometheus")


def start_prometheus(program: str, directory: Path, ray_dir: str, port: int) -> OwnProcess:
    """Starts a server that outlives this process. What an earlier one stored is kept.

    Args:
        program: As `find_prometheus` returns it.
        directory: Of its data, `prometheus.yml` and `prometheus.log`. Created if missing; one
            server per directory at a time.
        ray_dir: Ray's folder; `TARGETS` may appear there later.
        port: Its port on 127.0.0.1.
    """
    private_directory(directory)
    targets = {"files": [str(Path(ray_dir) / TARGETS)], "refresh_interval": _SCRAPE_INTERVAL}
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


def wait_for_prometheus(url: str, server: OwnProcess, patience_s: float = 30.0) -> bool:
    """Waits until it answers queries; returns whether it does."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + patience_s
    while time.monotonic() < end and server.find() is not None:
        with contextlib.suppress(OSError), opener.open(f"{url}/-/ready", timeout=5):
            return True
        time.sleep(0.05)
    return False
