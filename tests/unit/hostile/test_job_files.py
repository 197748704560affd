"""Whatever a job file says, the answer is a plan or problems with places, without much work."""

import os
import re
from pathlib import Path

import pytest

from raypp.api.checked_job import load_checked_job
from raypp.errors import JobError
from raypp.job.job_file import load_job
from raypp.planning.plan import make_plan

_MERGES = ",".join(["*a"] * 100)
TEXTS = {
    "aliases that grow": "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1},' * 10}]\n" for i in range(1, 12)),
    "merges that grow": "a: &a {" + ", ".join(f"k{i}: 1" for i in range(200)) + f"}}\nb: {{<<: [{_MERGES}]}}\n",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems(text: str, *overrides: str) -> list[str]:
    Path("job.yaml").write_text(text)
    with pytest.raises(JobError) as caught:
        load_checked_job("job.yaml", overrides)
    return [f"{problem.where} {problem.key}: {problem.fault}" for problem in caught.value.problems]


def test_limits_are_reported_with_their_lines() -> None:
    head = "name: a\ndata: {kind: synthetic}\n"
    assert problems(f"{head}train:\n  steps: 1000000000000000000\n") == [
        "job.yaml:4 train.steps: must be at most 1,000,000,000,000, is 1000000000000000000"
    ]
    assert problems(f"{head}x: {'[' * 5000}") == ["job.yaml:1 : not valid YAML: it is nested too deeply"]
    assert problems(head, "mesh.pp=100000") == [
        "--set mesh.pp=100000 mesh.pp: mesh.pp 100,000 are 100,000 stages; a pipeline has at most 1,024"
    ]
    assert problems(head, "mesh.fsdp=100000", "mesh.cp=100") == [
        "--set mesh.fsdp=100000 mesh: has 10,000,000 ranks; at most 131,072 are possible"
    ]
    (reported,) = problems(head, "pipeline.microbatches=100000")
    assert "make 200,000 actions; a program has at most 131,072" in reported


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_values_are_counted_along_aliases(text: str) -> None:
    (reported,) = problems(text)
    assert re.fullmatch(r"job.yaml:\d+ : not valid YAML: more than 10,000 values, aliases followed", reported)


def test_a_file_of_somebody_else_is_said_to_run_code_and_to_name_paths_outside_before_that_is_used(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = folder / "theirs"
    theirs.mkdir()
    (theirs / "in.txt").write_text("In the beginning\n")
    (folder / "out.txt").write_text("In the beginning\n")
    (theirs / "link.txt").symlink_to(folder / "out.txt")
    job = theirs / "job.yaml"
    job.write_text(
        "name: a\ndata: {kind: text, path: in.txt, eval: {path: link.txt}}\n"
        "pipeline: {schedule: not_here_yet:f}\nrecovery: {policy: not_here:f}\ncheckpoint: {url: /elsewhere/store}\n"
    )
    with pytest.raises(JobError, match="not_here_yet"):  # said before it is looked for
        load_checked_job(job)
    assert sorted(one.getMessage().removeprefix(f"note: {theirs}/") for one in caplog.records) == [
        f"job.yaml:2: data.eval.path is outside of the file's folder: {theirs}/link.txt",
        "job.yaml:3: pipeline.schedule is own code, which runs on this machine and on the nodes: not_here_yet:f",
        "job.yaml:4: recovery.policy is own code, which runs on this machine and on the nodes: not_here:f",
        "job.yaml:5: checkpoint.url is outside of the file's folder: /elsewhere/store",
    ]
    caplog.clear()
    job.write_text("name: a\ndata: {kind: text, path: in.txt}\n")
    load_checked_job(job, [f"data.eval.path={folder}/out.txt"])  # the user's own words
    assert not [one for one in caplog.records if "outside" in one.getMessage()]


def test_a_job_file_beyond_the_limit_is_not_read() -> None:
    Path("job.yaml").write_bytes(b"name: a\n" + b"# comment, and more of it, until the limit is passed\n" * 8_000)
    with pytest.raises(JobError, match=r"job.yaml: has more than 262,144 bytes"):
        load_job("job.yaml")
    os.truncate("job.yaml", 1 << 40)  # whoever reads it has no memory left
    with pytest.raises(JobError, match=r"job.yaml: has more than 262,144 bytes"):
        load_job("job.yaml")


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("mesh.fsdp=100000",), marks=pytest.mark.gate),
        ("model.num_layers=4096", "mesh.pp=100", "mesh.fsdp=8", "pipeline.microbatches=4", "pipeline.schedule=gpipe"),
    ],
)
def test_large_plans(overrides: tuple[str, ...]) -> None:
    Path("job.yaml").write_text("name: a\ndata: {kind: synthetic}\n")
    make_plan(load_checked_job("job.yaml", overrides).job)
