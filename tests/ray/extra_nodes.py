"""Adds nodes to the embedded cluster: local raylets, each with its own loopback address."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from one_at_a_time import one_at_a_time

from raypp.control.clusters.find import Cluster
from raypp.control.clusters.local import LocalCluster
from raypp.control.clusters.ray_head import TELL_THE_RAYLET, agent_ports
from raypp.errors import UnreachableError

CPUS = 40
"""CPUs per node. Two ranks that ask for 20 CPUs each fit on a node, and none fits on the head."""
_PATIENCE_S = 300.0


def ray_command(embedded: LocalCluster, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Returns a Ray CLI command, and the environment that makes it act on this cluster. Ray
    replaces the head's 127.0.0.1 by an address on which the head does not listen."""
    program = f"""{TELL_THE_RAYLET}
from ray.scripts.scripts import main
services.resolve_ip_for_localhost = lambda host: host
sys.argv[0] = "ray"
sys.exit(main())
"""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "RAY_"))}
    environment |= embedded.ray_environment() | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "600",  # a head may take long on a busy machine
        "RAY_agent_register_timeout_ms": "300000",  # and so may a node's agents
    }
    environment.pop("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", None)  # such a node has neighbours
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    return [sys.executable, "-c", program, *arguments], environment


@dataclass
class Node:
    address: str
    process: subprocess.Popen[bytes]
    labels: str = ""
    node_id: str = ""

    def kill(self) -> None:
        """Kills the raylet, its agents and its workers at once, like a power failure."""
        with contextlib.suppress(psutil.NoSuchProcess):
            start = psutil.Process(self.process.pid)
            for process in [start, *start.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()


class ExtraNodes:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._nodes: list[Node] = []
        self._directory = tempfile.TemporaryDirectory(prefix="raypp-", dir="/tmp", ignore_cleanup_errors=True)

    def __enter__(self) -> ExtraNodes:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self._nodes:
            node.kill()
        with contextlib.suppress(UnreachableError):  # a head that is gone knows no nodes
            ended = {node.node_id for node in self._nodes} & self._alive().keys()
            self._wait(lambda: not (self._alive().keys() & ended), "the end of the nodes")
        self._directory.cleanup()

    def add(self, *hosts: int, labels: str = "") -> list[Node]:
        """Starts nodes with the addresses 127.0.0.HOST and waits until the cluster lists them."""
        started = []
        for host in hosts:  # one at a time: nodes that start together take each other's ports
            before: set[str] = set()
            self._wait(lambda before=before: before.update(self._alive()) or True, "an answer of the dashboard")
            with one_at_a_time():
                node = Node(f"127.0.0.{host}", self._start(f"127.0.0.{host}", labels), labels)
                self._nodes.append(node)
                started.append(node)
                self._wait(lambda node=node, before=before: self._has_come(node, before), f"the node {node.address}")
        return started

    def _has_come(self, node: Node, before: Collection[str]) -> bool:
        for name, address in self._alive().items():
            if address == node.address and name not in before:
                node.node_id = name
                return True
        if node.process.poll() is not None:  # Ray gives a node 30 s to start, and a loaded machine may need longer
            node.process = self._start(node.address, node.labels)
        return False

    def _start(self, address: str, labels: str) -> subprocess.Popen[bytes]:
        embedded = self._cluster.embedded
        assert embedded is not None
        directory = Path(self._directory.name) / address.rpartition(".")[2]
        directory.mkdir(exist_ok=True)
        command, environment = ray_command(
            embedded,
            *("start", "--block", "--disable-usage-stats", f"--address={embedded.gcs}"),
            f"--node-ip-address={address}",
            f"--num-cpus={CPUS}",
            *([f"--labels={labels}"] if labels else []),
            "--object-store-memory=100000000",
            f"--temp-dir={directory}",  # nodes that share the head's directory would also share its unpacked packages
            *agent_ports(),
            "--min-worker-port=0",
            "--max-worker-port=0",
        )
        with (Path(embedded.ray_dir) / f"node-{address}.log").open("ab") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)

    def _alive(self) -> dict[str, str]:
        answer = self._cluster.dashboard.get_json("/api/v0/nodes?detail=1")
        nodes: list[dict[str, Any]] = answer["data"]["result"]["result"]
        return {str(node["node_id"]): str(node["node_ip"]) for node in nodes if node["state"] == "ALIVE"}

    def _wait(self, condition: Any, event: str) -> None:
        end = time.monotonic() + _PATIENCE_S
        while True:
            with contextlib.suppress(UnreachableError):  # a busy dashboard drops connections
                if condition():
                    return
            if time.monotonic() > end:
                embedded = self._cluster.embedded
                logs = {path.name: path.read_text()[-2000:] for path in Path(embedded.ray_dir).glob("node-*.log")}  # type: ignore[union-attr]
                raise TimeoutError(f"{event} did not come about; alive: {self._alive()}; {logs}")
            time.sleep(0.2)
