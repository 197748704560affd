"""Workers come from one process per node: the server and its client, without a cluster."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from programs import run_program, run_python

import raypp
from raypp.control.fork_client import FOLDER, INTERPRETER, LOG, SOCKET
from raypp.own_process import OwnProcess

CLIENT = [sys.executable, "-I", "-S", str(Path(raypp.__file__).parent / "control" / "fork_client.py")]
SCRIPT = """
import json, os, pathlib, sys, threading, time
found = {
    "argv": sys.argv, "path": sys.path, "environment": dict(os.environ), "cwd": os.getcwd(), "pid": os.getpid(),
    "imported": [name for name in ("torch", "ray", "raypp.rank.rank") if name in sys.modules],
    "group": os.getpgid(0), "threads": threading.active_count(), "main": __name__,
}
target = pathlib.Path(sys.argv[1])
target.with_suffix(".new").write_text(json.dumps(found))
target.with_suffix(".new").rename(target)
print("said by the worker", flush=True)
time.sleep(float(sys.argv[2]))
"""
WAIT_S = 120.0


def until(what: str, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {WAIT_S:.0f} s"
        time.sleep(0.02)


class Node:
    """A folder as a run's package has it on a node, and a process in place of the raylet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.raylet = subprocess.Popen(["sleep", "600"])
        (folder / "worker.py").write_text(SCRIPT)

    def client(self, name: str, seconds: float = 0.0, **variables: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ, "PYTHONPATH": str(Path(raypp.__file__).parent.parent), "RAY_JOB_ID": "01000000",
            "RAY_RAYLET_PID": str(self.raylet.pid), **variables,
        }  # fmt: skip
        return subprocess.Popen(
            [*CLIENT, "worker.py", name, str(seconds)],
            cwd=self.folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def worker(self, name: str, seconds: float = 0.0, **variables: str) -> dict[str, Any]:
        client = self.client(name, seconds, **variables)
        until(name, (self.folder / name).exists)
        output, errors = client.communicate(timeout=WAIT_S) if not seconds else ("", "")
        found = json.loads((self.folder / name).read_text())
        return found | {"output": output, "errors": errors}

    def servers(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["cmdline"]):
            with contextlib.suppress(psutil.Error):
                if "raypp.control.fork_server" in process.cmdline() and process.cwd() == str(self.folder):
                    found.append(process)
        return found


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    one = Node(tmp_path)
    yield one
    one.raylet.kill()
    one.raylet.wait()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(tmp_path):
                process.kill()


@pytest.mark.gate
def test_a_worker_is_what_a_new_interpreter_would_be(node: Node) -> None:
    found = node.worker("first", OF_ITS_OWN="1")
    assert found["argv"] == ["worker.py", "first", "0.0"]
    assert found["imported"] == ["torch", "ray", "raypp.rank.rank"]
    assert found["environment"]["OF_ITS_OWN"] == "1"
    assert found["environment"]["RAY_JOB_ID"] == "01000000"
    assert found["cwd"] == str(node.folder)
    assert found["path"][1] == str(Path(raypp.__file__).parent.parent)
    assert found["output"] == "said by the worker\n"
    assert found["main"] == "__main__"
    assert found["group"] == found["pid"]  # a raylet ends whole process groups
    assert found["threads"] == 1
    run_python("worker.py", "plain", "0", cwd=node.folder, env=found["environment"])
    other = json.loads((node.folder / "plain").read_text())
    assert found["path"] == other["path"]
    assert found["environment"].keys() - other["environment"].keys() == set()


@pytest.mark.gate
def test_all_workers_of_a_node_have_one_server_and_outlive_each_other_and_it(node: Node) -> None:
    clients = [node.client(f"worker-{number}", 300) for number in range(3)]
    workers = []
    for number in range(3):
        until("a worker", (node.folder / f"worker-{number}").exists)
        workers.append(psutil.Process(json.loads((node.folder / f"worker-{number}").read_text())["pid"]))
    (server,) = {worker.parent() for worker in workers}
    assert server is not None
    workers[0].kill()
    until("the dead worker is reaped", lambda: not psutil.pid_exists(workers[0].pid))
    assert all(worker.is_running() for worker in workers[1:])
    # One more, after a killed server: it gets a new one.
    server.kill()
    assert node.worker("later", 300)["imported"]
    assert all(worker.is_running() for worker in workers[1:])
    assert [client.wait(WAIT_S) for client in clients] == [0, 0, 0]


@pytest.mark.slow
def test_snapshots_in_memory_are_kept_while_the_raylet_lives(node: Node) -> None:
    """The server may end before the next attempt: it leaves without workers."""
    (node.folder / "worker.py").write_text(
        "import json, pathlib, sys; from raypp.state.memory.files import keeper\n"
        "pathlib.Path(sys.argv[1]).write_text(json.dumps({'keeper': keeper()}))"
    )
    pid, started = node.worker("first")["keeper"]
    assert OwnProcess(pid, started) == OwnProcess.of(node.raylet.pid)


@pytest.mark.slow
def test_a_server_is_no_descendant_of_who_started_it(node: Node) -> None:
    """Ray ends a stopped job's driver with all of its descendants."""
    program = "import time; from raypp.control.fork_client import start_server; start_server(); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program], cwd=node.folder) as starter:
        try:
            until("a server", lambda: bool(node.servers()))
            assert not psutil.Process(starter.pid).children(recursive=True)
        finally:
            starter.kill()


@pytest.mark.slow
def test_a_driver_starts_a_server_beside_itself_and_only_one(node: Node) -> None:
    """And its arguments, exit code and streams are those of any interpreter."""
    program = "import sys; print(sys.argv[1:], sys.flags.isolated, sys.flags.no_site); sys.exit(7)"
    environment = {**os.environ, "PYTHONPATH": str(Path(raypp.__file__).parent.parent)}
    for _ in range(2):
        words = ("--beside", "-c", program, "save", "x y")
        done = run_program(*CLIENT, *words, code=7, cwd=node.folder, env=environment)
        assert done.stdout == "['save', 'x y'] 0 0\n"
        until("a server listens", (node.folder / SOCKET).exists)
    assert len(node.servers()) == 1
    assert node.worker("first")["imported"] == ["torch", "ray", "raypp.rank.rank"]


@pytest.mark.slow
def test_a_server_leaves_with_its_raylet(node: Node) -> None:
    node.worker("first")
    (server,) = node.servers()
    node.raylet.kill()
    node.raylet.wait()
    until("the server leaves", lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)
    assert not (node.folder / SOCKET).exists()


@pytest.mark.slow
def test_the_request_of_another_job_gets_an_interpreter_of_its_own(node: Node) -> None:
    node.worker("first")
    found = node.worker("second", RAY_JOB_ID="02000000")
    assert found["imported"] == []
    assert found["environment"]["RAY_JOB_ID"] == "02000000"
    assert "this worker imports torch itself" in found["errors"]
    assert "another job" in (node.folder / LOG).read_text()


@pytest.mark.slow
def test_no_worker_starts_for_a_client_that_ray_has_given_up(node: Node) -> None:
    node.worker("first")
    (server,) = node.servers()
    server.suspend()
    client = node.client("late")
    until("the client waits for the answer", lambda: _waits_on_a_socket(client.pid))
    client.kill()
    client.wait()
    server.resume()
    assert node.worker("second")["imported"]
    assert not (node.folder / "late").exists()
    assert "its client has gone" in (node.folder / LOG).read_text()


def _waits_on_a_socket(pid: int) -> bool:
    return any(own.status == psutil.CONN_NONE for own in psutil.Process(pid).net_connections("unix")) and (
        psutil.Process(pid).status() == psutil.STATUS_SLEEPING
    )


@pytest.mark.slow
def test_a_server_that_cannot_fork_goes_on_and_the_worker_imports_everything_itself(node: Node) -> None:
    program = """
import errno, os
from raypp.control import fork_server
from raypp.control.fork_client import claim
fork, left = os.fork, [11]  # a client asks eleven times
def failing():
    if left[0]:
        left[0] -= 1
        raise BlockingIOError(errno.EAGAIN, "no more processes")
    return fork()
lock, listener = claim()
os.fork = failing
fork_server.main([lock, listener.detach()])
"""
    with (node.folder / "log").open("w") as log:
        server = subprocess.Popen([sys.executable, "-c", program], cwd=node.folder, stderr=log)
    try:
        until("a server listens", (node.folder / SOCKET).exists)
        assert node.worker("first")["imported"] == []
        assert "cannot start a process" in (node.folder / "log").read_text()
        later = node.worker("later", 300)
        assert later["imported"] and psutil.Process(later["pid"]).ppid() == server.pid
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
def test_garbage_and_silence_do_not_keep_a_server_from_its_work(node: Node) -> None:
    node.worker("first")
    here = Path.cwd()
    os.chdir(node.folder)  # the path may be longer than a socket's name
    try:
        for said in (b"", b"\0", b"\xff" * 4096, b"\0\0\0\4nope", b"\0\0\0\2{}"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
                stranger.connect(SOCKET)
                with contextlib.suppress(OSError):
                    stranger.sendall(said)
        silent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        silent.connect(SOCKET)
    finally:
        os.chdir(here)
    assert node.worker("second")["imported"]
    silent.close()
    assert (node.folder / FOLDER).stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_without_a_server_the_worker_imports_everything_itself(node: Node) -> None:
    (node.folder / FOLDER).write_text("in the way")
    found = node.worker("first")
    assert found["imported"] == []
    assert "no fork server" in found["errors"]


def test_the_interpreter_is_that_of_the_raylets_workers() -> None:
    raylet = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess; print(subprocess.run(['bash', '-c', {f'echo {INTERPRETER}'!r}], "
         "capture_output=True, text=True).stdout)", "--num=1",
         "--python_worker_command=/opt/its/python /opt/setup_worker.py --x=1"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert raylet.communicate(timeout=WAIT_S)[0].split() == ["/opt/its/python"]
