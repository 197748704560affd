"""Tests invalid jobs, data, stores and clusters: each gets an exit code and a message that says
where the problem is, what it is, and how to fix it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
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


def _refused(told: Answer, code: int, *words: str) -> None:
    assert told.code == code, told
    for word in (*words, "fix:"):
        assert word in told.err, told.err
    assert "Traceback" not in told.err and "internal error" not in told.err, told.err
    assert not told.out, told.out


def test_every_error_of_a_file_is_told_at_once_with_its_line(laptop: Laptop) -> None:
    job = laptop.job(NAME)
    text = job.read_text().replace("pp: 2", "pp: two").replace("seq_len: 64", "seq_length: 64")
    job.write_text(text.replace("steps: 40", "steps: 0"))
    told = laptop.raypp("submit", str(job))
    lines = text.splitlines()
    for sign, key in (("pp: two", "mesh.pp"), ("seq_length", "data.seq_length"), ("steps: 40", "train.steps")):
        number = next(i for i, line in enumerate(lines, 1) if sign in line)
        assert f"{NAME}.yaml:{number}" in told.err and key in told.err, told.err
    _refused(told, 2)


def _jsonl(*texts: str) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


BAD_DATA = {
    "blank.txt": ("text", ["data.path", "blank.txt"]),
    "empty-documents.jsonl": ("jsonl", ["data.path", "empty-documents.jsonl"]),
    "large-ids.npy": ("tokens", ["large-ids.npy", "320"]),
    "noise.txt": ("text", ["noise.txt:1", "UTF-8"]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", [pytest.param(file, marks=[pytest.mark.gate] * (file == "noise.txt")) for file in BAD_DATA]
)
def test_data_that_cannot_be_used_end_the_run_at_once_and_are_named(laptop: Laptop, file: str) -> None:
    """Only a rank reads the data. The run's name can be used again with other data."""
    path = laptop.directory / file
    _write_bad_data(path)
    job = laptop.job(path.stem, data={"kind": BAD_DATA[file][0], "path": str(path), "seq_len": 64}, mesh={"pp": 1})
    run = laptop.start(job, "--json")
    assert run.wait() == 2, run.told()
    answer = json.loads(run.out.splitlines()[-1])
    assert (answer["state"], answer["restarts"], answer["step"]) == ("FAILED", 0, 0)
    for word in BAD_DATA[file][1]:
        assert word in run.status()["error"] and word in " ".join(run.err.split()), run.told()
    assert "Traceback" not in run.err
    repaired = ("--set", f"data.path={laptop.directory}/words.txt", "--set", "data.kind=text")
    again = laptop.raypp("submit", str(laptop.directory / f"{run.name}.yaml"), *repaired, "--resume", "--dry-run")
    assert again.code == 0, again
    assert not laptop.workers(f"{run.name}/")


def _write_bad_data(path: Path) -> None:
    match path.name:
        case "blank.txt":
            path.write_text("\n\n   \n")
        case "empty-documents.jsonl":
            path.write_text(_jsonl("", ""))
        case "large-ids.npy":
            np.save(path, np.arange(1000, dtype=np.int32))
        case "noise.txt":
            path.write_bytes(b"\xff\xfe\xfd\n")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        pytest.param("AWS_ACCESS_KEY_ID", ["access key"], marks=pytest.mark.slow),
        ("AWS_SECRET_ACCESS_KEY", ["secret"]),
    ],
)
def test_a_store_that_refuses_the_key_is_named(laptop: Laptop, key: str, words: list[str]) -> None:
    environment = laptop.s3.environment() | {key: "wrong"}
    told = laptop.raypp("submit", str(laptop.job(NAME)), environment=environment)
    _refused(told, 3, "s3://raypp/tests", key, *words)


def test_an_address_without_a_ray_is_named(laptop: Laptop) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    _refused(laptop.raypp("submit", str(laptop.job(NAME)), "--address", address), 3, address, "raypp local up")


def test_too_few_places_are_told_with_a_mesh_that_would_fit(laptop: Laptop) -> None:
    job = laptop.job(NAME, mesh={"pp": 2, "fsdp": 6})
    told = laptop.raypp("submit", str(job))
    _refused(told, 4, "12 ranks", "8 are free", "127.0.0.1 8 of 8", "--set mesh.fsdp=4")


@pytest.mark.slow
def test_to_resume_a_run_that_was_submitted_under_another_name_tells_that_name(laptop: Laptop) -> None:
    """`--set name=…` named the run, so the file alone does not say which run to resume."""
    store = laptop.store("s3://raypp/tests")
    store.put(f"{NAME}-1122/spec.json", b"{}")
    try:
        told = laptop.raypp("submit", str(laptop.job(NAME)), "--resume")
    finally:
        store.delete([f"{NAME}-1122/spec.json"])
    _refused(told, 2, "leave out --resume", f"`--set name={NAME}-1122`?")
