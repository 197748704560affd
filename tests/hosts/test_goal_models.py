"""The small twins of the jobs for cards of 24 GB train over 1 Gbit/s as on one machine. Without
Ray."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from beds import bare_bed
from gallery import small
from laptop import assert_same_weights, bare_environment, numbers, weights

from cluster.testbed import TestBed
from raypp.api.checked_job import load_checked_job
from raypp.cli.job_commands import TEMPLATES
from raypp.job.job import Job
from raypp.ports import free_port
from raypp.state.run_records.reader import RunReader
from raypp.storage.directory import DirectoryStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GOALS = ["full-8b", "lora-8b", "qlora-30b", "qlora-70b"]
HOSTS = 4
STEPS = 6
"""`lookahead: auto` measures the cables before step 4."""
PORT = 29600
PATIENCE_S = 600


@pytest.fixture(scope="module")
def hosts() -> Iterator[TestBed]:
    with bare_bed(HOSTS, "1gbit") as bed:
        yield bed
    assert not bed.directory.exists()


def settings(name: str, folder: Path) -> list[str]:
    """Returns the settings of the twin, with as many ranks as the job itself has."""
    ranks = load_checked_job(TEMPLATES / f"{name}.yaml").job.mesh.pp
    return [
        *small(name), f"mesh.pp={ranks}", f"train.steps={STEPS}", "resources.device=cpu", f"checkpoint.url={folder}",
        "checkpoint.every_steps=3",
    ]  # fmt: skip


def trained(job: Path, words: list[str], ranks: int, address: str, start: Callable[..., subprocess.Popen[Any]]) -> None:
    """Runs all ranks of a job, which meet at an address. `start` takes number, command,
    environment."""
    command = [sys.executable, "-m", "raypp.rank", "--job", str(job)]
    command += [word for setting in words for word in ("--set", setting)]
    port = str(PORT if address != "127.0.0.1" else free_port())
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": address, "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    started = [start(rank, command, shared | {"RANK": str(rank)}) for rank in range(ranks)]
    try:
        said = [process.communicate(timeout=PATIENCE_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * ranks, "\n".join(said)


@pytest.mark.parametrize("name", GOALS)
def test_a_twin_trains_over_hosts_as_on_one_machine(name: str, hosts: TestBed, tmp_path: Path) -> None:
    path = TEMPLATES / f"{name}.yaml"
    twin: Job = load_checked_job(path, settings(name, tmp_path)).job
    ranks = twin.mesh.world
    assert ranks == (2 if name == "lora-8b" else HOSTS)
    out: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}

    def on_host(rank: int, command: list[str], environment: dict[str, str]) -> subprocess.Popen[Any]:
        alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)}
        return hosts.popen(rank, command, env=environment | alone, **out)

    def here(rank: int, command: list[str], environment: dict[str, str]) -> subprocess.Popen[Any]:
        together = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
        return subprocess.Popen(command, env=bare_environment() | environment | together, **out)

    before = [received(hosts, host) for host in range(ranks)]
    trained(path, settings(name, tmp_path / "hosts"), ranks, hosts.network.address(0), on_host)
    after = [received(hosts, host) for host in range(ranks)]
    trained(path, settings(name, tmp_path / "here"), ranks, "127.0.0.1", here)

    stores = [DirectoryStore(tmp_path / place) for place in ("hosts", "here")]
    over_cables, reference = (RunReader(store, twin.name).history() for store in stores)
    assert len(reference) == STEPS and numbers(over_cables) == numbers(reference)
    assert reference[-1]["loss"] < reference[0]["loss"]
    assert_same_weights(*(weights(store, twin.name) for store in stores))
    # Each rank sends activations, gradients or both, in fp32, over its own cable.
    message = twin.model.hidden_size * 4 * reference[0]["seq_len"] * twin.train.micro_batch_size
    least = STEPS * twin.pipeline.microbatches * message // 2
    assert all(new - old > least for old, new in zip(before, after, strict=True))


def received(bed: TestBed, host: int) -> int:
    """Returns the bytes that a host has sent over its cable."""
    return int(Path(f"/sys/class/net/{bed.network.cable(host)}/statistics/rx_bytes").read_text())
