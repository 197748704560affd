"""Tests the embedded cluster, and what a command finds out about it before anything is started."""

import contextlib
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from laptop import bare_environment
from programs import run_python

import raypp
from raypp.control import client
from raypp.control.clusters import known_runs, local, local_servers, setup_worker
from raypp.control.clusters.dashboard import Dashboard
from raypp.control.clusters.find import Cluster, find_cluster
from raypp.control.clusters.known_runs import RunPlace
from raypp.control.clusters.seaweed import SeaweedServer
from raypp.errors import ResourcesError, UnreachableError
from raypp.job.load import parse_job
from raypp.ports import port_is_free
from raypp.retry import Backoff
from raypp.untrusted.files import open_to_others
from raypp.user_folder import raypp_home, write_private
from tests.ray.conftest import running
from tests.ray.extra_nodes import ExtraNodes

pytestmark = pytest.mark.timeout(400)


def test_starting_it_twice_starts_it_once(cluster: Cluster) -> None:
    again, started = local_servers.up()
    assert not started and again == cluster.embedded


def test_its_files_are_private(cluster: Cluster) -> None:
    for name in ("state.json", "token"):
        assert (local.directory() / name).stat().st_mode & 0o077 == 0


def test_no_other_user_reaches_what_ray_lets_everybody_write(cluster: Cluster) -> None:
    assert cluster.embedded is not None
    (opened,) = [path for path in Path(cluster.embedded.ray_dir).iterdir() if path.is_dir()]
    assert opened.stat().st_mode & 0o002, "Ray no longer opens its folder"
    assert open_to_others(opened / "session_latest") is None
    if os.geteuid() == 0:
        program = "import os, sys; os.setuid(65534); os.listdir(sys.argv[1])"
        said = run_python("-c", program, str(opened), code=1).stderr
        assert "PermissionError" in said


@pytest.mark.skipif(sys.platform != "linux", reason="other systems set workers up with Ray's own script")
def test_its_workers_are_set_up_without_an_import_of_ray(cluster: Cluster) -> None:
    assert cluster.embedded is not None
    processes = psutil.Process(cluster.embedded.ray.pid).children(recursive=True)
    (raylet,) = [process for process in processes if process.name() == "raylet"]
    (command,) = [part for part in raylet.cmdline() if part.startswith("--python_worker_command=")]
    assert f" {setup_worker.__file__} " in command


def test_it_refuses_a_caller_without_its_token(cluster: Cluster) -> None:
    with pytest.raises(UnreachableError, match="RAY_AUTH_TOKEN"):
        Dashboard(cluster.address).jobs()
    with pytest.raises(UnreachableError, match="denies access"):
        Dashboard(cluster.address, "0" * 64).jobs()


def test_its_address_may_be_given_as_host_and_port(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYPP_ADDRESS", cluster.address.removeprefix("http://"))
    expected = {"ray": ray.__version__, "python": platform.python_version()}
    assert find_cluster().dashboard.check_versions() == expected


def test_too_few_free_devices_say_how_many_are_free_where_and_what_would_fit(cluster: Cluster) -> None:
    job = parse_job({"name": "big", "mesh": {"pp": 4, "fsdp": 8}, "resources": {"device": "cpu"}})
    every = Backoff(60, first_s=0.1, longest_s=0.5)  # Ray gives back late what an ended run had
    assert every.wait(lambda: sum(node.free_cpus for node in cluster.dashboard.nodes()) == 16)
    with pytest.raises(ResourcesError) as caught:
        client.check_resources(job, cluster)
    problem = caught.value.problems[0]
    assert "32 ranks need 32" in problem.fault and "16 are free" in problem.fault and "127.0.0" in problem.fault
    assert "--set mesh.fsdp=4" in problem.fix
    with pytest.raises(ResourcesError, match="0 are free"):
        client.check_resources(parse_job({"name": "gpu", "resources": {"device": "cuda"}}), cluster)


@pytest.mark.slow
def test_a_node_that_has_just_come_has_its_address(cluster: Cluster) -> None:
    """Ray lists a node before the node's agent has reported."""
    with ExtraNodes(cluster) as extra:
        extra.add(77)
        seen: set[str] = set()
        every = Backoff(30, first_s=0.1, longest_s=0.1)
        assert every.wait(lambda: bool(seen.update(node.ip for node in cluster.dashboard.nodes()) or len(seen) > 1))
        assert [node.ip for node in cluster.dashboard.nodes() if node.head] == ["127.0.0.1"]
    assert seen == {"127.0.0.1", "127.0.0.77"}


_EXAMINATION = """
import json, sys, ray
from raypp.tools.doctor.driver import Examination, ProbeOptions

class Misaddressed(Examination):
    def _ip(self, index):
        return super()._ip(index) if index == 0 else "192.0.2.1"

ray.init(namespace="raypp", log_to_driver=False)
kind, groups = (Examination, True) if sys.argv[1] == "groups" else (Misaddressed, False)
print(json.dumps(kind(ProbeOptions(seconds=0.05, devices=False, groups=groups)).report()[sys.argv[1]]))
"""


def _examined(cluster: Cluster, part: str) -> Any:
    """Returns a part of the doctor's report on two nodes."""
    assert cluster.embedded is not None
    with ExtraNodes(cluster) as extra:
        extra.add(77)
        environment = os.environ | cluster.embedded.ray_environment()
        done = run_python("-c", _EXAMINATION, part, env=environment, cwd=Path(raypp.__file__).parents[1])
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_doctor_says_why_a_node_cannot_listen(cluster: Cluster) -> None:
    (link,) = _examined(cluster, "links")
    assert (link["from"], link["to"]) == ("127.0.0.1", "192.0.2.1")
    assert "Cannot assign requested address" in link["error"]


@pytest.mark.slow
def test_doctor_tries_the_ranks_of_each_node_and_of_all(cluster: Cluster) -> None:
    groups = _examined(cluster, "groups")
    found = [(len(group["nodes"]), group["kind"], group["ranks"]) for group in groups]
    assert found == [(1, "gloo", 2), (1, "gloo", 2), (2, "gloo", 4)]
    assert all([sorted(one) for one in group["tries"]] == [["all_reduce", "exchange", "off"]] for group in groups)


def test_nobody_leads_a_run_that_was_never_started(cluster: Cluster) -> None:
    place = known_runs.RunPlace("/nowhere", "nobody", cluster.address)
    assert known_runs.controller_alive(place, 20.0) is False
    assert client.command_run(cluster, place, "save") == {"found": False}


def test_a_command_needs_no_raylet_of_the_cluster_on_this_machine(cluster: Cluster) -> None:
    remote = Cluster(cluster.address, cluster.dashboard)
    place = known_runs.RunPlace("/nowhere", "nobody", cluster.address)
    assert client.command_run(remote, place, "stop") == {"found": False}


def test_a_command_that_takes_too_long_is_named(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_COMMAND_PATIENCE_S", 0.01)
    place = known_runs.RunPlace("/nowhere", "nobody", cluster.address)
    with pytest.raises(UnreachableError, match="did not carry out `stop` in"):
        client.command_run(cluster, place, "stop")


def test_a_state_file_whose_processes_are_gone_counts_for_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path, cluster: Cluster
) -> None:
    document = json.loads((local.directory() / "state.json").read_text())
    monkeypatch.setenv("RAYPP_HOME", str(tmp_path))
    document["ray"]["started"] -= 3600  # simulates a pid that another process has taken over
    document["ray_dir"] = str(tmp_path / "gone")
    document["s3"]["started"] -= 3600
    write_private(raypp_home() / "local" / "state.json", json.dumps(document))
    assert local.find() is None
    assert local_servers.down() is False
    monkeypatch.undo()
    assert cluster.dashboard.ray_version(), "a stale state file ended somebody else's processes"


def _local(home: Path) -> tuple[subprocess.Popen[str], Callable[[], str]]:
    """Starts `raypp local up`. The function runs `raypp local down`; it returns its output."""
    environment = bare_environment() | {"RAYPP_HOME": str(home)}
    words = ("-m", "raypp", "local")
    out: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    up = subprocess.Popen([sys.executable, *words, "up"], env=environment, **out)
    return up, lambda: run_python(*words, "down", env=environment, timeout=120).stdout


@pytest.mark.slow
def test_a_head_that_ray_gives_up_on_a_crowded_machine_is_started_once_more(tmp_path: Path) -> None:
    up, down = _local(tmp_path)
    try:
        frozen = None
        while frozen is None and up.poll() is None:  # freeze it before it registers: the cluster never sees the node
            for child in psutil.Process(up.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.name() == "raylet":
                        child.suspend()
                        frozen = child
        assert frozen is not None
        output = up.communicate(timeout=240)[0]
        assert up.returncode == 0, output
        log = (tmp_path / "local" / "ray.log").read_text()
        assert "timed out during startup" not in log, "the log is that of the second head"
        assert not frozen.is_running()
    finally:
        down()


@pytest.mark.slow
def test_a_killed_up_leaves_nothing_that_down_does_not_end(tmp_path: Path) -> None:
    up, down = _local(tmp_path)
    started: list[psutil.Process] = []
    try:
        state = tmp_path / "local" / "state.json"
        while not state.exists() and up.poll() is None:
            time.sleep(0.001)
        started = psutil.Process(up.pid).children(recursive=True)
        up.kill()  # the S3 server does not answer yet
        assert up.wait() != 0
        assert any(process.name() == "weed" for process in started)
    finally:
        output = down()
    assert "the embedded cluster is down" in output
    assert not running([process.pid for process in started])


_UP = """
import sys
from raypp.control.clusters import local, local_servers

local_servers._DASHBOARD_PORT = int(sys.argv[1])  # another cluster of this machine may have the usual one
cluster, started = local_servers.up(1)
assert started
print(cluster.dashboard, cluster.token())
"""
_DOWN = "from raypp.control.clusters import local, local_servers; local_servers.down(delete_data=True)"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_only_one_of_two_clusters_gets_the_usual_port_of_the_dashboard(tmp_path: Path) -> None:
    port = next(port for port in random.SystemRandom().sample(range(6_000, 9_000), 100) if port_is_free(port))
    homes = [
        bare_environment() | {"PYTHONPATH": str(Path(raypp.__file__).parents[1]), "RAYPP_HOME": str(tmp_path / name)}
        for name in ("first", "second")
    ]
    try:
        out: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        starts = [subprocess.Popen([sys.executable, "-c", _UP, str(port)], env=home, **out) for home in homes]
        outputs = [process.communicate() for process in starts]
        assert [process.returncode for process in starts] == [0, 0], outputs
        clusters = [out.split() for out, _ in outputs]
        assert sum(address.endswith(f":{port}") for address, _ in clusters) == 1, clusters
        nodes = [Dashboard(address, token).nodes() for address, token in clusters]
        assert [len(listed) for listed in nodes] == [1, 1] and nodes[0][0].node_id != nodes[1][0].node_id
    finally:
        for home in homes:
            run_python("-c", _DOWN, env=home, timeout=120)


def test_a_dead_s3_server_is_started_again_beside_the_living_head_where_its_runs_look_for_it(cluster: Cluster) -> None:
    before = local.remains()
    assert before is not None and before.dead() == ()
    SeaweedServer(**vars(before.s3)).store(local_servers.BUCKET).put("kept", b"it was")
    before.s3.stop(grace_s=0.0)
    left = local.remains()
    assert left is not None and left.dead() == ("S3 server",) and local.find() is None
    assert find_cluster().address == cluster.address, "commands still find the Ray head"
    after, started = local_servers.up()
    assert started and (after.ray, after.s3.environment()) == (before.ray, before.s3.environment())
    assert SeaweedServer(**vars(after.s3)).store(local_servers.BUCKET).get("kept") == b"it was"
    assert local.find() == after and cluster.dashboard.ray_version()


@pytest.mark.slow
def test_a_dead_head_is_named_and_started_again_beside_the_living_s3_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAYPP_HOME", str(tmp_path))
    before, _ = local_servers.up(1)
    try:
        before.ray.end(patience_s=0.0)
        with pytest.raises(UnreachableError, match=r"Ray head of the embedded cluster has ended.*its S3 server runs"):
            find_cluster()
        assert known_runs.cluster_fault(RunPlace("s3://raypp", "a-run", before.dashboard))[1], "it is gone for good"
        after, started = local_servers.up()
        assert started and (after.s3, after.dashboard, after.num_cpus) == (before.s3, before.dashboard, 1)
        assert after.client().ray_version()
    finally:
        local_servers.down()
