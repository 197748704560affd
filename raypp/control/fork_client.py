"""`python -I -S raypp/control/fork_client.py default_worker.py …`: what Ray runs in place of a
worker's interpreter. It has the node's fork server start the worker, and exits. With `--beside`, it
starts the fork server and becomes an interpreter with the other arguments.

Where there is none, and none can be started, this process becomes the worker itself and imports
everything. It runs once per worker, so it imports little, and nothing of raypp.
"""

import contextlib
import fcntl
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
_RETRY_S = 0.2
_MOST_TRIES = 10


def claim() -> tuple[int, socket.socket] | None:
    """Returns this folder's lock and a socket that listens; None if a server has them."""
    os.makedirs(FOLDER, mode=0o700, exist_ok=True)  # noqa: PTH103 - pathlib takes long to import
    lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    with contextlib.suppress(FileNotFoundError):
        os.unlink(SOCKET)  # noqa: PTH108
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(SOCKET)
    listener.listen(128)
    return lock, listener


def start_server() -> bool:
    """Starts a fork server for this working directory, unless there is one; returns whether it did.
    The server inherits its lock and a socket that listens already: no second one starts, and who
    connects waits until its imports are done."""
    if (claimed := claim()) is None:
        return False
    lock, listener = claimed
    log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    # Through a process that exits: this one may be ended together with all its descendants.
    between = os.fork()
    if between == 0:
        own = [lock, listener.fileno()]
        for descriptor in own:
            os.set_inheritable(descriptor, True)
        with contextlib.suppress(OSError):
            os.posix_spawn(
                sys.executable,
                [sys.executable, "-m", "raypp.control.fork_server", *map(str, own)],
                os.environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, source, number) for number, source in enumerate((null, log, log))],
                setsid=True,
            )
        os._exit(0)
    listener.close()
    for descriptor in (null, log, lock):
        os.close(descriptor)
    os.waitpid(between, 0)
    return True


def ask_for_worker(arguments: list[str]) -> int | None:
    """Has the fork server of this working directory run a script in a new process. The process gets
    this one's environment, standard streams and priority for the kernel's out-of-memory killer.
    Returns its process id; None if there is no server after several attempts to start one."""
    request = {"arguments": arguments, "environment": dict(os.environ), "oom_score_adj": _oom_score_adj()}
    message = json.dumps(request).encode()
    end = time.monotonic() + _IMPORTS_S
    tries = 0
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.settimeout(_IMPORTS_S)
            server.connect(SOCKET)
            socket.send_fds(server, [len(message).to_bytes(4, "big")], [0, 1, 2])
            server.sendall(message)
            answer = server.recv(4)
            if len(answer) == 4:
                return int.from_bytes(answer, "big")
        if tries == _MOST_TRIES:
            return None
        tries += 1
        if not start_server():
            time.sleep(_RETRY_S)  # it is about to listen, or to exit
    return None


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
