"""Tests invalid jobs, data, stores and clusters: each gets an exit code and a message that says
where the problem is, what it is, and how to fix it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from laptop import Answer, Laptop

from raypp.ports import free_port

pytestmark = pytest.mark.timeout(600)

NAME = "bad-input"


@pytest.fixture(autouse=True)
def nothing_is_left_behind(laptop: Laptop) -> Iterator[None]:
    """Asserts that nothing is left in the store, on the cluster and on this machine."""
    before = _present(laptop)
    yield
    assert _present(laptop) == before


def _present(laptop: Laptop) -> tuple[Any, ...]:
    objects = [info.key for info in laptop.store("s3://raypp/tests").list(NAME)]
    notes = sorted(path.name for path in (laptop.directory / "home" / "runs").glob(f"{NAME}*"))
    jobs = [job["submission_id"] for job in laptop.jobs() if job["metadata"]["raypp_run"].startswith(NAME)]
    return objects, notes, jobs, sorted(name for name in laptop.actors() if NAME in name)


def _refused(reported: Answer, code: int, *words: str) -> None:
    assert reported.code == code, reported
    for word in (*words, "fix:"):
        assert word in reported.err, reported.err
    assert "Traceback" not in reported.err and "internal error" not in reported.err, reported.err
    assert not reported.out, reported.out


def test_every_error_of_a_file_is_reported_at_once_with_its_line(laptop: Laptop) -> None:
    job = laptop.job(NAME)
    text = job.read_text().replace("pp: 2", "pp: two").replace("seq_len: 64", "seq_length: 64")
    job.write_text(text.replace("steps: 40", "steps: 0"))
    reported = laptop.raypp("submit", str(job))
    lines = text.splitlines()
    for sign, key in (("pp: two", "mesh.pp"), ("seq_length", "data.seq_length"), ("steps: 40", "train.steps")):
        number = next(i for i, line in enumerate(lines, 1) if sign in line)
        assert f"{NAME}.yaml:{number}" in reported.err and key in reported.err, reported.err
    _refused(reported, 2)


@pytest.mark.gate
def test_data_that_cannot_be_used_end_the_run_at_once_and_are_named(laptop: Laptop) -> None:
    """Only a rank reads the data. The run's name can be used again with other data."""
    path = laptop.directory / "noise.txt"
    path.write_bytes(b"\xff\xfe\xfd\n")
    job = laptop.job("noise", data={"kind": "text", "path": str(path), "seq_len": 64}, mesh={"pp": 1})
    run = laptop.start(job, "--json")
    assert run.wait() == 2, run.describe()
    answer = json.loads(run.out.splitlines()[-1])
    assert (answer["state"], answer["restarts"], answer["step"]) == ("FAILED", 0, 0)
    for word in ("noise.txt:1", "UTF-8"):
        assert word in run.status()["error"] and word in " ".join(run.err.split()), run.describe()
    assert "Traceback" not in run.err
    repaired = ("--set", f"data.path={laptop.directory}/words.txt")
    again = laptop.raypp("submit", str(job), *repaired, "--resume", "--dry-run")
    assert again.code == 0, again
    assert not laptop.workers(f"{run.name}/")


def test_a_store_that_refuses_the_key_is_named(laptop: Laptop) -> None:
    environment = laptop.s3.environment() | {"AWS_SECRET_ACCESS_KEY": "wrong"}
    reported = laptop.raypp("submit", str(laptop.job(NAME)), environment=environment)
    _refused(reported, 3, "s3://raypp/tests", "AWS_SECRET_ACCESS_KEY", "secret")


def test_an_address_without_a_ray_is_named(laptop: Laptop) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    _refused(laptop.raypp("submit", str(laptop.job(NAME)), "--address", address), 3, address, "raypp local up")


def test_too_few_places_are_reported_with_a_mesh_that_would_fit(laptop: Laptop) -> None:
    job = laptop.job(NAME, mesh={"pp": 2, "fsdp": 6})
    reported = laptop.raypp("submit", str(job))
    _refused(reported, 4, "12 ranks", "8 are there", "127.0.0.1 8 of 8", "--set mesh.fsdp=4")


@pytest.mark.slow
def test_to_resume_a_run_that_was_submitted_under_another_name_names_that_name(laptop: Laptop) -> None:
    """`--set name=…` named the run, so the file alone does not say which run to resume."""
    store = laptop.store("s3://raypp/tests")
    store.put(f"{NAME}-1122/spec.json", b"{}")
    try:
        reported = laptop.raypp("submit", str(laptop.job(NAME)), "--resume")
    finally:
        store.delete([f"{NAME}-1122/spec.json"])
    _refused(reported, 2, "leave out --resume", f"`--set name={NAME}-1122`?")
