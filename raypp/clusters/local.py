"""The embedded cluster of one machine: a Ray head and an S3 server, both on loopback.

State lives in `$RAYPP_HOME/local/`: `state.json` (pids, addresses, keys; readable by its owner
only), `token` (the cluster's own random token), the logs of both servers, and the S3 server's data.
"""

from __future__ import annotations

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
from dataclasses import dataclass
from pathlib import Path

from raypp.clusters.dashboard import Dashboard
from raypp.clusters.processes import OwnProcess
from raypp.clusters.seaweed import SeaweedServer
from raypp.clusters.user_folder import locked, private_directory, raypp_home, write_private
from raypp.environment import need
from raypp.errors import Problem, RayppError, UnreachableError
from raypp.memory.files import remove_dead
from raypp.ports import free_ports, port_is_free
from raypp.untrusted.documents import parse_as
from raypp.untrusted.files import read_file

BUCKET = "raypp"
# Ray replaces 127.0.0.1 and localhost by the machine's external address, but keeps other loopback
# addresses.
_NODE_IP = "127.0.0.2" if sys.platform.startswith("linux") else "127.0.0.1"
_STATE_BYTES = 64 << 10
_RAY_PARENT, _RAY_PREFIX = "/tmp", "raypp-"
_OBJECT_STORE_BYTES = 200 * 1024 * 1024
_RAY_GAVE_UP = ("timed out during startup", "Timed out waiting for node info")
_RAY_PATIENCE_S = 180.0  # a start takes six seconds on an idle machine, but minutes on an overloaded one


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
        fix = "restart the embedded cluster: raypp local down, then raypp local up"
        return (
            read_file(Path(self.token_path), _STATE_BYTES, UnreachableError, fix=fix).decode(errors="replace").strip()
        )

    def client(self) -> Dashboard:
        return Dashboard(self.dashboard, self.token())

    def aws_environment(self) -> dict[str, str]:
        """Returns the AWS variables for using this cluster's S3 server."""
        return self.s3.environment()

    def ray_environment(self) -> dict[str, str]:
        """Returns the Ray variables with which a process on this machine can join the cluster."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": self.token_path, "RAY_ADDRESS": self.gcs}


def directory() -> Path:
    """Returns the directory of the embedded cluster's state."""
    return raypp_home() / "local"


def default_num_cpus() -> int:
    """Returns the number of logical slots; on a laptop, several ranks deliberately share a core."""
    return max(8, os.cpu_count() or 1)


def find() -> LocalCluster | None:
    """Returns the embedded cluster of this RAYPP_HOME if both its servers run; else None."""
    cluster = _read_state()
    if cluster is None or cluster.ray.find() is None or not cluster.s3.running():
        return None
    return cluster


def up(num_cpus: int | None = None) -> tuple[LocalCluster, bool]:
    """Starts the embedded cluster unless it runs; returns when both servers answer.

    Returns:
        The cluster, and whether this call started it.

    Raises:
        JobError: Ray is not installed.
        UnreachableError: A server did not start; the message contains the end of its log.
    """
    with locked(directory() / "lock"):
        running = find()
        if running is not None:
            return running, False
        need("ray", "local", "raypp local up")
        _end_leftovers()
        return _start(num_cpus or default_num_cpus()), True


def down(*, delete_data: bool = False) -> bool:
    """Ends exactly the processes that `up` started, and waits for them.

    Args:
        delete_data: Also deletes the S3 server's data.

    Returns:
        Whether anything was running.
    """
    with locked(directory() / "lock"):
        ended = _end_leftovers()
        if delete_data:
            shutil.rmtree(directory() / "s3", ignore_errors=True)
        return ended


def _read_state() -> LocalCluster | None:
    path = directory() / "state.json"
    try:
        found = parse_as(LocalCluster, read_file(path, _STATE_BYTES), str(path))
    except RayppError:
        return None
    pids, times = (found.ray.pid, found.s3.pid), (found.ray.started, found.s3.started)
    ours = Path(found.ray_dir).parent == Path(_RAY_PARENT) and Path(found.ray_dir).name.startswith(_RAY_PREFIX)
    if not ours or not all(0 < pid < 2**31 for pid in pids) or not all(map(math.isfinite, times)):
        return None  # `down` ends these processes and removes this folder
    return found


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
    # A short path: Ray creates sockets in it, whose paths may not exceed 107 bytes.
    ray_dir = tempfile.mkdtemp(prefix=_RAY_PREFIX, dir=_RAY_PARENT)
    (gcs_port, client_port, dashboard_port) = free_ports(3)
    if port_is_free(8265):
        dashboard_port = 8265
    ports = (gcs_port, client_port, dashboard_port)
    head = _start_ray_head(home, ray_dir, num_cpus, *ports)
    own = OwnProcess.of(head.pid)  # at once, so that a process that ends early can be identified
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
        # Written before the servers answer, so that `down` also ends what an interrupted `up`
        # started.
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
    # The operator's keys and Ray settings do not belong to the cluster: a job carries what it
    # needs.
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
    """Ray's own start-up timeout of 30 s expired: an overloaded machine may need longer."""


def _wait_for_ray(cluster: LocalCluster, head: subprocess.Popen[bytes], log: Path) -> None:
    """Waits until a node is alive and the Jobs service answers."""
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
            what = "exited at once" if head.poll() is not None else f"did not answer within {_RAY_PATIENCE_S:.0f} s"
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            error = _SlowStartError if any(text in tail for text in _RAY_GAVE_UP) else UnreachableError
            raise error(
                Problem("raypp local up", f"the Ray head {what}; the end of {log}:\n{tail}", "run `raypp doctor`")
            )
        time.sleep(0.1)
