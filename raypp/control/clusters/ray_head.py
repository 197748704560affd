"""Starts the Ray head of the embedded cluster."""

import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from raypp.control.clusters.dashboard import Dashboard
from raypp.control.clusters.local import LOOPBACK_ONLY, NODE_IP
from raypp.errors import Problem, RayppError, UnreachableError
from raypp.ports import free_ports
from raypp.proxies import loopback_without_proxy

log = logging.getLogger(__name__)

RAY_FILES = "r"
"""Ray lets everybody write to its folder and to what is in it, whatever modes they were made with.
So that folder is in one that only the owner may enter."""
TELL_THE_RAYLET = """
import sys
from ray._private import services
start = services.start_ray_process
def start_process(command, kind, *more, **how):
    port = [word for word in sys.argv if kind == "raylet" and word.startswith("--dashboard-agent-listen-port=")]
    return start([*command, *(word.replace("-agent-listen-", "_agent_listen_") for word in port)], kind, *more, **how)
services.start_ray_process = start_process
"""
"""Ray gives its raylet the ports of the node's agents, except for this one. A raylet that does not
know a port waits for 15 s for the agent, which imports Ray, and aborts."""
_SETUP_WORKER = str(Path(__file__).with_name("setup_worker.py"))
_PROGRAM = f"""{TELL_THE_RAYLET}
from ray._private import ray_constants
from ray.scripts.scripts import main
if sys.platform == "linux":
    ray_constants.SETUP_WORKER_FILENAME = {_SETUP_WORKER!r}  # Ray joins it to its folder of scripts
sys.argv[0] = "ray"
sys.exit(main())
"""
_START = (
    *("start", "--block", "--disable-usage-stats", "--log-style=record", "--log-color=false"),
    *("--min-worker-port=0", "--max-worker-port=0", f"--object-store-memory={200 * 1024 * 1024}"),
)
START_NODE = (
    sys.executable,
    "-c",
    f"{TELL_THE_RAYLET}\nfrom ray.scripts.scripts import main; sys.argv[0] = 'ray'; sys.exit(main())",
    *_START,
)
"""The command that starts a Ray node with this interpreter, and runs until the node ends."""
_AGENTS = ("dashboard-agent-listen-port", "dashboard-agent-grpc-port", "runtime-env-agent-port", "metrics-export-port")
_LONGEST_TMPDIR = 107 - len("/pymp-12345678/listener-12345678")
_RAY_GAVE_UP = ("timed out during startup", "Timed out waiting for node info")
_RAY_PATIENCE_S = 180.0  # a start takes six seconds on an idle machine, but minutes on an overloaded one


def agent_ports(host: str = NODE_IP) -> list[str]:
    """Returns options of `ray start` with the ports of a node's agents (see TELL_THE_RAYLET)."""
    return [f"--{name}={port}" for name, port in zip(_AGENTS, free_ports(len(_AGENTS), host), strict=True)]


def start_ray_head(
    home: Path, ray_dir: str, num_cpus: int, gcs_port: int, client_port: int, dashboard_port: int, prometheus_url: str
) -> subprocess.Popen[bytes]:
    """Starts a head that outlives this process.

    Args:
        home: Contains `token`; gets `ray.log`.
        ray_dir: A folder with a short path that only its owner may enter. Ray's own is in it.
        gcs_port: On NODE_IP.
        client_port: Of Ray Client, on NODE_IP.
        prometheus_url: Where the dashboard looks for Prometheus.
    """
    command = [
        sys.executable,
        "-c",
        _PROGRAM,
        *_START,
        "--head",
        f"--node-ip-address={NODE_IP}",
        f"--port={gcs_port}",
        f"--ray-client-server-port={client_port}",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={dashboard_port}",
        *agent_ports(),
        f"--num-cpus={num_cpus}",
        "--include-log-monitor=false",
        f"--temp-dir={Path(ray_dir) / RAY_FILES}",
    ]
    # The operator's keys and Ray settings are not the cluster's: a job carries what it needs.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "RAY_", "RAYPP_"))}
    environment |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(home / "token"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_agent_register_timeout_ms": "300000",  # how long a raylet asks an agent that starts
        "RAY_PROMETHEUS_HOST": prometheus_url,
        **LOOPBACK_ONLY,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        **short_temporary_directory(),
        **loopback_without_proxy(),
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
            umask=0o077,
        )


def short_temporary_directory() -> dict[str, str]:
    """Returns variables for Ray's processes: another folder for temporary files if this process's
    path is too long for the sockets that the dashboard makes there."""
    mine = tempfile.gettempdir()
    if len(os.fsencode(mine)) <= _LONGEST_TMPDIR:
        return {}
    log.warning("TMPDIR (%s) is too long for Ray's sockets: Ray uses /tmp", mine)
    return {"TMPDIR": "/tmp"}


class SlowStartError(UnreachableError):
    """Ray's own start-up timeout of 30 s expired: an overloaded machine may need longer."""


def wait_for_ray(client: Dashboard, head: subprocess.Popen[bytes], log: Path) -> None:
    """Waits until a node and the Jobs service answer. Raises SlowStartError: Ray gave up; another
    start may succeed. Raises UnreachableError, with the end of `log`: it ended, or is silent."""
    end = time.monotonic() + _RAY_PATIENCE_S
    while True:
        try:
            if client.nodes():
                client.jobs()
                return
        except (RayppError, KeyError, TypeError):
            pass
        if head.poll() is not None or time.monotonic() > end:
            state = "exited at once" if head.poll() is not None else f"did not answer within {_RAY_PATIENCE_S:.0f} s"
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            error = SlowStartError if any(text in tail for text in _RAY_GAVE_UP) else UnreachableError
            fault = f"the Ray head {state}; the end of {log}:\n{tail}"
            raise error(Problem("raypp local up", fault, "run `raypp doctor`"))
        time.sleep(0.1)
