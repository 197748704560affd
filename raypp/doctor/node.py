"""The actor of `raypp doctor` on a node: collects facts, measures links, devices and the store."""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import json
import os
import platform
import secrets
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from raypp.control.credentials import load_private_environment
from raypp.errors import RayppError, in_words
from raypp.storage import open_store
from raypp.train.network import interface_to, interfaces

PACKAGES = ("torch", "ray", "numpy", "pydantic", "safetensors", "boto3", "tokenizers")
_TOKEN = 32
_CONNECT_S = 5.0
_PINGS = 40
_CHUNK = bytes(1 << 18)
_DEVICES_TIMEOUT_S = 120.0
_STORE_BYTES = 24 << 20


class NodeProbe:
    """Probes one node. Ray calls its methods; threads serve the measurements of other nodes.

    Args:
        token: A secret that all probes of an examination share. Connections without it are closed.
        environment: Variables for this process, such as the store's settings and keys.
        clock: Returns the node's time in seconds since 1970.
    """

    def __init__(
        self, token: str, environment: Mapping[str, str] | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        load_private_environment()
        os.environ.update(environment or {})
        self._token = bytes.fromhex(token)
        self._clock = clock
        self._listener: socket.socket | None = None

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
            "interfaces": [
                {"name": one.name, "address": one.address, "mbps": one.mbps, "up": one.up}
                for one in interfaces().values()
                if one.address
            ],
            "lookup_s": _lookup_seconds(ip),
            "infiniband": _names("/sys/class/infiniband"),
        }

    def devices(self) -> dict[str, Any]:
        """Returns the devices that torch sees and their speed, or `error` if torch fails."""
        command = [sys.executable, "-m", "raypp.measure.device_speed"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_DEVICES_TIMEOUT_S, check=False)
            return dict(json.loads(done.stdout.splitlines()[-1]))
        except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
            last = done.stderr.strip().splitlines()[-1:] if "done" in locals() else []
            return {"error": last[0] if last else f"{type(error).__name__}: {error}", "devices": []}

    def missing(self, paths: list[str]) -> list[str]:
        """Returns the files (or patterns) that do not exist on this node."""
        return [path for path in paths if not (Path(path).exists() or glob.glob(path, recursive=True))]  # noqa: PTH207

    # Links ----------------------------------------------------------------------------------------

    def listen(self, ip: str) -> int:
        """Starts serving measurements at an address of this node and returns the port."""
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind((ip, 0))
        self._listener.listen(16)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Stops serving."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def measure(self, ip: str, port: int, seconds: float) -> dict[str, Any]:
        """Measures the link to the probe of another node.

        Returns:
            `gbps_out` and `gbps_in` (Gbit/s of payload, one direction at a time), `latency_ms`
            (half of the median round trip), `skew_s` (the other clock minus this one, accurate to
            half of the shortest round trip), `interface`; or `error`.
        """
        found: dict[str, Any] = {}
        try:
            found["interface"] = interface_to(ip).name
            round_trips, found["skew_s"] = self._ping(ip, port)
            found["latency_ms"] = statistics.median(round_trips) * 500
            found["gbps_out"] = self._send(ip, port, seconds)
            found["gbps_in"] = self._fetch(ip, port, seconds)
        except (OSError, RayppError, struct.error) as error:
            found["error"] = "no answer" if isinstance(error, TimeoutError) else str(error)
        return found

    def _ping(self, ip: str, port: int) -> tuple[list[float], float]:
        round_trips, skews = [], []
        with self._connected(ip, port, b"T") as link:
            for _ in range(_PINGS):
                before, start = self._clock(), time.perf_counter()
                link.sendall(bytes(8))
                theirs: float
                (theirs,) = struct.unpack("!d", _exactly(link, 8))
                taken = time.perf_counter() - start
                round_trips.append(taken)
                skews.append(theirs - before - taken / 2)
        best = min(range(_PINGS), key=round_trips.__getitem__)
        return round_trips, skews[best]

    def _send(self, ip: str, port: int, seconds: float) -> float:
        with self._connected(ip, port, b"S") as link:
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                link.sendall(_CHUNK)
            link.shutdown(socket.SHUT_WR)
            count, taken = struct.unpack("!dd", _exactly(link, 16))
        rate: float = count * 8 / max(taken, 1e-9) / 1e9
        return rate

    def _fetch(self, ip: str, port: int, seconds: float) -> float:
        with self._connected(ip, port, b"G") as link:
            link.sendall(struct.pack("!d", seconds))
            count, taken = _drain(link)
        return count * 8 / max(taken, 1e-9) / 1e9

    @contextlib.contextmanager
    def _connected(self, ip: str, port: int, what: bytes) -> Iterator[socket.socket]:
        with socket.create_connection((ip, port), timeout=_CONNECT_S) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.sendall(self._token + what)
            yield link

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                link, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with contextlib.suppress(OSError, struct.error), link:
            link.settimeout(_CONNECT_S)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greeting = _exactly(link, _TOKEN + 1)
            if not secrets.compare_digest(greeting[:_TOKEN], self._token):
                return
            match greeting[_TOKEN:]:
                case b"T":
                    while True:
                        _exactly(link, 8)
                        link.sendall(struct.pack("!d", self._clock()))
                case b"S":
                    link.sendall(struct.pack("!dd", *_drain(link)))
                case b"G":
                    (seconds,) = struct.unpack("!d", _exactly(link, 8))
                    end = time.perf_counter() + min(seconds, 60.0)
                    while time.perf_counter() < end:
                        link.sendall(_CHUNK)

    # Store ----------------------------------------------------------------------------------------

    def try_store(self, url: str, mark: str) -> dict[str, Any]:
        """Tries every operation that raypp needs of a store, and times one larger object.

        Args:
            url: The store.
            mark: Key of an object that stays until `forget`, so that other nodes can look for it.

        Returns:
            `up_mbps` and `down_mbps` in MB/s, `bytes`; or `error` and `fix`.
        """
        try:
            store = open_store(url)
            store.probe()
            store.put(mark, b"here")
            key = f"{mark}-large"
            start = time.perf_counter()
            store.put_stream(key, (_CHUNK for _ in range(_STORE_BYTES // len(_CHUNK))), _STORE_BYTES)
            written = time.perf_counter()
            size = len(store.get(key))
            read = time.perf_counter()
            store.delete([key])
        except RayppError as error:
            return {"error": error.problems[0].what, "fix": error.problems[0].fix}
        except Exception as error:  # noqa: BLE001  a store's library may raise anything: report it
            return {"error": in_words(error), "fix": ""}
        if size != _STORE_BYTES:
            return {"error": f"returned {size} of {_STORE_BYTES} bytes", "fix": "use another store"}
        up, down = _STORE_BYTES / (written - start) / 1e6, _STORE_BYTES / (read - written) / 1e6
        return {"up_mbps": up, "down_mbps": down, "bytes": _STORE_BYTES}

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


def _exactly(link: socket.socket, count: int) -> bytes:
    got = bytearray()
    while len(got) < count:
        part = link.recv(count - len(got))
        if not part:
            raise ConnectionResetError("the other side closed the connection")
        got += part
    return bytes(got)


def _drain(link: socket.socket) -> tuple[int, float]:
    """Reads to the end; returns the bytes after the first read, and the seconds they took."""
    buffer = bytearray(1 << 20)
    count = link.recv_into(buffer)
    start, after = time.perf_counter(), 0
    last = start
    while part := link.recv_into(buffer):
        after += part
        last = time.perf_counter()
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


def _names(directory: str) -> list[str]:
    try:
        return sorted(path.name for path in Path(directory).iterdir())
    except OSError:
        return []
