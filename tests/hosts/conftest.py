"""Three hosts with a Ray node each, and a user at a fourth; skipped without network namespaces."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load as load_tensors

sys.path.insert(0, str(Path(__file__).parents[2]))

from laptop import TEXT, Laptop, Run, wait_for

from cluster.testbed import TestBed, why_not
from raypp.state.checkpoint.commit import list_checkpoints, read_commit

HOSTS = 3


def shards(run: Run) -> dict[str, Any]:
    """Returns every tensor of the newest commit, by the name of its object and its own."""
    store = run.laptop.store(run.url)
    step = list_checkpoints(store, run.name)[-1].step
    found = {}
    for record in read_commit(store, run.name, step).objects:
        place = record.key.partition("/attempt-")[2].partition("/")[2]
        assert place
        found |= {f"{place} {name}": tensor for name, tensor in load_tensors(store.get(record.key)).items()}
    return found


class Office(Laptop):
    """A user who reaches the hosts' dashboard and store over the network."""

    bed: TestBed

    @classmethod
    def beside(cls, bed: TestBed, directory: Path) -> Office:
        environment = bed.with_environment() | {"RAYPP_HOME": str(directory / "home")}
        assert bed.store is not None
        state = {
            "dashboard": bed.address,
            "gcs": f"{bed.network.address(0)}:6379",
            "token_path": str(bed.token_path),
            "ray_dir": str(bed.directory),
            "s3": dataclasses.asdict(bed.store),
        }
        office = cls(directory, environment, state)
        office.bed = bed
        (directory / "words.txt").write_text("\n\n".join(TEXT.read_text().split("\n\n")[:600]))
        return office

    def two_host_job(self, name: str, **changes: object) -> Path:
        return self.job(name, **{"mesh": {"pp": 2, "fsdp": 2}, "train__micro_batch_size": 2} | changes)

    def repair(self) -> None:
        for host in range(self.bed.size):
            self.bed.heal(host)
            self.bed.thaw(host)
        started: set[int] = set()

        def have_returned() -> bool:
            alive = {node.ip for node in self.bed.nodes()}
            for host in set(range(1, self.bed.size)) - started:
                # A node declared dead after a long silence exits when it hears so.
                if self.bed.network.address(host) not in alive or not self.bed.network.pids(host):
                    self.bed.start(host)
                    started.add(host)
            return len(alive) == self.bed.size

        wait_for(have_returned, "the nodes' return")


@pytest.fixture(scope="session")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    if reason := why_not():
        pytest.skip(reason)
    # Three hosts that share a few cores stall for seconds at times. Ray must not declare them dead
    # for that.
    os.environ.setdefault("RAY_health_check_failure_threshold", "10")
    name = f"t{time.monotonic_ns() % 10**6}"
    with TestBed.up(name, hosts=HOSTS, rate="1gbit", cpus=2) as bed:
        yield Office.beside(bed, tmp_path_factory.mktemp("office"))
    assert not Path(f"/tmp/rt-{name}").exists()


@pytest.fixture(scope="session")
def one_host(office: Office) -> Run:
    """The reference: the same job with all four ranks on one host."""
    run = office.start(office.two_host_job("one-host", resources__cpus_per_rank=0.5), "--json")
    assert run.wait(600) == 0, run.describe()
    return run
