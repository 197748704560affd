"""`sbatch cluster/slurm/raypp.sbatch JOB` on a real Slurm whose nodes are hosts of a test bed."""

import platform
import socket
import subprocess
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from laptop import TEXT, wait_for
from programs import run_python
from slurm_bed import SlurmBed, why_no_slurm

from cluster.testbed import TestBed
from raypp.state.run_records.reader import RunReader
from raypp.storage.directory import DirectoryStore

pytestmark = pytest.mark.slow

TWO_NODES = ("--nodes=2", "--cpus-per-task=2", "--time=20")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmBed]:
    if reason := why_no_slurm():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    name = f"s{time.monotonic_ns() % 10**6}"
    with TestBed.up(name, hosts=3, rate="none", ray=False, store=False) as bed, SlurmBed(bed, folder).running() as up:
        yield up


def job_file(slurm: SlurmBed, name: str, **changes: Any) -> Path:
    document = {
        "name": name,
        "model": {"num_layers": 4, "hidden_size": 32, "num_heads": 2, "ffn_size": 64, "vocab_size": 320},
        "data": {"kind": "text", "path": str(TEXT), "seq_len": 64},
        "mesh": {"pp": 2, "fsdp": 2},
        "pipeline": {"microbatches": 4},
        "train": {"steps": 60, "micro_batch_size": 2},
        "checkpoint": {"url": str(slurm.folder / "store"), "every_steps": 20},
        "resources": {"device": "cpu"},
    } | changes
    path = slurm.folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def steps(slurm: SlurmBed, name: str) -> list[tuple[Any, ...]]:
    rows = RunReader(DirectoryStore(slurm.folder / "store"), name).history()
    return [(row["step"], row["loss"], row["grad_norm"], row["tokens"]) for row in rows]


@pytest.mark.gate
def test_an_allocation_trains_a_job_and_nothing_is_left(slurm: SlurmBed) -> None:
    path = job_file(slurm, "first", train={"steps": 6, "micro_batch_size": 2})
    number = slurm.sbatch(*TWO_NODES, "--", path.name, out=slurm.folder / "first.out")
    facts = slurm.wait(number, "COMPLETED", "FAILED", "CANCELLED")
    out = (slurm.folder / "first.out").read_text()
    assert facts["JobState"] == "COMPLETED", out
    assert [row[0] for row in steps(slurm, "first")] == list(range(1, 7))
    for host in (0, 1):
        assert f"rank {2 * host} is pp{host}-fsdp0 on {slurm.bed.network.address(host)}" in out
    left_nothing(slurm, number)


def left_nothing(slurm: SlurmBed, job: str) -> None:
    new = set(Path("/tmp").glob(f"raypp-slurm-{job}-*")) - slurm.there_before
    assert not new, "files of Ray"
    assert not (slurm.folder / "home" / "slurm" / job).exists(), "the token"


def test_a_requeued_job_resumes_and_ends_with_the_numbers_of_the_one_beside_it(slurm: SlurmBed) -> None:
    """Both jobs run at once on the same two nodes, each with a Ray cluster of its own."""
    jobs = {}
    for name in ("undisturbed", "requeued"):
        path = job_file(slurm, name)
        jobs[name] = slurm.sbatch(*TWO_NODES, "--", path.name, out=slurm.folder / f"{name}.out")
    wait_for(lambda: len(steps(slurm, "requeued")) > 3, "the first steps")
    # What #SBATCH --signal does some minutes before the time limit.
    slurm.slurm("scancel", "--signal=USR1", "--batch", jobs["requeued"])
    facts = slurm.wait(jobs["requeued"], "PENDING", "FAILED", "COMPLETED")
    out = (slurm.folder / "requeued.out").read_text()
    assert (facts["JobState"], facts["Restarts"]) == ("PENDING", "1"), out
    assert 3 < len(steps(slurm, "requeued")) < 60
    slurm.slurm("scontrol", "update", f"JobId={jobs['requeued']}", "StartTime=now")  # Slurm waits for 2 minutes
    for name, job in jobs.items():
        facts = slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED")
        assert facts["JobState"] == "COMPLETED", (slurm.folder / f"{name}.out").read_text()
    assert [row[0] for row in steps(slurm, "requeued")] == list(range(1, 61))
    assert steps(slurm, "requeued") == steps(slurm, "undisturbed")
    for job in jobs.values():
        left_nothing(slurm, job)


@pytest.mark.gate
@pytest.mark.parametrize(
    ("job", "code", "words"),
    [
        ("too-large.yaml", "4:0", ["8 ranks need 8 places", "4 are free", "fix:"]),
        (
            "nowhere/job.yaml",
            "2:0",
            ["there is no nowhere/job.yaml on", "keep the job file in a folder that all nodes"],
        ),
        ("broken.yaml", "2:0", ["broken.yaml", "train.stepz"]),
    ],
)
def test_what_cannot_run_is_refused_before_ray_starts(
    slurm: SlurmBed, job: str, code: str, words: list[str], tmp_path: Path
) -> None:
    job_file(slurm, "too-large", mesh={"pp": 2, "fsdp": 4})
    job_file(slurm, "broken", train={"stepz": 3})
    number = slurm.sbatch(*TWO_NODES, "--", job, out=tmp_path / "out")
    facts = slurm.wait(number, "FAILED", "COMPLETED", "CANCELLED")
    out = (tmp_path / "out").read_text()
    assert facts["ExitCode"] == code, out
    assert all(word in out for word in words), out
    assert "starting Ray" not in out


@pytest.mark.gate
def test_a_node_with_another_python_or_ray_names_itself_and_both_environments() -> None:
    words = ("--join=127.0.0.1:1", "--expect=python 3.99.0, ray 2.0.0")
    done = run_python("-m", "raypp.control.clusters.slurm", *words, code=2, stdin=subprocess.DEVNULL)
    own = f"python {platform.python_version()}, ray {metadata.version('ray')}"
    expected = f"{socket.gethostname()} has {own}, but the first node has python 3.99.0, ray 2.0.0"
    assert done.stderr.strip() == expected


def test_a_lost_node_does_not_end_an_elastic_run(slurm: SlurmBed) -> None:
    path = job_file(slurm, "lost", recovery={"elastic": True}, train={"steps": 400, "micro_batch_size": 2})
    three = ("--nodes=3", "--cpus-per-task=2", "--time=20")
    number = slurm.sbatch(*three, "--", path.name, "--set", "mesh.fsdp=3", out=slurm.folder / "lost.out")
    wait_for(lambda: len(steps(slurm, "lost")) > 3, "the first steps")
    slurm.bed.kill(2, silently=True)
    facts = slurm.wait(number, "COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL")
    out = (slurm.folder / "lost.out").read_text()
    assert facts["JobState"] == "COMPLETED", out
    assert f"node {slurm.names[2]} has left the cluster" in out
    assert len(steps(slurm, "lost")) == 400
