"""The embedded cluster of one machine: a Ray head and a real S3 server, both on loopback.

State lives in `$RAYPP_HOME/local/`: `state.json` (pids, addresses, keys; readable by its owner only),
`token` (the cluster's own random token), the two servers' logs, and the S3 server's data.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypp.clusters.dashboard import Dashboard
from raypp.clusters.processes import OwnProcess
from raypp.clusters.seaweed import SeaweedServer
from raypp.clusters.user_folder import locked, private_directory, raypp_home, write_private
from raypp.errors import Problem, RayppError, UnreachableError
from raypp.memory.files import remove_dead
from raypp.ports import free_ports, port_is_free

BUCKET = "raypp"
# Ray turns 127.0.0.1 and localhost into the machine's outer address; any other loopback address is kept.
_NODE_IP = "127.0.0.2" if sys.platform.startswith("linux") else "127.0.0.1"
_OBJECT_STORE_BYTES = 200 * 1024 * 1024
_RAY_GAVE_UP = ("timed out during startup", "Timed out waiting for node info")
_RAY_PATIENCE_S = 180.0  # six seconds on an idle machine; on a crowded one it takes minutes


@dataclass(frozen=True)
class LocalCluster:
    """A running embedded cluster.

    Attributes:
        dashboard: `http://127.0.0.1:port`, what `--address` takes.
        gcs: `host:port` that a process of this machine gives to `ray.init`.
        num_cpus: Logical CPU slots Ray hands out.
        ray: The Ray head's process.
        s3: The S3 server; it holds the bucket `raypp`.
        token_path: File with the token this cluster asks for.
        ray_dir: Ray's session files and logs; removed by `down`.
        python: The interpreter that runs the cluster.
    """

    dashboard: str
    gcs: str
    num_cpus: int
    ray: OwnProcess
    s3: SeaweedServer
    token_path: str
    ray_dir: str
    python: str

    def token(self) -> str:
        return Path(self.token_path).read_text().strip()

    def client(self) -> Dashboard:
        return Dashboard(self.dashboard, self.token())

    def aws_environment(self) -> dict[str, str]:
        """The AWS variables with which this cluster's S3 server is used."""
        return self.s3.environment()

    def ray_environment(self) -> dict[str, str]:
        """The Ray variables with which a process of this machine may join the cluster."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": self.token_path, "RAY_ADDRESS": self.gcs}


def directory() -> Path:
    """Where the embedded cluster keeps its state."""
    return raypp_home() / "local"


def default_num_cpus() -> int:
    """Logical slots: ranks of a small job take turns on a laptop's cores, deliberately."""
    return max(8, os.cpu_count() or 1)


def find() -> LocalCluster | None:
    """The embedded cluster of this RAYPP_HOME when both its servers live; None otherwise."""
    cluster = _read_state()
    if cluster is None or cluster.ray.find() is None or not cluster.s3.running():
        return None
    return cluster


def up(num_cpus: int | None = None) -> tuple[LocalCluster, bool]:
    """Starts the embedded cluster unless it runs already; returns when both servers answer.

    Returns:
        The cluster, and whether it was started now.

    Raises:
        UnreachableError: A server did not come up; the message ends with its log.
    """
    with locked(directory() / "lock"):
        running = find()
        if running is not None:
            return running, False
        _end_leftovers()
        return _start(num_cpus or default_num_cpus()), True


def down(*, delete_data: bool = False) -> bool:
    """Ends exactly the processes `up` started, and waits for them.

    Args:
        delete_data: Also forget everything in the S3 server.

    Returns:
        Whether anything was running.
    """
    with locked(directory() / "lock"):
        ended = _end_leftovers()
        if delete_data:
            shutil.rmtree(directory() / "s3", ignore_errors=True)
        return ended


def _read_state() -> LocalCluster | None:
    try:
        document: dict[str, Any] = json.loads((directory() / "state.json").read_text())
        document["ray"] = OwnProcess(**document["ray"])
        document["s3"] = SeaweedServer.from_dict(document["s3"])
        return LocalCluster(**document)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _end_leftovers() -> bool:
    cluster = _read_state()
    if cluster is None:
        return False
    alive = cluster.ray.find() is not None or cluster.s3.running()
    cluster.ray.end(patience_s=15)
    cluster.s3.stop()
    shutil.rmtree(cluster.ray_dir, ignore_errors=True)
    (directory() / "state.json").unlink(missing_ok=True)
    remove_dead()
    return alive


def _start(num_cpus: int) -> LocalCluster:
    home = private_directory(directory())
    write_private(home / "token", secrets.token_hex(32))
    # A short path: Ray puts sockets below it, whose paths may not exceed 107 bytes.
    ray_dir = tempfile.mkdtemp(prefix="raypp-", dir="/tmp")
    (gcs_port, client_port, dashboard_port) = free_ports(3)
    if port_is_free(8265):
        dashboard_port = 8265
    ports = (gcs_port, client_port, dashboard_port)
    head = _start_ray_head(home, ray_dir, num_cpus, *ports)
    own = OwnProcess.of(head.pid)  # at once: one that ends early is known all the same
    storage: SeaweedServer | None = None
    try:
        storage = SeaweedServer.start(home / "s3", buckets=(BUCKET,), detached=True)
        cluster = LocalCluster(
            dashboard=f"http://127.0.0.1:{dashboard_port}",
            gcs=f"{_NODE_IP}:{gcs_port}",
            num_cpus=num_cpus,
            ray=own,
            s3=storage,
            token_path=str(home / "token"),
            ray_dir=ray_dir,
            python=sys.executable,
        )
        # Written before all is well, so that `down` ends what a dying `up` leaves.
        write_private(home / "state.json", json.dumps(dataclasses.asdict(cluster), indent=2))
        try:
            _wait_for_ray(cluster, head, home / "ray.log")
        except _SlowStartError:
            own.end(patience_s=10)
            head.wait()
            head = _start_ray_head(home, ray_dir, num_cpus, *ports)
            own = OwnProcess.of(head.pid)
            cluster = dataclasses.replace(cluster, ray=own)
            write_private(home / "state.json", json.dumps(dataclasses.asdict(cluster), indent=2))
            _wait_for_ray(cluster, head, home / "ray.log")
    except BaseException:
        own.end(patience_s=10)
        head.wait()
        if storage is not None:
            storage.stop()
        shutil.rmtree(ray_dir, ignore_errors=True)
        (home / "state.json").unlink(missing_ok=True)
        raise
    return cluster


def _start_ray_head(
    home: Path, ray_dir: str, num_cpus: int, gcs_port: int, client_port: int, dashboard_port: int
) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-c",
        "import sys; from ray.scripts.scripts import main; sys.argv[0] = 'ray'; sys.exit(main())",
        *("start", "--head", "--block", "--disable-usage-stats", "--log-style=record", "--log-color=false"),
        f"--node-ip-address={_NODE_IP}",
        f"--port={gcs_port}",
        f"--ray-client-server-port={client_port}",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={dashboard_port}",
        "--dashboard-agent-listen-port=0",
        "--min-worker-port=0",
        "--max-worker-port=0",
        f"--num-cpus={num_cpus}",
        f"--object-store-memory={_OBJECT_STORE_BYTES}",
        "--include-log-monitor=false",
        f"--temp-dir={ray_dir}",
    ]
    # The operator's keys and Ray settings are not the cluster's: what a job needs is sent with the job.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "RAY_", "RAYPP_"))}
    environment |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(home / "token"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    with (home / "ray.log").open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=ray_dir,
            env=environment,
            start_new_session=True,
        )


class _SlowStartError(UnreachableError):
    """Ray gave its own head up, which did not start within the 30 s it allows: a crowded machine may need longer."""


def _wait_for_ray(cluster: LocalCluster, head: subprocess.Popen[bytes], log: Path) -> None:
    """Until a node is alive and the Jobs service answers."""
    client = cluster.client()
    end = time.monotonic() + _RAY_PATIENCE_S
    while True:
        try:
            if client.nodes():
                client.jobs()
                return
        except (RayppError, KeyError, TypeError):
            pass
        if head.poll() is not None or time.monotonic() > end:
            what = "ended at once" if head.poll() is not None else f"did not answer within {_RAY_PATIENCE_S:.0f} s"
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            error = _SlowStartError if any(words in tail for words in _RAY_GAVE_UP) else UnreachableError
            raise error(
                Problem("raypp local up", f"the Ray head {what}; the end of {log}:\n{tail}", "see `raypp doctor`")
            )
        time.sleep(0.1)
