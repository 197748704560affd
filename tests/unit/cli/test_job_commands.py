"""The command line as a whole, and the commands that need no cluster."""

import json
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from raypp.__main__ import main as command
from raypp.cli import main as frame
from raypp.cli.main import COMMANDS, cli, run
from raypp.errors import JobError, Problem, RayppError, ResourcesError, RunFailedError, UnreachableError

REPOSITORY = Path(__file__).parents[3]
QUICKSTART = str(REPOSITORY / "jobs" / "quickstart.yaml")
pytestmark = pytest.mark.usefixtures("in_the_repository")


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch):
    def install(error: BaseException) -> None:
        space: dict[str, Any] = {"error": error}
        exec(compile("def command(): raise error", "<a command of raypp>", "exec"), space)  # a file would be the user's
        monkeypatch.setattr(frame, "load_object", lambda _: click.command("plan")(space["command"]))

    return install


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_is_there_under_its_name_and_has_help(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert command.name == name
    assert command.help


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["plna"], "there is no command 'plna'; did you mean 'plan'?"),
        (["chat"], "there is no command 'chat'; did you mean 'generate RUN --chat'?"),
        (["plan"], "Missing argument 'JOB'"),
        (["plan", QUICKSTART, "--sett", "x"], "No such option"),
        (["plan", "none.yaml"], "none.yaml: does not exist"),
        (["explain", "mesh.ppp"], "did you mean mesh.pp?"),
        (["list-kinds", "foo"], "use one of model.kind"),
    ],
)
def test_wrong_arguments_leave_with_2_and_say_what_is_wrong(
    arguments: list[str], reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    printed = capsys.readouterr()
    assert reported in printed.err
    assert printed.out == ""


def test_every_problem_of_a_job_is_reported_at_once_from_types_to_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("name: a\ndata: {kind: parquet, path: .}\nmodel:\n  hidden_size: 250\nmesh:\n  pp: 4\n")
    assert run(["plan", str(job), "--set", "pipeline.microbatches=2"]) == 2
    printed = capsys.readouterr().err
    assert f"{job}:4 model.hidden_size: 250 is not divisible by 4 heads\n  fix:" in printed
    assert f"{job}:2 data.kind: there is no 'parquet'; there are: text, jsonl, tokens, chat, hf, " in printed
    assert "--set pipeline.microbatches=2: " in printed


def test_every_problem_that_needs_no_sizes_is_reported_with_that_of_from_hf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        "name: a\nmodel: {from_hf: none}\ndata: {path: none.txt}\nrecovery: {policy: defualt}\n"
        "train: {optimizer: {kind: adam}}\n"
    )
    unreachable = {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    for name, value in {**unreachable, "RAYPP_STORE_PATIENCE_S": "0.1"}.items():
        monkeypatch.setenv(name, value)
    for url in ("none", "s3://raypp/none"):
        assert run(["plan", str(job), "--set", f"model.from_hf={url}"]) == 2
        printed = capsys.readouterr().err
        assert f"{job}:3 data.path: there is no" in printed
        assert f"{job}:4 recovery.policy: there is no 'defualt'" in printed
        assert f"{job}:5 train.optimizer.kind: there is no 'adam'" in printed
        assert ("--set model.from_hf=none: there is no" if url == "none" else "127.0.0.1:9") in printed
    job.write_text("name: a\ndata: {kind: synthetic}\n")
    assert run(["plan", str(job), "--set", "model.from_hf=s3://raypp/none"]) == 3


def test_the_plan_as_json_has_the_textbooks_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", QUICKSTART, "--set", "pipeline.microbatches=3", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["world"], sum(plan["cut"]), plan["bubble_fraction"]) == (4, 6, 0.25)
    assert plan["bubble_overhead"] == pytest.approx(1 / 3)
    assert plan["program"][0] == "0F0 0F1 0B0 0F2 0B1 0B2"


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (RayppError("x"), 1, "x"),
        (RunFailedError("x"), 1, "x"),
        (JobError("x"), 2, "x"),
        (UnreachableError("x"), 3, "x"),
        (ResourcesError("x"), 4, "x"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (click.Abort(), 130, "interrupted"),
    ],
)
def test_an_errors_exit_code_is_the_commands(
    raising, error: BaseException, code: int, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(error)
    assert run(["plan"]) == code
    assert capsys.readouterr().err.strip() == printed


def test_problems_are_printed_as_where_what_and_fix(raising, capsys: pytest.CaptureFixture[str]) -> None:
    raising(JobError([Problem("mesh.pp", "is odd", "use 2", f"job.yaml:{line}") for line in range(1, 5)]))
    assert run(["plan"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["job.yaml:1 mesh.pp: is odd", "  fix: use 2"]
    assert lines[-1] == "4 problems in job.yaml"


def test_an_interrupt_while_the_command_line_is_imported_leaves_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def find_spec(self, name: str, *others: object) -> None:
            if name == "raypp.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "raypp.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 130


def test_an_unexpected_error_is_one_line_and_a_traceback_only_with_debug(
    raising, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(ZeroDivisionError("two\nlines"))
    assert run(["plan"]) == 1
    line = (
        r"internal error: ZeroDivisionError: two lines \(raypp was in raypp/cli/main.py:\d+\) \(run again with --debug"
    )
    assert re.fullmatch(rf"{line} for the traceback\)\n", capsys.readouterr().err)
    for arguments in (["--debug", "plan"], ["plan", "--debug"]):
        assert run(arguments) == 1
        assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_full_disk_is_named_as_such(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(OSError), Path("/dev/full").open("w") as full:  # closing it writes again
        monkeypatch.setattr(sys, "stdout", full)
        assert run(["explain"]) == 1
    assert capsys.readouterr().err == "no space is left to write the output\n"


def test_the_schema_takes_the_shipped_jobs_and_refuses_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    import jsonschema

    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for job in (REPOSITORY / "jobs").glob("*.yaml"):
        assert [error.message for error in validator.iter_errors(yaml.safe_load(job.read_text()))] == []
    assert validator.is_valid({"name": "a", "model": {"kind": "mixtral", "num_experts": 4}})
    assert validator.is_valid({"name": "a", "model": {"kind": "my:model", "anything": 4}})
    for wrong in (
        {},
        {"name": "a", "mehs": {}},
        {"name": "a", "mesh": {"pp": 0}},
        {"name": "a", "model": {"kind": "llama", "num_experts": 4}},
        {"name": "a", "pipeline": {"schedule": "1F1B"}},
    ):
        assert not validator.is_valid(wrong), wrong
