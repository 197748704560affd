"""`python -m raypp.control.fork_server`: one process per node and run that has torch and Ray
imported; the run's workers are forked from it.

So a node imports them once, not once per rank, and a worker that replaces a dead one starts in a
fraction of a second. The server has one thread and no device. It runs in the job's package and
serves `fork_client` on a socket there. It exits when none of its workers is left and none has been
asked for in a while, or when the node's raylet has exited.
"""

import contextlib
import json
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from raypp.control.fork_client import SOCKET
from raypp.control.process_log import say
from raypp.control.protocol import REQUEST_FILE, RunRequest, rank_environment
from raypp.quick_import import quick_import

_IDLE_S = 20.0
_LOOK_S = 1.0
_REQUEST_S = 5.0
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class ForkRequest:
    """What a client wants run. `environment`: the process' whole environment. `oom_score_adj`: its
    priority for the kernel's out-of-memory killer."""

    arguments: list[str]
    environment: dict[str, str]
    oom_score_adj: int


def main(descriptors: Sequence[int]) -> None:
    """Serves until it is no longer needed. In a worker's process, runs that worker. `descriptors`:
    of this folder's lock, which is held, and of the socket that clients connect to."""
    lock, own = descriptors
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    added = {str(Path.cwd()), "", *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    path = [entry for entry in sys.path if entry not in added]  # without what depends on how this process began
    _import_rank()
    request = _serve(socket.socket(fileno=own))
    if request is not None:
        os.close(lock)
        _become(request, path)


def _import_rank() -> None:
    """Imports what every rank needs before its first step, except Ray; starts no thread. Libraries
    read variables when they are loaded, so the ranks' are set first; hidden ones in the worker."""
    with contextlib.suppress(FileNotFoundError):
        request = RunRequest(**json.loads(Path(REQUEST_FILE).read_text()))
        os.environ.update(rank_environment(request.job["resources"]))
    quick_import("raypp.rank.rank")


def _import_ray(environment: Mapping[str, str]) -> dict[str, str]:
    """Imports Ray as a worker does; returns the variables that apply to it from then on. Ray reads
    its variables when it is loaded, and the job and the raylet are among them."""
    variables = _of_ray(environment)
    os.environ.update(variables)
    for module in ("ray._private.node", "ray._private.worker", "raypp.control.worker"):
        quick_import(module)  # also leaves these objects out of collections, which would copy their pages
    return variables


def _of_ray(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("RAY_")}


def _serve(listener: socket.socket) -> ForkRequest | None:
    """Forks for each request. Returns what to run in each child; None in the server, at its end."""
    workers: set[int] = set()
    of_ray: dict[str, str] | None = None
    needed_at = time.monotonic()

    def reap(_number: int, _frame: FrameType | None) -> None:
        nonlocal needed_at
        needed_at = time.monotonic()
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                workers.discard(pid)

    signal.signal(signal.SIGCHLD, reap)
    listener.settimeout(_LOOK_S)
    while workers or (time.monotonic() - needed_at < _IDLE_S and _raylet_lives()):
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        with connection:
            needed_at = time.monotonic()
            try:
                received = _receive(connection)
                if received is None:
                    continue
                request, streams = received
                if _has_gone(connection):
                    _close(streams)
                    raise ValueError("its client has gone")
                of_ray = of_ray or _import_ray(request.environment)
                if _of_ray(request.environment) != of_ray:
                    _close(streams)
                    raise ValueError("the request of another job or raylet")
            except (OSError, TypeError, ValueError) as error:
                say(f"refused a request: {error}")
                continue
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # until the worker is counted
            try:
                pid = os.fork()
            except OSError as error:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
                _close(streams)
                say(f"cannot start a process: {error}")
                continue
            if pid == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
                listener.close()
                os.setpgid(0, 0)  # the raylet ends whole process groups
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                    os.close(stream)
                return request
            workers.add(pid)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            _close(streams)
            with contextlib.suppress(OSError):
                connection.sendall(pid.to_bytes(4, "big"))
    Path(SOCKET).unlink(missing_ok=True)  # before the lock is free: the next server makes its own
    return None


def _raylet_lives() -> bool:
    """Returns whether the raylet that started this process, if one did, still runs."""
    pid = os.environ.get("RAY_RAYLET_PID", "")
    return not pid.isdigit() or Path(f"/proc/{pid}").exists()


def _receive(connection: socket.socket) -> tuple[ForkRequest, list[int]] | None:
    """Returns a client's request and its three standard streams; None if the client only checked
    whether a server listens. Raises OSError, TypeError, ValueError: it is no request, or too slow;
    then no stream stays open."""
    connection.settimeout(_REQUEST_S)
    head, streams, _, _ = socket.recv_fds(connection, 4, 3)
    if not head:
        return None
    try:
        with connection.makefile("rb") as sent:
            data = sent.read(min(int.from_bytes(head, "big"), _MOST_BYTES))
        return ForkRequest(**json.loads(data)), streams
    except BaseException:
        _close(streams)
        raise


def _has_gone(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False


def _close(streams: list[int]) -> None:
    for stream in streams:
        os.close(stream)


def _become(request: ForkRequest, path: list[str]) -> None:
    """Runs a script as a new interpreter would."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(request.oom_score_adj))
    os.environ.clear()
    os.environ.update(request.environment)
    script = request.arguments[0]
    added = [entry for entry in request.environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [str(Path(script).absolute().parent), *added, *path]
    sys.argv = list(request.arguments)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
