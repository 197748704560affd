"""Searches end at the given time, whatever the job: after it, at most one candidate is planned."""

from typing import Any

import pytest
from planned_jobs import job_with
from stand_in_clock import StandInClock

from raypp.errors import ResourcesError
from raypp.job.job import Job
from raypp.planning import fit_search, search
from raypp.planning.costs import DEVICES, computed_costs
from raypp.planning.machines import Machines

PATIENCE_S = 2.0
"""Of a clock that goes on by a second whenever a search looks. Without a limit, searches of these
jobs take minutes or hours."""

LARGE = {
    "many-divisors": {"mesh": {"pp": 16, "fsdp": 6930}, "pipeline": {"microbatches": 16}},
    "many-rows": {
        "mesh": {"pp": 64, "fsdp": 2048},
        "pipeline": {"microbatches": 1024},
        "train": {"micro_batch_size": 720_720},
    },
    "many-experts": {
        "mesh": {"pp": 8, "fsdp": 1024, "ep": 64},
        "pipeline": {"microbatches": 64},
        "model": {"kind": "qwen3_moe", "num_experts": 128, "experts_per_token": 8, "num_layers": 64},
    },
    "long-programs": {"mesh": {"pp": 64}, "pipeline": {"microbatches": 256}, "model": {"num_layers": 64}},
}


every_case = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.gate if case == "many-rows" else ()) for case in LARGE]
)


def large(case: str) -> Job:
    document: dict[str, Any] = {"model": {"num_layers": 64}, **LARGE[case]}
    return job_with(**document)


class Impatient(StandInClock):
    """Goes on by a second whenever somebody looks at it."""

    def monotonic(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> StandInClock:
    clock = Impatient()
    for module in (fit_search, search):
        monkeypatch.setattr(module, "time", clock)
    return clock


@every_case
def test_a_search_for_what_fits_ends_in_time(case: str) -> None:
    job = large(case)
    device, machines = DEVICES["rtx4090"], Machines.alike(job.mesh.world, 8, 10.0)
    found = fit_search.changes_that_fit(job, machines, device, patience_s=PATIENCE_S)
    assert found.tried <= PATIENCE_S
    assert found.now is not None or found.out_of_time


@every_case
def test_a_search_for_the_fastest_ends_in_time(case: str) -> None:
    job = large(case)
    device, machines = DEVICES["rtx4090"], Machines.alike(job.mesh.world, 8, 10.0)
    try:
        found = search.search(
            job, machines, computed_costs(job, device), device_memory=device.memory, patience_s=PATIENCE_S
        )
    except ResourcesError:  # nothing was found in this time, or nothing is small enough to be tried
        found = None
    assert found is None or found.out_of_time
