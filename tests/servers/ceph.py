"""A second real S3 server for tests: a Ceph with one monitor, one OSD and one radosgw, on loopback
and in a temporary directory. It honours and ignores different features than SeaweedFS, like servers
in production.

Several clusters may run at once, because no two of them share a path. A cluster's ports are below
those that the system assigns, and it claims them for its lifetime: a client that finds another
cluster's monitor at its port talks to it until it fails with "wrong fsid".
"""

import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from raypp.storage.s3 import S3Store

PACKAGES = "apt-get install --no-install-recommends ceph-mon ceph-osd radosgw ceph-common"
_PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
_ACCESS_KEY, _SECRET_KEY = "raypp", "raypp-secret-of-tests"
_START_S = 120.0
_TRIES = 2
_PORTS = range(20000, 32000)

_CONFIGURATION = """
[global]
fsid = {fsid}
mon host = v1:127.0.0.1:{mon_port}
mon initial members = a
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
ms bind msgr2 = false
keyring = {directory}/keyring
crash dir = {directory}/crash
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 2
osd pool default pgp num = 2
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon data = {directory}/mon
mon data avail crit = 1
osd data = {directory}/osd
osd objectstore = memstore
memstore device bytes = 4294967296
osd memory target = 939524096
run dir = {directory}/run
admin socket = {directory}/run/$name.$pid.asok
log file = {directory}/log/$name.log
mon cluster log file = {directory}/log/cluster.log
pid file = {directory}/run/$name.pid
rgw data = {directory}/rgw
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw dns name = localhost
debug ms = 0
"""


def missing_programs() -> list[str]:
    return [name for name in _PROGRAMS if shutil.which(name) is None]


class CephServer:
    """A running Ceph with the interface of the SeaweedFS server, as far as tests need it."""

    name = "ceph"
    access_key = _ACCESS_KEY
    secret_key = _SECRET_KEY

    def __init__(self, directory: Path, buckets: tuple[str, ...] = ()) -> None:
        self.directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []
        self._claims: list[socket.socket] = []
        self._port = 0
        try:
            self._start_somewhere()
            for bucket in buckets:
                self.store(bucket).create_bucket()
        except BaseException:
            self.stop()
            raise

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def store(self, bucket: str, prefix: str = "", **more: object) -> S3Store:
        return S3Store(
            bucket,
            prefix,
            **{"endpoint": self.endpoint, "access_key": _ACCESS_KEY, "secret_key": _SECRET_KEY, **more},  # type: ignore[arg-type]
        )

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_ACCESS_KEY_ID": _ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET_KEY,
            "AWS_REGION": "us-east-1",
        }

    def stop(self) -> None:
        """Ends every process that it started. Keeps no data."""
        for process in reversed(self._processes):
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.wait(10)
        self._processes.clear()
        for claim in self._claims:
            claim.close()
        self._claims.clear()

    def _start_somewhere(self) -> None:
        """Starts the cluster, once more with other ports if another program took one of them."""
        above = self.directory
        for number in range(1, _TRIES + 1):
            self.directory = above / f"try-{number}"
            for folder in ("mon", "osd", "rgw", "run", "log", "crash"):
                (self.directory / folder).mkdir(parents=True)
            try:
                self._start()
                return
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                self.stop()
                if number == _TRIES:
                    raise
                print(f"Ceph did not start, trying once more: {error}")

    def _start(self) -> None:
        mon_port, self._port = self._claim_port(), self._claim_port()
        fsid = str(uuid.uuid4())
        (self.directory / "ceph.conf").write_text(
            _CONFIGURATION.format(fsid=fsid, mon_port=mon_port, directory=self.directory, port=self._port)
        )
        self._run("monmaptool", "--create", "--addv", "a", f"v1:127.0.0.1:{mon_port}", "--fsid", fsid, "monmap")
        self._run("ceph-mon", "-i", "a", "--mkfs", "--monmap", "monmap")
        self._launch("ceph-mon", "-i", "a")
        self._wait("its monitor", lambda: self._run("ceph", "fsid").strip() == fsid)
        osd = str(uuid.uuid4())
        number = self._run("ceph", "osd", "new", osd).strip()
        self._run("ceph-osd", "-i", number, "--mkfs", "--osd-uuid", osd)
        self._run("ceph", "osd", "crush", "add", f"osd.{number}", "1.0", "root=default", "host=h0")
        self._launch("ceph-osd", "-i", number)
        self._wait("its OSD", lambda: "1 up" in self._run("ceph", "osd", "stat"))
        self._launch("radosgw", "-n", "client.rgw")
        self._wait("radosgw", self._answers)
        self._run(
            "radosgw-admin", "user", "create", "--uid=raypp", "--display-name=raypp", f"--access-key={_ACCESS_KEY}",
            f"--secret-key={_SECRET_KEY}",
        )  # fmt: skip

    def _run(self, program: str, *arguments: str) -> str:
        where = [] if program == "monmaptool" else ["-c", str(self.directory / "ceph.conf")]
        done = subprocess.run(
            [program, *where, *arguments], cwd=self.directory, env=_environment(), capture_output=True, text=True,
            timeout=_START_S,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{program} {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
        return done.stdout

    def _launch(self, program: str, *arguments: str) -> None:
        with (self.directory / "log" / f"{program}.out").open("wb") as out:
            self._processes.append(
                subprocess.Popen(
                    [program, "-c", str(self.directory / "ceph.conf"), "-f", *arguments],
                    cwd=self.directory,
                    env=_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                )
            )

    def _wait(self, what: str, ready: object) -> None:
        end = time.monotonic() + _START_S
        while not ready():  # type: ignore[operator]
            dead = [process.args for process in self._processes if process.poll() is not None]
            if dead or time.monotonic() > end:
                logs = "\n".join(path.read_text()[-1500:] for path in (self.directory / "log").glob("*.out"))
                raise RuntimeError(f"Ceph: {what} did not come up; ended: {dead}\n{logs}")
            time.sleep(0.2)

    def _claim_port(self) -> int:
        """Returns a free port that no other cluster of these tests takes until `stop`."""
        for port in random.Random().sample(_PORTS, len(_PORTS)):
            claim = socket.socket(socket.AF_UNIX)
            try:
                claim.bind(f"\0raypp-ceph-port-{port}")  # abstract: has no file, ends with this process
                with socket.socket() as listener:
                    listener.bind(("127.0.0.1", port))
            except OSError:
                claim.close()
                continue
            self._claims.append(claim)
            return port
        raise RuntimeError("Ceph: no free port")

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(self.endpoint, timeout=2).close()
            return True
        except OSError:
            return False


@contextmanager
def ceph(*buckets: str) -> Iterator[CephServer]:
    with tempfile.TemporaryDirectory(prefix="raypp-ceph-", ignore_cleanup_errors=True) as directory:
        server = CephServer(Path(directory), buckets)
        try:
            yield server
        finally:
            server.stop()


def _environment() -> dict[str, str]:
    """Returns the environment without variables that name another cluster's settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith("CEPH_")}
