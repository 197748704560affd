"""A test bed: the network, a Ray node on every host, and an S3 server beside the switch.

State lives in `/tmp/rt-NAME/` (readable by its owner only): `state.json`, the Ray token, a log per host, Ray's session
files, the S3 server's data. `down` removes all of it, also what a crash has left.
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
from raypp.clusters.dashboard import Dashboard, NodeResources
from raypp.clusters.seaweed import SeaweedServer
from raypp.clusters.user_folder import private_directory, write_private
from raypp.errors import JobError, Problem, RayppError

BUCKET = "raypp"
HEALTH_CHECK = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""For every Ray node's environment: a silent host is known to be lost after about 4 s, not after 63 s."""
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
    """A part of the test bed did not come up."""


@dataclass
class TestBed:
    """A running test bed. Host 0 is the Ray head.

    Attributes:
        network: Hosts, addresses, cables.
        cpus: CPU slots each host's Ray node hands out.
        rates: Of each host's cable, as set last; what `heal` restores.
        ray: Whether hosts have a Ray node.
        pin: Host i may use core i (modulo the cores) only.
        store: The S3 server; its own cable is not limited.
    """

    __test__ = False  # for pytest: no test class

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
        """Makes hosts, cables, Ray nodes and the S3 server; returns when all answer. On failure nothing is left.

        Args:
            name: a-z and 0-9, at most 7.
            rate: Of each cable and direction: `38mbit`, `1gbit`, `none`.
            cpus: CPU slots per host.
            ray: False: hosts and cables only, for programs started with `run` and `popen`.
            store: False: no S3 server.
            pin: Give each host one core of this machine.

        Raises:
            JobError: A wrong argument, or the name is taken.
            BedError: Not possible here (no root …), or something did not come up; the end of its log is told.
        """
        if reason := why_not():
            raise BedError(Problem("testbed", reason, "run it as root on a Linux machine of yours"))
        bed = cls(Network.make(name, hosts, rate), cpus, [rate] * hosts, ray, pin)
        try:
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
        """The running test bed of that name.

        Raises:
            JobError: There is none.
        """
        try:
            document = json.loads((_directory(name) / "state.json").read_text())
        except (OSError, ValueError):
            raise JobError(
                Problem("name", f"there is no test bed {name!r}", f"python -m cluster.testbed up {name}")
            ) from None
        document["network"] = Network(**document["network"])
        document["store"] = SeaweedServer.from_dict(document["store"]) if document["store"] else None
        return cls(**document)

    def down(self) -> None:
        """Ends every process of the bed and removes everything it made."""
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
        """`http://host:port` of the dashboard, what `raypp --address` takes; this machine and the hosts reach it."""
        return f"http://{self.network.address(0)}:{_DASHBOARD_PORT}"

    def dashboard(self) -> Dashboard:
        return Dashboard(self.address, self.token_path.read_text().strip())

    def environment(self) -> dict[str, str]:
        """What a user of the bed has in the environment, on a host or on this machine; the S3 keys, too."""
        settings = {
            "RAYPP_ADDRESS": self.address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token_path),
        }
        return settings | (self.store.environment() if self.store else {})

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """The command line that runs a command on a host."""
        command = self.network.command(self._checked(host), command)
        return ["taskset", "-c", str(host % (os.cpu_count() or 1)), *command] if self.pin else command

    def with_environment(self, more: dict[str, str] | None = None) -> dict[str, str]:
        """The whole environment of a command: this process' own, what leads to the bed, and `more`."""
        return _bare_environment() | (more or {}) | self.environment()

    def run(self, host: int, command: Sequence[str], **more: Any) -> subprocess.CompletedProcess[Any]:
        """`subprocess.run` on a host, with the bed's environment (and `env`, when given)."""
        return subprocess.run(self.command(host, command), **(more | {"env": self.with_environment(more.get("env"))}))

    def popen(self, host: int, command: Sequence[str], **more: Any) -> subprocess.Popen[Any]:
        """`subprocess.Popen` on a host, with the bed's environment (and `env`, when given)."""
        return subprocess.Popen(self.command(host, command), **(more | {"env": self.with_environment(more.get("env"))}))

    # Faults ---------------------------------------------------------------------------------------

    def cut(self, host: int, how: Cut = Cut.BOTH) -> None:
        """Breaks a host's cable: what is sent is lost, and no connection is closed."""
        self.network.cut(self._checked(host), how)

    def heal(self, host: int) -> None:
        """Undoes a cut. A node Ray has given up stays dead: `start` it again."""
        self.network.heal(self._checked(host), self.rates[host])

    def set_rate(self, host: int, rate: str) -> None:
        """Limits a host's cable to another rate, from now on."""
        self.network.set_rate(self._checked(host), rate)
        self.rates[host] = rate
        self._write_state()

    def freeze(self, host: int) -> int:
        """SIGSTOP to every process of a host; its kernel still answers pings. Returns how many there were."""
        return self.network.signal(self._checked(host), signal.SIGSTOP)

    def thaw(self, host: int) -> int:
        """SIGCONT to every process of a host."""
        return self.network.signal(self._checked(host), signal.SIGCONT)

    def kill(self, host: int, *, silently: bool = False) -> None:
        """SIGKILL to every process of a host: its connections are closed by the kernel, as after a crash of programs.

        Args:
            silently: Its cable is pulled first, so that nobody hears of it, as after a power cut.
        """
        if silently:
            self.cut(host)
        self.network.kill(self._checked(host))

    def start(self, host: int, patience_s: float = _READY_S) -> None:
        """Starts a host's Ray node again; what is left of the old one is ended. Returns when Ray counts it in."""
        address = self.network.address(self._checked(host))
        self.network.kill(host)
        before = {node.node_id for node in self.dashboard().nodes() if node.ip == address} if host else set()
        self._start_rays([host], partial(_has_node, address=address, but=before), patience_s)

    def nodes(self) -> list[NodeResources]:
        """The nodes Ray believes alive."""
        return self.dashboard().nodes()

    def status(self) -> list[dict[str, Any]]:
        """One entry per host: its address, cable, processes, and whether Ray counts it in (None: cannot be asked)."""
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
        # Ray gives a node 30 s to start; on a machine with much else to do they do not all make it at once.
        busy = os.getloadavg()[0] > _BUSY * (os.cpu_count() or 1)
        last = [host + 1 for host in range(1, self.size)] if busy else [self.size] * (self.size > 1)
        first = 1
        for end in last:
            self._start_rays(list(range(first, end)), partial(_count_is, count=end), _READY_S)
            first = end

    def _start_rays(self, hosts: list[int], ready: Callable[[list[NodeResources]], bool], patience_s: float) -> None:
        """Starts hosts' Ray nodes; returns when `ready` of the nodes Ray counts in. One that gave up is tried again."""
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
        raise BedError(Problem("testbed", f"Ray did not come up on every host\n{logs}", "see these logs"))

    def _start_ray(self, host: int) -> subprocess.Popen[bytes]:
        address = self.network.address(host)
        role: tuple[str, ...] = (f"--address={self.network.address(0)}:{_GCS_PORT}",)
        if host == 0:
            dashboard = (f"--dashboard-host={address}", f"--dashboard-port={_DASHBOARD_PORT}")
            role = ("--head", f"--port={_GCS_PORT}", *dashboard, "--include-log-monitor=false")
        command = [
            sys.executable,
            "-c",
            "import sys; from ray.scripts.scripts import main; sys.argv[0] = 'ray'; sys.exit(main())",
            *("start", "--block", "--disable-usage-stats", "--log-style=record", "--log-color=false"),
            *role,
            # A raylet waits 15 s for its agents to tell ports they chose themselves, and gives up then.
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
            raise JobError(Problem("host", f"there is no host {host}", f"hosts are 0 to {self.size - 1}"))
        return host

    def _write_state(self) -> None:
        document = {
            "network": dataclasses.asdict(self.network),
            "cpus": self.cpus,
            "rates": self.rates,
            "ray": self.ray,
            "pin": self.pin,
            "store": self.store.as_dict() if self.store else None,
        }
        write_private(self.directory / "state.json", json.dumps(document, indent=2))


def _count_is(nodes: list[NodeResources], count: int) -> bool:
    return len(nodes) == count


def _has_node(nodes: list[NodeResources], address: str, but: set[str]) -> bool:
    return any(node.ip == address and node.node_id not in but for node in nodes)


def remove(name: str) -> bool:
    """Ends and removes a test bed, or what a crash left of one; returns whether there was anything."""
    directory = _directory(name)
    found = bool(remove_leftovers(name)) or directory.exists()
    with contextlib.suppress(RayppError):
        server = TestBed.open(name).store
        if server is not None:
            server.stop()
    # A server whose `up` was killed before its state was written.
    for process in psutil.process_iter(["cmdline"]):
        if f"-dir={directory}/s3/data" in (process.info["cmdline"] or []):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                process.wait(5)
    shutil.rmtree(directory, ignore_errors=True)
    return found


def _directory(name: str) -> Path:
    # Short, because Ray puts sockets below it, whose paths may not exceed 107 bytes.
    return Path("/tmp") / f"{PREFIX}{name}"


def _bare_environment() -> dict[str, str]:
    """This process' environment without another cluster's or store's settings; this Python's programs come first."""
    unwanted = ("AWS_", "RAY_", "RAYPP_", "OMP_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    return kept | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
