"""A test bed: the network, a Ray node on every host, and an S3 server at the switch.

State is in `/tmp/rt-NAME/` (readable by its owner only): `state.json`, the Ray token, a log per
host, Ray's session files, the S3 server's data. `down` removes all of it, even after a crash.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from cluster.testbed.network import PREFIX, Cut, Network, remove_leftovers, why_not
from raypp.control.clusters.dashboard import Dashboard, NodeResources
from raypp.control.clusters.ray_head import START_NODE, short_temporary_directory
from raypp.control.clusters.seaweed import SeaweedServer
from raypp.errors import JobError, Problem, RayppError
from raypp.user_folder import private_directory, write_private

BUCKET = "raypp"
HEALTH_CHECK = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""Environment of every Ray node: Ray detects a lost host after about 4 s instead of 63 s."""
_DASHBOARD_PORT = 8265
_GCS_PORT = 6379
_AGENT_PORTS = {
    "dashboard-agent-listen-port": 52365,
    "dashboard-agent-grpc-port": 52366,
    "runtime-env-agent-port": 52367,
    "metrics-export-port": 8080,
}
_READY_S = 240.0
_START_TRIES = 4
_BUSY = 4
_OBJECT_STORE_BYTES = 200_000_000


class BedError(RayppError):
    """A part of the test bed did not start."""


@dataclass
class TestBed:
    """A running test bed. Host 0 is the Ray head.

    Attributes:
        network: Hosts, addresses, cables.
        cpus: CPU slots of each host's Ray node.
        rates: The latest rate of each host's cable, which `heal` restores.
        ray: Whether hosts have a Ray node.
        pin: Whether host i may use only core i (modulo the number of cores).
        store: The S3 server. Its own cable has no limit.
    """

    __test__ = False  # tells pytest that this is not a test class

    network: Network
    cpus: int
    rates: list[str]
    ray: bool = True
    pin: bool = False
    store: SeaweedServer | None = None
    _children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    # Life -----------------------------------------------------------------------------------------

    @classmethod
    def up(
        cls,
        name: str,
        *,
        hosts: int = 2,
        rate: str = "1gbit",
        cpus: int = 2,
        ray: bool = True,
        store: bool = True,
        pin: bool = False,
    ) -> TestBed:
        """Creates hosts, cables, Ray nodes and the S3 server, and waits until all answer.

        On failure, it removes everything.

        Args:
            name: At most 7 characters from a-z and 0-9.
            hosts: Number of hosts.
            rate: Rate of each cable and direction: `38mbit`, `1gbit`, `none`.
            cpus: CPU slots per host.
            ray: False: hosts and cables only, for programs started with `run` and `popen`.
            store: False: no S3 server.
            pin: Whether to give each host one core of this machine.

        Raises:
            JobError: An argument is invalid, or the name is taken.
            BedError: This machine cannot run a test bed (no root …), or a part did not start. The
                message has the end of its log.
        """
        if reason := why_not():
            raise BedError(Problem("testbed", reason, "run it as root on your own Linux machine"))
        bed = cls(Network.make(name, hosts, rate), cpus, [rate] * hosts, ray, pin)
        try:
            bed.network.check_reachability()
            private_directory(bed.directory)
            write_private(bed.token_path, secrets.token_hex(32))
            bed._write_state()
            if store:
                server_files = bed.directory / "s3"
                bed.store = SeaweedServer.start(server_files, buckets=(BUCKET,), detached=True, host=bed.network.switch)
                bed._write_state()
            if ray:
                bed._start_all()
        except BaseException:
            bed.down()
            raise
        return bed

    @classmethod
    def open(cls, name: str) -> TestBed:
        """Returns the running test bed of a name.

        Raises:
            JobError: There is no such test bed.
        """
        try:
            document = json.loads((_directory(name) / "state.json").read_text())
        except (OSError, ValueError):
            raise JobError(
                Problem("name", f"there is no test bed {name!r}", f"python -m cluster.testbed up {name}")
            ) from None
        document["network"] = Network(**document["network"])
        document["store"] = SeaweedServer(**document["store"]) if document["store"] else None
        return cls(**document)

    def down(self) -> None:
        """Stops every process of the bed and removes everything it created."""
        remove(self.network.name)
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(10)

    def __enter__(self) -> TestBed:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    # For users of it ------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return self.network.size

    @property
    def directory(self) -> Path:
        return _directory(self.network.name)

    @property
    def token_path(self) -> Path:
        return self.directory / "token"

    @property
    def address(self) -> str:
        """`http://host:port` of the dashboard, for `raypp --address`.

        This machine and all hosts can reach it.
        """
        return f"http://{self.network.address(0)}:{_DASHBOARD_PORT}"

    def dashboard(self) -> Dashboard:
        return Dashboard(self.address, self.token_path.read_text().strip())

    def environment(self) -> dict[str, str]:
        """Returns the environment variables for using the bed, including the S3 keys.

        They work on a host and on this machine.
        """
        settings = {
            "RAYPP_ADDRESS": self.address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token_path),
        }
        return settings | (self.store.environment() if self.store else {})

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """Returns the command line that runs a command on a host."""
        command = self.network.command(self._checked(host), command)
        return ["taskset", "-c", str(host % (os.cpu_count() or 1)), *command] if self.pin else command

    def with_environment(self, more: dict[str, str] | None = None) -> dict[str, str]:
        """Returns the environment of a command: this process's, the bed's variables, and `more`."""
        return _bare_environment() | (more or {}) | self.environment()

    def run(self, host: int, command: Sequence[str], **more: Any) -> subprocess.CompletedProcess[Any]:
        """Runs `subprocess.run` on a host, with the bed's environment (and `env`, if given)."""
        return subprocess.run(self.command(host, command), **(more | {"env": self.with_environment(more.get("env"))}))

    def popen(self, host: int, command: Sequence[str], **more: Any) -> subprocess.Popen[Any]:
        """Runs `subprocess.Popen` on a host, with the bed's environment (and `env`, if given)."""
        return subprocess.Popen(self.command(host, command), **(more | {"env": self.with_environment(more.get("env"))}))

    # Faults ---------------------------------------------------------------------------------------

    def cut(self, host: int, how: Cut = Cut.BOTH) -> None:
        """Cuts a host's cable: packets are lost, and no connection is closed."""
        self.network.cut(self._checked(host), how)

    def heal(self, host: int) -> None:
        """Undoes a cut. A node that Ray has declared dead stays dead: `start` it again."""
        self.network.heal(self._checked(host), self.rates[host])

    def set_rate(self, host: int, rate: str) -> None:
        """Changes the rate of a host's cable."""
        self.network.set_rate(self._checked(host), rate)
        self.rates[host] = rate
        self._write_state()

    def freeze(self, host: int) -> int:
        """Sends SIGSTOP to every process of a host; returns their number.

        The kernel of the host still answers pings.
        """
        return self.network.signal(self._checked(host), signal.SIGSTOP)

    def thaw(self, host: int) -> int:
        """Sends SIGCONT to every process of a host."""
        return self.network.signal(self._checked(host), signal.SIGCONT)

    def kill(self, host: int, *, silently: bool = False) -> None:
        """Sends SIGKILL to every process of a host.

        The kernel closes their connections, as after a crash of programs.

        Args:
            host: Index of the host.
            silently: Whether to cut its cable first, so that no other host notices, as in a power
                cut.
        """
        if silently:
            self.cut(host)
        self.network.kill(self._checked(host))

    def start(self, host: int, patience_s: float = _READY_S) -> None:
        """Restarts a host's Ray node and waits until Ray lists it.

        It first kills leftover processes of the old node.
        """
        address = self.network.address(self._checked(host))
        self.network.kill(host)
        before = {node.node_id for node in self.dashboard().nodes() if node.ip == address} if host else set()
        self._start_rays([host], partial(_has_node, address=address, but=before), patience_s)

    def nodes(self) -> list[NodeResources]:
        """Returns the nodes that Ray considers alive."""
        return self.dashboard().nodes()

    def status(self) -> list[dict[str, Any]]:
        """Returns one entry per host: its address, cable, processes, and whether Ray lists it.

        The last is None if Ray does not answer.
        """
        alive: set[str] | None = set()
        try:
            alive = {node.ip for node in self.dashboard().nodes()} if self.ray else None
        except RayppError:
            alive = None
        found = []
        for host in range(self.size):
            pids = self.network.pids(host)
            states = {psutil.Process(pid).status() for pid in pids if psutil.pid_exists(pid)}
            address = self.network.address(host)
            found.append(
                {
                    "host": host,
                    "hostname": self.network.hostname(host),
                    "address": address,
                    "cable": self.network.condition(host, self.rates[host]),
                    "processes": len(pids),
                    "frozen": states == {psutil.STATUS_STOPPED},
                    "ray": None if alive is None else address in alive,
                }
            )
        return found

    # Ray ------------------------------------------------------------------------------------------

    def _start_all(self) -> None:
        self._start_rays([0], lambda nodes: len(nodes) == 1, _READY_S)
        # Ray gives a node 30 s to start. On a loaded machine, not all nodes start in time at once.
        busy = os.getloadavg()[0] > _BUSY * (os.cpu_count() or 1)
        last = [host + 1 for host in range(1, self.size)] if busy else [self.size] * (self.size > 1)
        first = 1
        for end in last:
            self._start_rays(list(range(first, end)), partial(_count_is, count=end), _READY_S)
            first = end

    def _start_rays(self, hosts: list[int], ready: Callable[[list[NodeResources]], bool], patience_s: float) -> None:
        """Starts the Ray nodes of hosts; returns once `ready` accepts the nodes that Ray lists.

        It restarts a node that failed to start.
        """
        children = {host: self._start_ray(host) for host in hosts}
        tries = dict.fromkeys(hosts, _START_TRIES)
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            with contextlib.suppress(RayppError, KeyError, TypeError):
                if ready(self.dashboard().nodes()):
                    self.dashboard().jobs()
                    return
            for host in [host for host, child in children.items() if child.poll() is not None]:
                tries[host] -= 1
                if not tries[host]:
                    end = 0
                    break
                self.network.kill(host)
                children[host] = self._start_ray(host)
            time.sleep(0.1)
        ends = {path: path.read_text(errors="replace")[-800:] for path in sorted(self.directory.glob("h*.log"))}
        logs = "\n".join(f"{path}: …{text}" for path, text in ends.items())
        raise BedError(Problem("testbed", f"Ray did not start on every host\n{logs}", "read these logs"))

    def _start_ray(self, host: int) -> subprocess.Popen[bytes]:
        address = self.network.address(host)
        role: tuple[str, ...] = (f"--address={self.network.address(0)}:{_GCS_PORT}",)
        if host == 0:
            dashboard = (f"--dashboard-host={address}", f"--dashboard-port={_DASHBOARD_PORT}")
            role = ("--head", f"--port={_GCS_PORT}", *dashboard, "--include-log-monitor=false")
        command = [
            *START_NODE,
            *role,
            # A raylet waits only 15 s for its agents to report ports that they chose themselves.
            *(f"--{name}={port}" for name, port in _AGENT_PORTS.items()),
            f"--node-ip-address={address}",
            f"--num-cpus={self.cpus}",
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
            f"--temp-dir={private_directory(self.directory / f'h{host}')}",
            f"--labels=raypp.io/host=h{host}",
        ]
        environment = _bare_environment() | HEALTH_CHECK
        environment |= {name: value for name, value in os.environ.items() if name.startswith("RAY_health_check_")}
        environment |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token_path),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            **short_temporary_directory(),
        }
        with self._log(host).open("ab") as log:
            child = subprocess.Popen(
                self.command(host, command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env=environment,
                start_new_session=True,
            )
        self._children.append(child)
        return child

    def _log(self, host: int) -> Path:
        return self.directory / f"h{host}.log"

    # The rest -------------------------------------------------------------------------------------

    def _checked(self, host: int) -> int:
        if not 0 <= host < self.size:
            raise JobError(Problem("host", f"there is no host {host}", f"use 0 to {self.size - 1}"))
        return host

    def _write_state(self) -> None:
        document = {
            "network": dataclasses.asdict(self.network),
            "cpus": self.cpus,
            "rates": self.rates,
            "ray": self.ray,
            "pin": self.pin,
            "store": dataclasses.asdict(self.store) if self.store else None,
        }
        write_private(self.directory / "state.json", json.dumps(document, indent=2))


def _count_is(nodes: list[NodeResources], count: int) -> bool:
    return len(nodes) == count


def _has_node(nodes: list[NodeResources], address: str, but: set[str]) -> bool:
    return any(node.ip == address and node.node_id not in but for node in nodes)


def remove(name: str) -> bool:
    """Stops and removes a test bed, or the leftovers of a crash; returns whether there was any."""
    directory = _directory(name)
    found = bool(remove_leftovers(name)) or directory.exists()
    with contextlib.suppress(RayppError):
        server = TestBed.open(name).store
        if server is not None:
            server.stop()
    # A server whose `up` was killed before it wrote the state.
    for process in psutil.process_iter(["cmdline"]):
        if f"-dir={directory}/s3/data" in (process.info["cmdline"] or []):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                process.wait(5)
    shutil.rmtree(directory, ignore_errors=True)
    return found


def _directory(name: str) -> Path:
    # Short, because Ray creates sockets under it, whose paths may not exceed 107 bytes.
    return Path("/tmp") / f"{PREFIX}{name}"


def _bare_environment() -> dict[str, str]:
    """Returns this process's environment without settings of another cluster or store.

    The programs of this Python come first in the PATH.
    """
    unwanted = ("AWS_", "RAY_", "RAYPP_", "OMP_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    return kept | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
