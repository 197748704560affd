"""The embedded cluster of one machine: where it is, and whether it runs. `local_servers` starts it.

It is a Ray head and an S3 server, both on loopback, and a Prometheus where it is installed.
State lives in `$RAYPP_HOME/local/`: `state.json` (pids, addresses, keys; readable by its owner
only), `token` (the cluster's own random token), the logs of the servers, the S3 server's data and
Prometheus' data.
"""

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Lt

from raypp.control.clusters.dashboard import Dashboard
from raypp.errors import RayppError, UnreachableError
from raypp.own_process import OwnProcess
from raypp.proxies import loopback_without_proxy
from raypp.untrusted.documents import parse_as
from raypp.untrusted.files import read_file
from raypp.user_folder import raypp_home

NODE_IP = "127.0.0.1"
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray's switch for clusters of one machine. Without it, Ray replaces 127.0.0.1 by an address of the
network; with a node on 127.0.0.1, all processes of Ray listen on that address only."""
RAY_PARENT, RAY_PREFIX = "/tmp", "raypp-"
_STATE_BYTES = 64 << 10
_GRACE_S = 1.0


@dataclass(frozen=True)
class S3Process:
    """A running server. Another process can stop it, given these fields. `endpoint`:
    `http://127.0.0.1:PORT`. `ports`: all on which it listens there. `directory`: contains its data,
    `weed.log`, `s3.json` (the keys, mode 0600) and the keys of its inner ports."""

    endpoint: str
    access_key: str
    secret_key: str
    pid: int
    started: float
    ports: tuple[int, ...]
    directory: str

    def environment(self) -> dict[str, str]:
        """Returns the environment variables with which `open_store` uses this server."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
        }

    def running(self) -> bool:
        return self._process().find() is not None

    def stop(self, grace_s: float = _GRACE_S) -> None:
        """Ends the server and waits until its process is gone; keeps its data. Idempotent.
        `grace_s`: time between SIGTERM and SIGKILL. An orderly shutdown takes 15 s, because it
        waits for idle connections; acknowledged writes survive a kill as well."""
        self._process().end(grace_s)
        # It leaves its local sockets behind.
        for port in self.ports:
            for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _process(self) -> OwnProcess:
        return OwnProcess(self.pid, self.started)


@dataclass(frozen=True)
class LocalCluster:
    """A running embedded cluster.

    Attributes:
        dashboard: `http://127.0.0.1:port`, a value for `--address`.
        gcs: `host:port` that a process on this machine passes to `ray.init`.
        s3: The S3 server; it holds the bucket `raypp`.
        token_path: File with the token that this cluster requires.
        ray_dir: Only its owner may enter it; contains Ray's folder, of session files and logs.
            Removed by `down`.
        prometheus_port: Where on 127.0.0.1 the dashboard looks for Prometheus.
        prometheus: Its process; None if it was not started.
    """

    dashboard: str
    gcs: str
    num_cpus: int
    ray: OwnProcess
    s3: S3Process
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
    cluster = read_state()
    return None if cluster is None or len(cluster.dead()) == 2 else cluster


def read_state() -> LocalCluster | None:
    """Returns the cluster that was started last, running or not; None if its file is damaged."""
    path = directory() / "state.json"
    try:
        cluster = parse_as(LocalCluster, read_file(path, _STATE_BYTES), str(path))
    except RayppError:
        return None
    processes = [one for one in (cluster.ray, cluster.s3, cluster.prometheus) if one is not None]
    pids, times = [one.pid for one in processes], [one.started for one in processes]
    ours = Path(cluster.ray_dir).parent == Path(RAY_PARENT) and Path(cluster.ray_dir).name.startswith(RAY_PREFIX)
    if not ours or not all(0 < pid < 2**31 for pid in pids) or not all(map(math.isfinite, times)):
        return None  # `down` ends these processes and removes this folder
    return cluster
