"""`python -I -S raypp/control/fork_client.py default_worker.py …`: what Ray runs in place of a
worker's interpreter. It has the node's fork server start the worker, and exits. With `--beside`, it
starts the fork server and becomes an interpreter with the other arguments.

Where there is none, and none can be started, this process becomes the worker itself and imports
everything. It runs once per worker, so it imports little, and nothing of raypp.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time

FOLDER = "fork-server"
"""Of the server's files, in the working directory, which is the run's package on this node."""
SOCKET = f"{FOLDER}/socket"
LOCK = f"{FOLDER}/lock"
LOG = f"{FOLDER}/log"
INTERPRETER = "$(tr '\\0' '\\n' < /proc/$PPID/cmdline | sed -n 's/^--python_worker_command=\\([^ ]*\\).*/\\1/p')"
"""For the shell in which Ray starts a worker: the interpreter of this node's workers. Naming
another executable replaces Ray's default, which is this interpreter."""
EXECUTABLE = f"{INTERPRETER} -I -S raypp/control/fork_client.py"
"""`py_executable` of a worker's runtime environment."""

_BESIDE = "--beside"
BESIDE_SERVER = f"-I -S raypp/control/fork_client.py {_BESIDE}"
"""Put between `python` and its arguments, starts a fork server first."""

_IMPORTS_S = 120.0
_RETRY_S = 0.05
_MOST_STARTS = 3


def start_server() -> None:
    """Starts a fork server for this working directory. It exits at once if there is one."""
    os.makedirs(FOLDER, mode=0o700, exist_ok=True)  # noqa: PTH103 - pathlib takes long to import
    log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    # Through a process that exits: this one may be ended together with all its descendants.
    between = os.fork()
    if between == 0:
        with contextlib.suppress(OSError):
            os.posix_spawn(
                sys.executable,
                [sys.executable, "-m", "raypp.control.fork_server"],
                os.environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, source, number) for number, source in enumerate((null, log, log))],
                setsid=True,
            )
        os._exit(0)
    os.close(null)
    os.close(log)
    os.waitpid(between, 0)


def ask_for_worker(arguments: list[str]) -> int | None:
    """Has the fork server of this working directory run a script in a new process.

    The process gets this one's environment, standard streams and priority for the kernel's
    out-of-memory killer.

    Args:
        arguments: The script and its arguments.

    Returns:
        Its process id; None if there is no server after several attempts to start one.
    """
    request = {"arguments": arguments, "environment": dict(os.environ), "oom_score_adj": _oom_score_adj()}
    message = json.dumps(request).encode()
    end = time.monotonic() + _IMPORTS_S
    starts = 0
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.settimeout(_IMPORTS_S)
            server.connect(SOCKET)
            socket.send_fds(server, [len(message).to_bytes(4, "big")], [0, 1, 2])
            server.sendall(message)
            answer = server.recv(4)
            if len(answer) == 4:
                return int.from_bytes(answer, "big")
        if starts == _MOST_STARTS:
            return None
        start_server()
        starts += 1
        _wait_for_socket(end)
    return None


def _wait_for_socket(end: float) -> None:
    """Waits until a server listens, at most two seconds: it may be about to exit."""
    end = min(end, time.monotonic() + 2.0)
    while time.monotonic() < end and not _listens():
        time.sleep(_RETRY_S)


def _listens() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.connect(SOCKET)
        return True
    return False


def _oom_score_adj() -> int:
    try:
        with open("/proc/self/oom_score_adj") as file:  # noqa: PTH123
            return int(file.read())
    except (OSError, ValueError):
        return 0


def main() -> None:
    """Starts the worker of the command line."""
    arguments, pid = sys.argv[1:], None
    if arguments[:1] == [_BESIDE]:
        del arguments[0]
        with contextlib.suppress(OSError):
            if not _listens():
                start_server()
    else:
        with contextlib.suppress(OSError, ValueError):
            pid = ask_for_worker(arguments)
        if pid is None:
            with contextlib.suppress(OSError):  # the log may be on a full disk
                print(f"no fork server (see {LOG}): this worker imports torch itself", file=sys.stderr)  # noqa: T201
    if pid is None:
        os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main()
