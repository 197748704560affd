"""Provides one embedded cluster, with its own home directory, to all tests in this directory."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from actor_names import without_digest
from one_at_a_time import one_at_a_time

from raypp.control import client
from raypp.control.clusters import local_servers
from raypp.control.clusters.dashboard import DashboardError
from raypp.control.clusters.find import Cluster, find_cluster
from raypp.control.clusters.known_runs import RunPlace, cluster_name
from raypp.errors import RayppError, UnreachableError
from raypp.job.load import job_document, parse_job
from raypp.state.checkpoint.run_spec import newest_number, write_spec
from raypp.state.run_records.reader import RunReader
from raypp.state.run_records.status import is_final
from raypp.storage import open_store
from tests.ray.extra_nodes import ExtraNodes

_HERE = Path(__file__).parent
_PATIENCE_S = 240.0  # on a loaded machine a run takes minutes to start


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith(("AWS_", "RAY_", "RAYPP_"))]:
        del os.environ[name]
    os.environ["RAYPP_HOME"] = str(tmp_path_factory.mktemp("home"))
    os.environ["PYTHONPATH"] = str(_HERE)
    try:
        with one_at_a_time():
            local_servers.up(16)
        yield find_cluster()
    finally:
        local_servers.down(delete_data=True)
        os.environ.clear()
        os.environ.update(before)


@dataclass
class Started:
    name: str
    cluster: Cluster
    submission_id: str
    reader: RunReader
    place: Path
    url: str

    @property
    def run_place(self) -> RunPlace:
        return RunPlace(self.url, self.name, self.cluster.address, self.submission_id)

    def status(self) -> dict[str, Any]:
        return self.reader.status() or {}

    def wait(self, condition: Callable[[], object], event: str) -> None:
        end = time.monotonic() + _PATIENCE_S
        while not self._holds(condition):
            if time.monotonic() > end:
                pytest.fail(f"{event} did not come about; status {self.status()}; the job's log:\n{self._log()}")
            time.sleep(0.1)

    def _holds(self, condition: Callable[[], object]) -> bool:
        try:
            return bool(condition())
        except (UnreachableError, DashboardError):  # a busy cluster is asked again
            return False

    def _log(self) -> str:
        try:
            return self.cluster.dashboard.job_logs(self.submission_id)[-3000:]
        except RayppError as error:  # the log is gone with the node that the driver ran on
            return str(error)

    def wait_attempt(self, attempt: int) -> None:
        def runs() -> bool:
            return (self.status()["attempt"], self.status()["state"]) == (attempt, "RUNNING")

        self.wait(runs, f"attempt {attempt}")

    def controller(self) -> int:
        alive = (one for one in self.actors() if one["name"] == f"raypp/{self.name}" and one["state"] == "ALIVE")
        (pid,) = (int(one["pid"]) for one in alive)
        return pid

    def event(self, kind: str) -> Any:
        return next(event for event in self.reader.events() if event.kind == kind)

    def wait_step(self, step: int) -> None:
        self.wait(lambda: self.status().get("step", 0) >= step, f"step {step}")

    def let_go(self) -> None:
        (self.place / "go").touch()

    def wait_end(self) -> dict[str, Any]:
        self.wait(lambda: is_final(self.reader.status()), "the end")
        return self.status()

    def exit_code(self) -> int | None:
        def over() -> bool:
            return (self.job() or {}).get("status") in ("SUCCEEDED", "FAILED", "STOPPED")

        self.wait(over, "the end of the Ray job")
        code = self.job()["driver_exit_code"]
        assert code is None or isinstance(code, int)
        return code

    def job(self) -> dict[str, Any]:
        return self.cluster.dashboard.job(self.submission_id) or {}

    def command(self, method: str, *arguments: object) -> dict[str, Any]:
        return client.command_run(self.cluster, self.run_place, method, *arguments)

    def stop(self) -> dict[str, Any]:
        return client.stop_run(self.cluster, self.run_place, self.reader.store, save=True)

    def end_controller_for_good(self) -> None:
        """Kills the controller as if Ray had used up all its restarts."""
        name = f"raypp/{cluster_name(self.url, self.name)}"
        code = f"import ray; ray.init(namespace='raypp'); ray.kill(ray.get_actor({name!r}), no_restart=True)"
        assert self.cluster.embedded is not None
        environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        environment |= self.cluster.embedded.ray_environment()
        subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60, capture_output=True)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.reader.events()]

    def taken(self) -> list[tuple[int, int]]:
        """Returns attempt and step of every step rank 0 took, in order and with repetitions."""
        path = self.place / "taken"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(attempt), int(step)) for attempt, step in (line.split() for line in lines)]

    def pids(self) -> list[int]:
        return [rank["pid"] for rank in self.status()["ranks"]]

    def living_actors(self) -> set[str]:
        return {actor["name"] or actor["repr_name"] for actor in self.actors() if actor["state"] != "DEAD"}

    def groups(self) -> set[str]:
        groups = self.cluster.dashboard.get_json("/api/v0/placement_groups?detail=1")["data"]["result"]["result"]
        own = (f"raypp/{self.name}", f"raypp/{self.name}/spares")
        return {group["state"] for group in groups if without_digest(group["name"]) in own}

    def assert_nothing_left(self) -> None:
        self.wait(lambda: not self.living_actors(), "the end of every actor")
        self.wait(lambda: self.groups() <= {"REMOVED"}, "the end of the placement groups")
        pids = [actor["pid"] for actor in self.actors() if actor["pid"]]
        self.wait(lambda: not running(pids), f"the end of every process of {pids}")

    def actors(self) -> list[dict[str, Any]]:
        answer = self.cluster.dashboard.get_json("/api/v0/actors?detail=1&limit=1000")
        actors = [
            {**actor, **{key: without_digest(actor[key] or "") for key in ("name", "repr_name")}}
            for actor in answer["data"]["result"]["result"]
        ]
        return [actor for actor in actors if (actor["name"] or actor["repr_name"]).startswith(f"raypp/{self.name}")]


def running(pids: list[int]) -> list[int]:
    """Returns those that have not ended: a container's first process may reap no zombies."""
    running = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                running.append(pid)
    return running


StartRun = Callable[..., Started]


@pytest.fixture
def nodes(cluster: Cluster) -> Iterator[ExtraNodes]:
    with ExtraNodes(cluster) as extra:
        yield extra


@pytest.fixture
def start_run(cluster: Cluster, tmp_path: Path) -> Iterator[StartRun]:
    with runs_on(cluster, tmp_path) as start:
        yield start


@contextlib.contextmanager
def runs_on(cluster: Cluster, tmp_path: Path) -> Iterator[StartRun]:
    """Starts runs of stand-ins on a cluster. On exit, ends the runs that are still active."""
    started: list[Started] = []

    def start(
        name: str,
        *,
        steps: int = 20,
        every: int = 5,
        fault: str = "",
        hold: int = 0,
        hold_from: int = 1,
        url: str = "",
        **more: Any,
    ) -> Started:
        """From attempt `hold_from` on, step `hold` is not taken before `let_go` is called."""
        rank_function = more.pop("rank_function", "stand_in:run_rank")
        environment = {"STAND_IN_DIR": str(tmp_path / name), "STAND_IN_HOLD": f"{hold}:{hold_from}"}
        environment |= {"STAND_IN_FAULT": fault} if fault else {}
        job = parse_job(
            {
                "name": name,
                "mesh": {"pp": 2, "fsdp": 2},
                "train": {"steps": steps},
                "checkpoint": {"url": url or str(tmp_path / "store"), "every_steps": every},
                "resources": {"env": environment, "cpus_per_rank": 1, **more.pop("resources", {})},
                **more,
            }
        )
        store = open_store(job.checkpoint.url)
        write_spec(store, name, job_document(job), newest_number(store, name) + 1)
        submission_id = client.submit_run(job, cluster, store.url, rank_function=rank_function)
        run = Started(name, cluster, submission_id, RunReader(store, name), tmp_path / name, store.url)
        started.append(run)
        return run

    yield start
    for run in started:
        if not is_final(run.reader.status()):
            run.command("stop", False)
