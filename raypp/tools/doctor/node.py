"""The actor of `raypp doctor` on a node: collects facts, measures links, devices and the store."""

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

import psutil

from raypp.control.credentials import load_private_environment
from raypp.control.group_test import run_group
from raypp.environment import c_compiler
from raypp.errors import RayppError, in_words
from raypp.job.job import Job
from raypp.ports import free_ports
from raypp.rank.data.sources import check_data
from raypp.rank.joining.network import interface_to, interfaces
from raypp.storage import open_store
from raypp.tools.doctor.hcas import hcas
from raypp.untrusted.files import open_to_others
from raypp.untrusted.sockets import Listener, connect, receive

PACKAGES = ("torch", "ray", "numpy", "pydantic", "safetensors", "boto3", "tokenizers")
_CONNECT_S = 5.0
_LONGEST_S = 60.0
_PINGS = 40
_CHUNK = bytes(1 << 18)
_DEVICES_TIMEOUT_S = 120.0
_STORE_BYTES = 24 << 20


class Measured(IntEnum):
    """What a connection to another node's probe is for."""

    ROUND_TRIPS = 1
    OUT = 2
    IN = 3


def _open_folder() -> str | None:
    """Returns the folder in which other users of the node can replace Ray's files."""
    ray = sys.modules.get("ray")  # tests use a probe without a cluster
    found = open_to_others(Path(ray.get_runtime_context().get_temp_dir())) if ray and ray.is_initialized() else None
    return str(found) if found else None


class NodeProbe:
    """Probes one node. Ray calls its methods; threads serve the measurements of other nodes.
    `token`: a secret that all probes of an examination share, in hex digits. Connections of others
    are closed. `environment`: variables for this process, such as the store's settings and keys."""

    def __init__(
        self, token: str, environment: Mapping[str, str] | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        load_private_environment()
        os.environ.update(environment or {})
        self._token = bytes.fromhex(token)
        self._clock = clock
        self._listener: Listener | None = None

    def facts(self, ip: str) -> dict[str, Any]:
        """Returns versions, memory and network interfaces. Fast, unless name lookups time out."""
        memory = psutil.virtual_memory()
        return {
            "hostname": socket.gethostname(),
            "ip": ip,
            "python": platform.python_version(),
            "executable": sys.executable,
            "system": f"{platform.system()} {platform.release()}",
            "packages": {name: _version(name) for name in PACKAGES},
            "cores": os.cpu_count() or 1,
            "memory": memory.total,
            "memory_free": memory.available,
            "shm_free": _free("/dev/shm"),
            "disk_free": _free(str(Path.cwd())),
            "open_folder": _open_folder(),
            "interfaces": [
                {
                    "name": one.name,
                    "address": one.address,
                    "mbps": one.mbps,
                    "up": one.up,
                    "physical": Path(f"/sys/class/net/{one.name}/device").exists(),
                }
                for one in interfaces().values()
                if one.address
            ],
            "lookup_s": _lookup_seconds(ip),
            "compiler": c_compiler(),
            "infiniband": hcas(),
        }

    def devices(self) -> dict[str, Any]:
        """Returns the devices that torch sees and their speed, or `error` if torch fails."""
        command = [sys.executable, "-m", "raypp.tools.doctor.device_speed"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_DEVICES_TIMEOUT_S, check=False)
            return dict(json.loads(done.stdout.splitlines()[-1]))
        except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
            last = done.stderr.strip().splitlines()[-1:] if "done" in locals() else []
            return {"error": last[0] if last else in_words(error), "devices": []}

    def free_port(self, ip: str) -> int:
        return free_ports(1, ip)[0]

    def try_group(self, *arguments: Any) -> dict[str, Any]:
        """Runs this node's ranks of a group; arguments and result are those of `run_group`."""
        return run_group(*arguments)

    def data_problems(self, job: dict[str, Any]) -> list[list[str]]:
        """Returns what is wrong with a job's data, seen from this node: key, what and fix of each.
        Sources of the user's own are not examined, because their code is not here."""
        try:
            problems = check_data(Job.model_validate(job), stores=True)
        except RayppError as error:
            problems = list(error.problems)
        return [[one.key, one.fault, one.fix] for one in problems if not one.key.endswith(".kind")]

    # Links ----------------------------------------------------------------------------------------

    def listen(self, ip: str) -> int:
        """Starts serving measurements at an address of this node and returns the port."""
        self._listener = Listener(ip, self._token, self._serve, "measurements")
        return self._listener.port

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def measure(self, ip: str, port: int, seconds: float) -> dict[str, Any]:
        """Measures the link to the probe of another node. Returns `gbps_out` and `gbps_in` (Gbit/s
        of payload, one direction at a time), `latency_ms` (half of the median round trip), `skew_s`
        (the other clock minus this one, accurate to half of the shortest round trip), `interface`;
        or `error`, and `lost` if packets vanish."""
        answer: dict[str, Any] = {}
        try:
            answer["interface"] = interface_to(ip).name
            round_trips, answer["skew_s"] = self._ping(ip, port)
            answer["latency_ms"] = statistics.median(round_trips) * 500
            answer["gbps_out"] = self._send(ip, port, seconds)
            answer["gbps_in"] = self._fetch(ip, port, seconds)
        except (OSError, RayppError, struct.error) as error:
            answer["lost"] = isinstance(error, TimeoutError)
            answer["error"] = "no answer" if answer["lost"] else str(error)
        return answer

    def _ping(self, ip: str, port: int) -> tuple[list[float], float]:
        round_trips, skews = [], []
        with self._connected(ip, port, Measured.ROUND_TRIPS) as link:
            for _ in range(_PINGS):
                before, start = self._clock(), time.perf_counter()
                link.sendall(bytes(8))
                theirs: float
                (theirs,) = struct.unpack("!d", receive(link, 8, _CONNECT_S))
                taken = time.perf_counter() - start
                round_trips.append(taken)
                skews.append(theirs - before - taken / 2)
        best = min(range(_PINGS), key=round_trips.__getitem__)
        return round_trips, skews[best]

    def _send(self, ip: str, port: int, seconds: float) -> float:
        with self._connected(ip, port, Measured.OUT) as link:
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                link.sendall(_CHUNK)
            link.shutdown(socket.SHUT_WR)
            count, taken = struct.unpack("!dd", receive(link, 16, seconds + _CONNECT_S))
        rate: float = count * 8 / max(taken, 1e-9) / 1e9
        return rate

    def _fetch(self, ip: str, port: int, seconds: float) -> float:
        with self._connected(ip, port, Measured.IN) as link:
            link.sendall(struct.pack("!d", seconds))
            count, taken = _drain(link, seconds + _CONNECT_S)
        return count * 8 / max(taken, 1e-9) / 1e9

    @contextlib.contextmanager
    def _connected(self, ip: str, port: int, what: int) -> Iterator[socket.socket]:
        with connect(ip, port, self._token, what, _CONNECT_S) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield link

    def _serve(self, link: socket.socket, what: int) -> None:
        link.settimeout(_CONNECT_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        match what:
            case Measured.ROUND_TRIPS:
                for _ in range(_PINGS):
                    receive(link, 8, _CONNECT_S)
                    link.sendall(struct.pack("!d", self._clock()))
            case Measured.OUT:
                link.sendall(struct.pack("!dd", *_drain(link, _LONGEST_S)))
            case Measured.IN:
                (seconds,) = struct.unpack("!d", receive(link, 8, _CONNECT_S))
                end = time.perf_counter() + min(seconds, _LONGEST_S)
                while time.perf_counter() < end:
                    link.sendall(_CHUNK)

    # Store ----------------------------------------------------------------------------------------

    def try_store(self, url: str, mark: str) -> dict[str, Any]:
        """Tries every operation that raypp needs of a store, and times one larger object. `mark`:
        key of an object that stays until `forget`, for other nodes. Returns `up_mbps` and
        `down_mbps` in MB/s, `bytes`, `limitations` (what and fix of each); or `error` and `fix`."""
        try:
            store = open_store(url)
            store.probe()
            limitations = [[one.fault, one.fix] for one in store.limitations()]
            store.put(mark, b"here")
            key = f"{mark}-large"
            start = time.perf_counter()
            store.put_stream(key, (_CHUNK for _ in range(_STORE_BYTES // len(_CHUNK))), _STORE_BYTES)
            written = time.perf_counter()
            size = len(store.get(key))
            read = time.perf_counter()
            store.delete([key])
        except RayppError as error:
            return {"error": error.problems[0].fault, "fix": error.problems[0].fix}
        except Exception as error:  # noqa: BLE001  a store's library may raise anything: report it
            return {"error": in_words(error), "fix": ""}
        if size != _STORE_BYTES:
            return {"error": f"returned {size} of {_STORE_BYTES} bytes", "fix": "use another store"}
        up, down = _STORE_BYTES / (written - start) / 1e6, _STORE_BYTES / (read - written) / 1e6
        return {"up_mbps": up, "down_mbps": down, "bytes": _STORE_BYTES, "limitations": limitations}

    def sees(self, url: str, marks: list[str]) -> list[str]:
        """Returns the objects that this node finds in the store."""
        with contextlib.suppress(Exception):
            store = open_store(url)
            return [mark for mark in marks if store.head(mark) is not None]
        return []

    def forget(self, url: str, mark: str) -> None:
        """Deletes the objects that `try_store` left."""
        with contextlib.suppress(Exception):
            open_store(url).delete([mark, f"{mark}-large"])


def _drain(link: socket.socket, patience_s: float) -> tuple[int, float]:
    """Reads to the end; returns the bytes after the first read, and the seconds they took."""
    buffer = bytearray(1 << 20)
    count = link.recv_into(buffer)
    start, after = time.perf_counter(), 0
    last = start
    while part := link.recv_into(buffer):
        after += part
        last = time.perf_counter()
        if last - start > patience_s:
            raise TimeoutError("the measurement does not end")
    return (after, last - start) if after else (count, 1e-3)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _free(path: str) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _lookup_seconds(ip: str) -> float:
    """Returns how long the node takes to look up its own address. Every rendezvous waits for it."""
    start = time.perf_counter()
    with contextlib.suppress(OSError):
        socket.gethostbyaddr(ip)
    return time.perf_counter() - start
