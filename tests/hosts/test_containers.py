"""The image, cluster/compose.yaml and the pods of cluster/kuberay in containers of an engine."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from container_engine import IMAGE, Engine, engine, why_no_engine
from kuberay_pods import Pod, pods, submit_command
from laptop import REPOSITORY, numbers, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

NETWORK = "pods"
STORE = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_ENDPOINT_URL_S3": "http://s3:8333",
    "AWS_REGION": "us-east-1",
}
TOKEN = {"RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
SHM = "1g"
"""Of a pod. The manifest asks for as much as a machine with GPUs has."""


@pytest.fixture(scope="module")
def built() -> Iterator[Engine]:
    if reason := why_no_engine():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="raypp-engine-"))  # a socket's path must be short
    with engine(folder) as one:
        one.build()
        yield one


def in_image(engine: Engine, *words: str) -> str:
    return engine.docker("run", "--rm", "--network", "none", IMAGE, *words).strip()


def test_the_image_has_raypp_ray_and_a_compiler_and_runs_as_a_user(built: Engine) -> None:
    assert in_image(built, "id", "-un") == "ray"
    assert in_image(built, "raypp", "--version").startswith("raypp ")
    assert "Usage: raypp" in in_image(built, "raypp", "--help")
    program = "int main(void) { return 0; }"
    assert (
        in_image(built, "sh", "-c", f"echo '{program}' | gcc -x c - -o /tmp/a && /tmp/a && echo compiled") == "compiled"
    )


def test_compose_gives_a_cluster_that_trains_the_quickstart_and_that_prometheus_watches(built: Engine) -> None:
    built.environment |= {"DASHBOARD_PORT": "0", "PROMETHEUS_PORT": "0", "RAY_AUTH_TOKEN": "0" * 32}
    compose = ("docker-compose", "-f", f"{REPOSITORY}/cluster/compose.yaml")
    raypp = (*compose, "run", "--rm", "-T", "raypp")
    built.run(*compose, "up", "--detach")
    try:

        def healthy() -> bool:
            return built.run(*compose, "ps").count("(healthy)") == 3

        wait_for(healthy, "a head and two workers")
        out = built.run(
            *raypp, "submit", "jobs/quickstart.yaml", "--set", "train.steps=6", "--set", "checkpoint.every_steps=3"
        )
        assert "SUCCEEDED" in out, out
        rows = [json.loads(line) for line in built.run(*raypp, "history", "quickstart").splitlines() if line[0] == "{"]
        assert [row["step"] for row in rows] == list(range(1, 7))
        query = "http://localhost:9090/api/v1/query?query=ray_raypp_step"
        read = ("python", "-c", f"import urllib.request as r; print(r.urlopen({query!r}).read().decode())")
        wait_for(lambda: '"6"' in built.run(*compose, "exec", "-T", "prometheus", *read), "the last step in Prometheus")
    finally:
        built.run(*compose, "down", "--volumes", "--timeout", "3", check=False)
    assert not built.docker("ps", "-aq").split()


class Cluster:
    """Containers that stand in for the pods of a Kubernetes cluster."""

    def __init__(self, engine: Engine, jobs: Path) -> None:
        self.engine, self.jobs = engine, jobs
        self.head, self.worker = pods()
        self._made = 0

    def start(self) -> None:
        self.engine.docker("network", "create", NETWORK)
        compose = yaml.safe_load((REPOSITORY / "cluster" / "compose.yaml").read_text())
        keys = _options(STORE, ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
        words = compose["services"]["s3"]["command"].split()
        self.engine.docker("run", "--detach", "--name", "s3", "--network", NETWORK, *keys, IMAGE, *words)
        self.add("head", self.head)
        for _ in range(2):
            self.add_worker()

    def add_worker(self) -> str:
        self._made += 1
        return self.add(f"gpu-worker-{self._made}", self.worker)

    def add(self, name: str, pod: Pod) -> str:
        words = ["--network", NETWORK, "--hostname", name, *_options(pod.environment | TOKEN)]
        if pod.before:
            self.engine.docker("run", "--rm", *words, IMAGE, "/bin/bash", "-c", "--", pod.before)
        for alias in filter(None, (pod.host, pod.host.partition(".")[0])):
            words += ["--network-alias", alias]
        keys = _options(STORE) if pod is self.head else []
        words += ["--shm-size", SHM, "--init", "--volume", f"{self.jobs}:/jobs:ro", *keys]
        self.engine.docker("run", "--detach", "--name", name, *words, IMAGE, "/bin/bash", "-c", "--", pod.command)
        wait_for(lambda: "success" in self.engine.docker("exec", name, "bash", "-c", pod.probe, check=False), name)
        return name

    def submit(self, name: str) -> str:
        """Submits a job file as cluster/kuberay/submit.yaml does. Returns the container's name."""
        words = ("--name", f"submit-{name}", "--network", NETWORK, "--volume", f"{self.jobs}:/jobs:ro")
        keys = _options(STORE | TOKEN)
        return self.engine.docker("run", "--detach", *words, *keys, IMAGE, *submit_command(f"{name}.yaml")).strip()

    def history(self, name: str) -> list[dict[str, Any]]:
        out = self.engine.docker("exec", "head", "raypp", "history", f"s3://raypp/runs/{name}", check=False)
        return [json.loads(line) for line in out.splitlines() if line.startswith("{")]

    def wait(self, container: str) -> None:
        code = self.engine.docker("wait", container).strip()
        assert code == "0", self.engine.docker("logs", container)[-5000:]


def _options(environment: dict[str, str], names: tuple[str, ...] = ()) -> list[str]:
    return [f"--env={key}={value}" for key, value in environment.items() if not names or key in names]


def test_a_run_in_kuberays_pods_survives_a_killed_pod_with_the_numbers_of_an_undisturbed_one(
    built: Engine, tmp_path: Path
) -> None:
    cpus = int(pods()[1].command.partition("--num-cpus=")[2].split()[0])
    for name in ("undisturbed", "killed"):
        document = {
            "name": name,
            "model": {"num_layers": 4, "hidden_size": 32, "num_heads": 2, "ffn_size": 64, "vocab_size": 320},
            "data": {"kind": "synthetic", "seq_len": 64},
            "mesh": {"pp": 2, "fsdp": 2},
            "pipeline": {"microbatches": 4},
            "train": {"steps": 400},
            "checkpoint": {"url": "s3://raypp/runs", "every_steps": 20},
            "resources": {"device": "cpu", "cpus_per_rank": cpus // 2},
        }
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(document))
    tmp_path.chmod(0o755)
    cluster = Cluster(built, tmp_path)
    cluster.start()
    cluster.wait(cluster.submit("undisturbed"))
    submitted = cluster.submit("killed")
    wait_for(lambda: len(cluster.history("killed")) > 20, "the first checkpoint")
    built.docker("kill", "gpu-worker-2")
    cluster.add_worker()  # as the operator does
    cluster.wait(submitted)
    out = built.docker("logs", submitted)
    assert "SUCCEEDED" in out and "restarts    1" in out, out[-5000:]
    undisturbed, killed = cluster.history("undisturbed"), cluster.history("killed")
    assert [row["step"] for row in killed] == list(range(1, 401))
    assert numbers(killed) == numbers(undisturbed)
