"""Whatever a job file says, the answer is a plan or problems with their places, without much
work."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from click.testing import CliRunner
from counted_calls import counted_calls
from hypothesis import given, settings
from hypothesis import strategies as st

from raypp.api.checked_job import load_checked_job
from raypp.cli.main import cli
from raypp.errors import JobError, RayppError
from raypp.mesh.shapes import divisors
from raypp.planning.check import check_plan
from raypp.planning.plan import make_plan
from raypp.spec.document import read_document
from raypp.spec.job_file import load_job
from raypp.spec.load import parse_job
from raypp.untrusted import files
from tests.fuzz.job_files import planned

EXAMPLES = sorted((Path(__file__).parents[3] / "jobs").glob("*.yaml"))
HEAD = b"name: a\ndata: {kind: synthetic}\n"
DIGITS = "9" * 5000
MOST_CALLS = 2_000_000
"""Calls of functions, of which jobs of the repository need 50,000 to 150,000."""

_KEYS = ", ".join(f"k{i}: 1" for i in range(2000))
_MERGES = ",".join(["*a"] * 5_000)
TEXTS = {
    "aliases that grow": b"a0: &a0 [1]\n"
    + b"".join(b"a%d: &a%d [%s]\n" % (i, i, b",".join([b"*a%d" % (i - 1)] * 10)) for i in range(1, 12)),
    "merges that grow": b"".join(
        b"a%d: &a%d {<<: [%s]}\n" % (i, i, b",".join([b"*a%d" % (i - 1)] * 10) if i else b"{k: 1}") for i in range(12)
    ),
    "many merges of many keys": f"a: &a {{{_KEYS}}}\nb: {{<<: [{_MERGES}]}}\n".encode(),
    "an alias of itself": b"name: a\nmesh: &m\n  pp: 1\n  x: *m\n",
    "a merge of itself": b"name: a\nmesh: &m\n  pp: 1\n  <<: *m\n",
    "a merge of text": b"name: a\nmesh: {<<: text}\n",
    "an undefined alias": b"name: *nothing\n",
    "the same key": b"name: a\n" * 1_000,
    "deep brackets": b"name: " + b"[" * 200 + b"]" * 200,
    "deep lines": b"".join(b" " * i + b"k:\n" for i in range(600)),
    "digits": HEAD + f"mesh: {{pp: {DIGITS}}}\n".encode(),
    "hexadecimal digits": HEAD + f"mesh: {{pp: 0x{'f' * 5000}}}\n".encode(),
    "an exponent": HEAD + f"train: {{clip_norm: 1e{DIGITS}}}\n".encode(),
    "not a number": HEAD + b"train: {optimizer: {lr: .nan}}\n",
    "the largest number": HEAD + b"pipeline: {input_weight: 1e308, output_weight: 1e308}\n",
    "a tag of Python": HEAD + b"mesh: !!python/object/apply:os.system [ls]\n",
    "a tag of another kind": HEAD + b"mesh: {pp: !!int x}\n",
    "a list as a key": b"? [a, b]\n: 1\n",
    "no key": b"name: a\n~: 1\n",
    "keys like paths": b"name: a\n'mesh.pp': 1\n'mesh[0]': 1\n'.': 1\n",
    "NUL": b"name: a\x00b\n",
    "control characters": b'name: "\\e[2J\\a"\n"\\e[2J": 1\n',
    "half a character": b'name: a\nresources: {env: {"A\\udc80": "\\udfff"}}\n',
    "beyond Unicode": b'name: "\\UFFFFFFFF"\n',
    "UTF-16": "name: a\n".encode("utf-16"),
    "latin-1": "name: é\n".encode("latin-1"),
    "a mark within": b"name: a\n\xef\xbb\xbfmesh: {pp: 1}\n",
    "lines that end with CR": b"name: a\rmesh:\r  pp: x\r",
    "two documents": b"name: a\n---\nname: b\n",
    "nothing": b"",
    "bytes": bytes(range(256)) * 8,
    "a list": b"[1]",
    "a path with NUL": b'name: a\ndata: {kind: text, path: "a\\0b"}\n',
    "a URL that is none": HEAD + b'checkpoint: {url: "s3://[/x"}\n',
}
SETTINGS = {
    "a long path": [".".join(["a"] * 10_000) + "=1"],
    "half a character": ["name=\udc80"],
    "nothing": ["", "="],
    "below a value": ["mesh.pp=1", "mesh.pp.x=2", "name.x=1"],
    "a list for a section": ["train.optimizer=[1, 2]"],
    "a large number": ["model.num_layers=1000000000000000000"],
    "a large mesh": ["mesh.pp=100", "mesh.fsdp=10000", "mesh.dp_replicate=10000", "mesh.cp=10000"],
    "a large list": ["pipeline.layers_per_stage=[" + ",".join(["3"] * 5000) + "]", "mesh.pp=5000"],
    "a large vocabulary": ["data.seq_len=1000000000", "model.vocab_size=1000000000"],
    "many experts": ["model.kind=mixtral", "model.num_experts=1000000000", "mesh.fsdp=8", "mesh.ep=8"],
    "a name that is no module": ["data.kind=a..b:f"],
    "a module without the function": ["pipeline.schedule=os.path:f"],
}
CASES = {
    **{f"text: {name}": (data, []) for name, data in TEXTS.items()},
    **{f"--set: {name}": (HEAD, settings) for name, settings in SETTINGS.items()},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", CASES)
def test_a_job_that_nobody_sane_writes_is_planned_or_refused_with_its_places(case: str) -> None:
    data, settings = CASES[case]
    with counted_calls() as calls, suppress(RayppError):
        planned(data, settings)
    assert calls.count < MOST_CALLS


def problems(text: str, *overrides: str) -> list[str]:
    Path("job.yaml").write_text(text)
    with pytest.raises(JobError) as caught:
        load_checked_job("job.yaml", overrides)
    return [f"{problem.where} {problem.key}: {problem.fault}" for problem in caught.value.problems]


def test_limits_are_told_with_their_lines() -> None:
    head = "name: a\ndata: {kind: synthetic}\n"
    assert problems(f"{head}train:\n  steps: 1000000000000000000\n") == [
        "job.yaml:4 train.steps: must be at most 1,000,000,000,000, is 1000000000000000000"
    ]
    assert problems(f"{head}x: {'[' * 40}") == ["job.yaml:3 : sections and lists are nested more than 32 levels deep"]
    assert problems(head, "mesh.pp=100000") == [
        "--set mesh.pp=100000 mesh.pp: mesh.pp 100,000 are 100,000 stages; a pipeline has at most 1,024"
    ]
    assert problems(head, "mesh.fsdp=100000", "mesh.cp=100") == [
        "--set mesh.fsdp=100000 mesh: has 10,000,000 ranks; at most 131,072 are possible"
    ]
    (told,) = problems(head, "pipeline.microbatches=100000")
    assert "make 200,000 actions; a program has at most 131,072" in told


def test_values_are_counted_along_aliases() -> None:
    grows = TEXTS["aliases that grow"].decode()
    (told,) = problems(grows)
    assert told == "job.yaml:1 : not valid YAML: more than 10,000 values, aliases followed"


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


def test_a_job_file_is_a_regular_file_or_a_pipe() -> None:
    Path("folder").mkdir()
    for path in ("folder", "/dev/zero"):
        with pytest.raises(JobError, match=rf"{path}: is a "):
            load_job(path)


@contextmanager
def written(*parts: bytes, ends: bool = True) -> Iterator[str]:
    """Yields a path as of `<(command)`, to which a thread writes the parts."""
    reader, writer = os.pipe()
    over = threading.Event()

    def write() -> None:
        with suppress(BrokenPipeError), os.fdopen(writer, "wb", buffering=0) as file:
            for part in parts:
                file.write(part)
            if not ends:
                over.wait(30)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield f"/dev/fd/{reader}"
    finally:
        over.set()
        os.close(reader)
        thread.join()


def test_a_pipe_is_read_until_it_is_closed() -> None:
    with written(b"name: a\nda", b"", b"ta: {kind: synthetic}\n") as path:
        assert load_checked_job(path).job.name == "a"


def test_a_pipe_that_is_silent_or_has_no_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIPE_S", 0.2)
    os.mkfifo("fifo")
    with pytest.raises(JobError, match=r"fifo: is a pipe to which nothing was written for 0 s"):
        load_job("fifo")
    with written(b"name: a\n", ends=False) as path, pytest.raises(JobError, match="nothing was written"):
        load_job(path)
    with written(*[b"# x\n" * 10_000] * 100) as path, pytest.raises(JobError, match=r"more than 262,144 bytes"):
        load_job(path)
    monkeypatch.setattr(files, "PIPE_TOTAL_S", 0.0)
    with written(b"name: a\n", ends=False) as path, pytest.raises(JobError, match="a pipe that does not end"):
        load_job(path)


def test_a_job_file_beyond_the_limit_is_not_read() -> None:
    Path("job.yaml").write_bytes(b"name: a\n" + b"# comment, and more of it, until the limit is passed\n" * 8_000)
    with pytest.raises(JobError, match=r"job.yaml: has more than 262,144 bytes"):
        load_job("job.yaml")
    os.truncate("job.yaml", 1 << 40)  # whoever reads it has no memory left
    with pytest.raises(JobError, match=r"job.yaml: has more than 262,144 bytes"):
        load_job("job.yaml")


def test_limits_refuse_no_real_job() -> None:
    """A world, a model and a schedule several times larger than any that is known."""
    numbers = {"num_layers": 1000, "hidden_size": 65536, "num_heads": 512, "ffn_size": 262144, "vocab_size": 2_000_000}
    job = parse_job(
        {
            "name": "a",
            "model": numbers,
            "data": {"kind": "synthetic", "seq_len": 10_000_000},
            "mesh": {"pp": 128, "dp_replicate": 16, "fsdp": 64},
            "pipeline": {"microbatches": 512, "schedule": "1f1b"},
            "train": {"steps": 10_000_000},
        }
    )
    assert check_plan(job) == []


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


@pytest.mark.parametrize("option", ["--link-gbps", "--search-time", "--per-node"])
def test_options_of_plan_are_numbers_within_limits(option: str) -> None:
    Path("job.yaml").write_text("name: a\ndata: {kind: synthetic}\nmesh: {pp: 2}\n")
    for value in ("nan", "inf", "-inf", "1e308", "1e-308", "0", "x"):
        result = CliRunner().invoke(cli, ["plan", "job.yaml", option, value])
        assert result.exit_code == 2 and f"Invalid value for '{option}'" in result.output


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.integers(1, 5000))
def test_divisors(number: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


_TEXT = st.text(st.sampled_from("ab:-?[]{}&*!|>'\"%#,<~ \n\t\\0.e9"), max_size=60)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(_TEXT, st.lists(_TEXT, max_size=2))
def test_any_text(text: str, overrides: list[str]) -> None:
    Path("any.yaml").write_text("name: a\ndata: {kind: synthetic}\n" + text)
    try:
        load_job("any.yaml", overrides)
    except JobError as error:
        assert all(problem.where or problem.key for problem in error.problems)


def test_a_character_that_json_writes_as_two_escapes_is_read() -> None:
    document = read_document('name: "\\ud83d\\ude80"\n"\\ud83d\\ude80": 1\n', "job.yaml")
    assert document.value == {"name": "\U0001f680", "\U0001f680": 1} and not document.problems
