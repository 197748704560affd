"""A Ray cluster on the nodes of a Slurm allocation.

The batch script's process is on the allocation's first node. It starts Ray's head there, and one
job step per other node, each with `python -m raypp.control.clusters.slurm`, which compares the
node's Python and Ray with the head's and starts Ray's node. Ports, the folder of Ray's files and
the token belong to this allocation only, so several jobs share a node without meeting.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from raypp.control.clusters.dashboard import Dashboard, NodeResources
from raypp.control.clusters.local import LOOPBACK_ONLY, NODE_IP
from raypp.control.clusters.ray_head import RAY_FILES, START_NODE, agent_ports, short_temporary_directory
from raypp.environment import check_node
from raypp.errors import JobError, Problem, RayppError, UnreachableError, in_words
from raypp.ports import address_towards, free_port, free_ports, place_of
from raypp.user_folder import private_directory, raypp_home, write_private

_START_S = 300.0
"""A node imports Ray from a shared folder, which takes a minute on a busy file server."""
_END_S = 60.0
_LEAVE_S = 10.0
_START_TRIES = 3
_COUNTS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_OF_BATCH = re.compile(r"SLURM_(CPUS_PER_TASK|TRES_PER_TASK|N?TASKS.*|NPROCS|N?NODES|NODELIST|JOB_NUM_NODES)")
"""Variables by which a job step would take the batch job's own shape."""


@dataclass(frozen=True)
class Allocation:
    """What Slurm gave a batch job. `nodes`: names of its nodes; this process runs on the first.
    `gpus`: GPUs of each node, those of this node for all."""

    job_id: str
    nodes: tuple[str, ...]
    cpus: tuple[int, ...]
    gpus: int
    restarts: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Allocation:
        """Reads the environment of a batch script or of a shell of `salloc`. Raises JobError: there
        is no allocation, or this is not its first node."""
        job_id, listed = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_JOB_NODELIST", "")
        if not job_id or not listed:
            fault = "this is not inside a Slurm job: SLURM_JOB_ID and SLURM_JOB_NODELIST are not set"
            fix = "sbatch --nodes=2 cluster/slurm/raypp.sbatch JOB, or salloc first"
            raise JobError(Problem("raypp slurm", fault, fix))
        names = _run("scontrol", "show", "hostnames", listed).split()
        here = environment.get("SLURMD_NODENAME", names[0] if names else "")
        if not names or here != names[0]:
            fault = f"runs on {here}, but Ray's head belongs on {names[0] if names else 'the first node'}"
            raise JobError(Problem("raypp slurm", fault, "start it from the batch script itself, without srun"))
        counts: list[int] = []
        for number, times in _COUNTS.findall(environment.get("SLURM_JOB_CPUS_PER_NODE", "1")):
            counts += [int(number)] * int(times or 1)
        counts += counts[-1:] * (len(names) - len(counts))
        gpus = environment.get("SLURM_GPUS_ON_NODE", "0")
        restarts = int(environment.get("SLURM_RESTART_COUNT", "0") or 0)
        return cls(job_id, tuple(names), tuple(counts), int(gpus) if gpus.isdecimal() else 0, restarts)

    def resources(self) -> list[NodeResources]:
        """Returns the nodes as a Ray cluster on them will describe them."""
        return [
            NodeResources(name, name, name, count, self.gpus, count, self.gpus)
            for name, count in zip(self.nodes, self.cpus, strict=True)
        ]

    def requeue(self) -> str | None:
        """Puts the job back into Slurm's queue, which ends this process. Returns why it is not."""
        try:
            _run("scontrol", "requeue", self.job_id)
        except UnreachableError as error:
            return error.problems[0].fault
        return None


@dataclass
class SlurmCluster:
    """The Ray cluster of an allocation, while it runs. `address`: `http://host:port` of its
    dashboard. `token_path`: file with its token; only its owner can read it."""

    address: str
    token_path: Path
    _steps: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """Returns the variables with which a command uses the cluster."""
        return {"RAYPP_ADDRESS": self.address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token_path)}

    def ended_nodes(self) -> dict[str, int]:
        """Returns the exit codes of the nodes whose Ray has ended since the last call."""
        ended = {name: code for name, step in self._steps.items() if (code := step.poll()) is not None}
        for name in ended:
            del self._steps[name]
        return ended

    def _start(self, node: str, role: str, environment: Mapping[str, str], step: Sequence[str]) -> None:
        """Starts a node's program. The end of its standard input ends it."""
        expected = f"--expect=python {platform.python_version()}, ray {metadata.version('ray')}"
        command = [*step, sys.executable, "-m", "raypp.control.clusters.slurm", role, expected]
        with self._log(node).open("wb") as log:
            self._steps[node] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=dict(environment), start_new_session=True
            )

    def _wait_for(self, count: int, client: Dashboard, end: float) -> None:
        """Waits until so many nodes have joined, and jobs can be submitted."""
        joined = 0
        while True:
            with contextlib.suppress(RayppError, KeyError, TypeError):
                joined = len(client.nodes())
                if joined >= count:
                    client.jobs()
                    return
            for node, code in self.ended_nodes().items():
                fault = f"Ray does not run there (exit code {code}); the end of its log:\n{self._tail(node, 12)}"
                fix = f"the same Python environment must be at {sys.executable} on every node"
                raise UnreachableError(Problem(f"node {node}", fault, fix))
            if time.monotonic() > end:
                logs = "\n".join(f"{node}: {self._tail(node, 3)}" for node in self._steps)
                fault = f"{joined} of {count} nodes joined Ray within {_START_S:.0f} s\n{logs}"
                fix = "check that the nodes reach each other by TCP, all ports"
                raise UnreachableError(Problem("raypp slurm", fault, fix))
            time.sleep(0.2)

    def _log(self, node: str) -> Path:
        return self.token_path.with_name(f"{node}.log")

    def _tail(self, node: str, lines: int) -> str:
        return "\n".join(self._log(node).read_text(errors="replace").splitlines()[-lines:])


@contextlib.contextmanager
def slurm_cluster(allocation: Allocation) -> Iterator[SlurmCluster]:
    """Starts Ray on the allocation's nodes; ends it, and removes its files, on leaving. Raises
    UnreachableError: a node does not start, or has another Python or Ray; names it, with the end of
    its log. Raises JobError: this node lacks what raypp needs."""
    first, *others = allocation.nodes
    check_node(first)
    folder = private_directory(raypp_home() / "slurm" / allocation.job_id)
    token = secrets.token_hex(32)
    write_private(folder / "token", token)
    own = _address_towards(others[0]) if others else NODE_IP
    gcs, dashboard = free_ports(2, own)
    cluster = SlurmCluster(f"http://{place_of(own, dashboard)}", folder / "token")
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    client, end = Dashboard(cluster.address, token), time.monotonic() + _START_S
    try:
        cluster._start(first, f"--head={own}:{gcs}:{dashboard}", os.environ | secret, [])
        cluster._wait_for(1, client, end)  # a node that finds no head gives up
        step_environment = {name: value for name, value in os.environ.items() if not _OF_BATCH.fullmatch(name)} | secret
        for name in others:
            # --overlap: beside other steps. A step without --gpus gets all GPUs of its node.
            step = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={name}", "--mpi=none"]
            step += ["--cpu-bind=none", "--kill-on-bad-exit=0", "--unbuffered", f"--job-name=ray-{name}"]
            cluster._start(name, f"--join={place_of(own, gcs)}", step_environment, step)
        cluster._wait_for(len(allocation.nodes), client, end)
        yield cluster
    finally:
        _end(list(cluster._steps.values()))
        shutil.rmtree(folder, ignore_errors=True)


def _end(steps: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends Ray on all nodes. A node's program removes Ray's files there."""
    for step in steps:
        assert step.stdin is not None
        with contextlib.suppress(OSError):
            step.stdin.close()
    end = time.monotonic() + _END_S
    for step in steps:
        try:
            step.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            step.kill()
            step.wait()


def _address_towards(node: str) -> str:
    """Returns this machine's address towards a node. Raises UnreachableError: it has none."""
    try:
        return address_towards(node)
    except OSError as error:
        fault = f"its name has no address here: {error}"
        raise UnreachableError(Problem(f"node {node}", fault, "check DNS or /etc/hosts")) from None


def _run(*command: str) -> str:
    """Runs a command of Slurm; returns what it prints. Raises UnreachableError: it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        fix = "Slurm's commands must be on the PATH of the job"
        raise UnreachableError(Problem(command[0], in_words(error), fix)) from None
    if done.returncode:
        raise UnreachableError(Problem(" ".join(command[:2]), done.stderr.strip()[-300:], "see Slurm's log"))
    return done.stdout


# On each node -------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Runs Ray's head or node until standard input ends, with the job; returns its exit code."""
    given = dict(argument.removeprefix("--").split("=", 1) for argument in arguments)
    here = socket.gethostname()
    try:
        check_node(here)
    except JobError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return error.exit_code
    versions = f"python {platform.python_version()}, ray {metadata.version('ray')}"
    if versions != given["expect"]:
        print(f"{here} has {versions}, but the first node has {given['expect']}", file=sys.stderr)  # noqa: T201
        return 2
    if "head" in given:
        own, gcs, dashboard = given["head"].rsplit(":", 2)
        role = ["--head", f"--port={gcs}", f"--dashboard-host={own}", f"--dashboard-port={dashboard}"]
        role += [f"--ray-client-server-port={free_port(own)}", "--include-log-monitor=false"]
    else:
        own, role = _address_towards(given["join"].rpartition(":")[0].strip("[]")), [f"--address={given['join']}"]
    # A node's files are on its own disk, under a short path: Ray makes sockets there.
    folder = Path(f"/tmp/raypp-slurm-{os.environ.get('SLURM_JOB_ID', '0')}-{secrets.token_hex(3)}")
    folder.mkdir(mode=0o700)
    os.umask(0o077)
    command = [
        *START_NODE,
        *role,
        *agent_ports(own),
        f"--node-ip-address={own}",
        f"--num-cpus={os.environ.get('SLURM_CPUS_ON_NODE', os.cpu_count() or 1)}",
        f"--temp-dir={folder / RAY_FILES}",
    ]
    if gpus := os.environ.get("SLURM_GPUS_ON_NODE"):
        command.append(f"--num-gpus={gpus}")
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", **short_temporary_directory()}
    environment |= LOOPBACK_ONLY if own == NODE_IP else {}
    over = threading.Event()
    threading.Thread(target=_wait_for_the_end, args=(over,), daemon=True).start()
    try:
        for _ in range(_START_TRIES):
            begun = time.monotonic()
            code = _run_ray(command, environment, over)
            # Ray gives a node 30 s to start, which may be too little on a busy machine.
            if over.is_set() or not code or time.monotonic() - begun > _START_S:
                break
        return code
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_ray(command: Sequence[str], environment: Mapping[str, str], over: threading.Event) -> int:
    """Runs `ray start --block` until it ends, or until `over` is set; returns its exit code."""
    ray = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=dict(environment), start_new_session=True)
    while ray.poll() is None:
        if over.wait(0.2):
            ray.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                ray.wait(_LEAVE_S)
            break
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(ray.pid, signal.SIGKILL)  # also what `ray start --block` left behind
    return ray.wait()


def _wait_for_the_end(over: threading.Event) -> None:
    """Reads standard input, which ends with the batch job's process."""
    while os.read(0, 1):
        pass
    over.set()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
