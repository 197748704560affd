"""Where a cluster's processes listen, and what each port asks a stranger for."""

import contextlib
import socket
import ssl
from collections.abc import Iterable

import grpc
import psutil

_NAMES = {
    "gcs_server": "gcs_server",
    "raylet": "raylet",
    "weed": "weed",
    "dashboard/dashboard.py": "dashboard",
    "DashboardAgent": "dashboard agent",
    "RuntimeEnvAgent": "runtime environment agent",
    "ray.util.client.server": "Ray Client server",
    "monitor.py": "autoscaler",
    "prometheus": "prometheus",
}
"""Part of a process' command line: what `docs/ports.md` calls it."""

_HARMLESS = (
    "NodeInfoGcsService/CheckAlive", "NodeManagerService/GetNodeStats", "ObjectManagerService/FreeObjects",
    "ObjectManagerService/Pull", "CoreWorkerService/GetCoreWorkerStats", "RayletDriver/ClusterInfo",
    "ReporterService/HealthCheck",
)  # fmt: skip
"""Calls of Ray's services that change nothing."""

Listener = tuple[str, str, str]
"""What listens, on which address, what it asks for."""


def listeners(processes: Iterable[psutil.Process]) -> set[Listener]:
    """Returns where these processes listen for TCP connections."""
    found = set()
    for process in {one.pid: one for one in processes}.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            words = " ".join(process.cmdline()).partition(" --")[0]
            name = next((name for part, name in _NAMES.items() if part in words), "worker")
            patience_s = 0.3 if name == "worker" else 5.0  # most of a worker's ports never answer
            for one in process.net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN:
                    address = one.laddr.ip.removeprefix("::ffff:")
                    found.add((name, address, asked(one.laddr.port, patience_s)))
    return found


def asked(port: int, patience_s: float) -> str:
    """Returns what the port of 127.0.0.1 asks a client for that shows nothing."""
    answer = _said(port, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)), patience_s)
    if answer is None:
        return "nothing"
    if not answer.startswith(b"HTTP/"):
        return "certificate" if _wants_certificate(port) else _asked_by_grpc(port)
    answers = [
        _said(port, b"GET %b HTTP/1.1\r\nHost: evil.example\r\nOrigin: http://evil.example\r\n\r\n" % path, 5.0) or b""
        for path in (b"/", b"/api/jobs/")
    ]
    if b"HTTPS server" in answers[0]:
        return "certificate"
    return "key" if any(one.split()[1] in (b"401", b"403") for one in answers) else "nothing"


def _wants_certificate(port: int) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection(("127.0.0.1", port), 5) as plain, context.wrap_socket(plain) as one:
            one.recv(1)
    except ssl.SSLError as error:
        return "CERTIFICATE_REQUIRED" in str(error)
    except OSError:
        pass
    return False


def _asked_by_grpc(port: int) -> str:
    codes = []
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for method in _HARMLESS:
            try:
                channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=10)
            except grpc.RpcError as error:
                codes.append(error.code())
    return "token" if grpc.StatusCode.UNAUTHENTICATED in codes else "nothing"


def _said(port: int, message: bytes, patience_s: float) -> bytes | None:
    """Returns the begin of the answer; None if there is none in time."""
    try:
        with socket.create_connection(("127.0.0.1", port), 5) as one:
            one.settimeout(patience_s)
            one.sendall(message)
            return one.recv(4096)
    except TimeoutError:
        return None
    except OSError:
        return b""
