"""All mistakes of a job file are reported at once, each with its line and a fix."""

import json
from pathlib import Path

import pytest

from raypp.errors import EXIT_USAGE, JobError, Problem
from raypp.job.job_file import JobFile, load_job
from raypp.job.load import job_document, parse_job


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(folder: Path, text: str | bytes, *overrides: str) -> JobFile:
    (folder / "job.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_job("job.yaml", overrides)


def problems(folder: Path, text: str | bytes, *overrides: str) -> tuple[Problem, ...]:
    with pytest.raises(JobError) as caught:
        load(folder, text, *overrides)
    assert caught.value.exit_code == EXIT_USAGE
    return caught.value.problems


def reported(folder: Path, text: str | bytes, *overrides: str) -> str:
    (problem,) = problems(folder, text, *overrides)
    assert problem.fix, "every problem has a fix"
    return str(problem)


def test_a_name_alone_is_a_job_with_every_default(folder: Path) -> None:
    job = load(folder, "name: a\n").job
    assert (job.name, job.mesh.world, job.pipeline.schedule) == ("a", 1, "1f1b")


@pytest.mark.parametrize(
    ("written", "lr"), [("3e-4", 3e-4), ("3.0e-4", 3e-4), ("1E-3", 1e-3), (".5", 0.5), ("2.", 2.0), ("1", 1.0)]
)
def test_every_way_to_write_a_number_is_a_number(folder: Path, written: str, lr: float) -> None:
    assert load(folder, f"name: a\ntrain: {{optimizer: {{lr: {written}}}}}\n").job.train.optimizer.lr == lr


def test_off_is_a_word_as_in_the_reference_not_a_boolean(folder: Path) -> None:
    assert load(folder, "name: a\npipeline: {variable_seq_len: off}\n").job.pipeline.variable_seq_len == "off"


def test_anchors_and_merges_work_and_own_keys_win(folder: Path) -> None:
    text = "name: a\nmesh: &m {pp: 2, fsdp: 3}\ntrain: {steps: 5}\ndata: {kind: synthetic}\n"
    assert load(folder, text).job.mesh.fsdp == 3
    text = "name: a\nmodel: {<<: {num_layers: 3, num_heads: 2}, num_heads: 8}\n"
    model = load(folder, text).job.model
    assert (model.num_layers, model.num_heads) == (3, 8)


def test_all_mistakes_are_reported_at_once_in_the_order_of_their_lines(folder: Path) -> None:
    found = problems(
        folder, "name: Not Good\nmesh:\n  pp: a\n  fsdp: 0\n  rp: 2\nmodel: {decoder: 1, num_layers: true}\n"
    )
    assert [(problem.where, problem.key) for problem in found] == [
        ("job.yaml:1", "name"),
        ("job.yaml:3", "mesh.pp"),
        ("job.yaml:4", "mesh.fsdp"),
        ("job.yaml:5", "mesh.rp"),
        ("job.yaml:6", "model.num_layers"),
        ("job.yaml:6", "model.decoder"),
    ]


WRONG = [
    ("mesh: {pp: a}", "mesh.pp: must be a whole number ≥ 1, is 'a'", "for example `pp: 1`"),
    ("mesh: {pp: 2.0}", "mesh.pp: must be a whole number ≥ 1, is 2.0", "write 2"),
    ("mesh: {pp: '2'}", "mesh.pp: must be a whole number ≥ 1, is '2'", "write it without quotes: 2"),
    ("mesh: {fdsp: 2}", "mesh.fdsp: unknown key", "did you mean fsdp?"),
    ("train: {lr: 1}", "train.lr: unknown key", "did you mean train.optimizer.lr or train.sync.lr?"),
    ("mesh: 5", "mesh: must be a section of keys, is 5",
     "put its keys below `mesh:`, indented (pp, dp_replicate, fsdp, cp …)"),
    ("mesh: {cp_style: rnig}", "mesh.cp_style: must be ring or ulysses, is 'rnig'", "did you mean ring?"),
    ("pipeline: {lookahead: x}", "pipeline.lookahead: must be auto or a whole number ≥ 0, is 'x'",
     "for example `lookahead: auto`"),
    ("pipeline: {layers_per_stage: [1, -1]}", "pipeline.layers_per_stage[1]: must be a whole number ≥ 0, is -1",
     "see `raypp explain pipeline`"),
    ("data: {packing: yes}", "data.packing: must be true or false, is 'yes'", "write true"),
    ("train: {optimizer: {betas: [0.9]}}",
     "train.optimizer.betas: must be a list of 2, each a number ≥ 0 and < 1, is [0.9]",
     "for example `betas: [0.9, 0.95]`"),
    ("train: {optimizer: {lr: nan}}", "train.optimizer.lr: must be a number ≥ 0, is 'nan'", "for example `lr: 0.0003`"),
    ("resources: {env: {A: 1}}", "resources.env.A: must be text, is 1",
     "put it in quotes: '1' (in a shell: --set \"resources.env.A='1'\")"),
    ("name: b", "name: is given twice, first in line 1", "keep one of the two"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "what", "fix"), WRONG)
def test_a_wrong_value_is_reported_with_its_line_what_it_must_be_and_a_fix(
    folder: Path, line: str, what: str, fix: str
) -> None:
    assert reported(folder, f"name: a\n{line}\n") == f"job.yaml:2 {what}\n  fix: {fix}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "job.yaml:1: the file is empty"),
        ("- a\n- b\n", "job.yaml:1: a job must be a mapping of keys, is [\"a\", \"b\"]"),
        ("mesh: {pp: 1}\n", "job.yaml:1 name: is missing"),
        ("name: a\nmesh:\n\tpp: 1\n", "job.yaml:3: not valid YAML: a tab used for indentation"),
        ("name: a\nmesh: {pp: 1\n", "job.yaml:3: not valid YAML"),
        ("name: a\n---\nname: b\n", "job.yaml:2: not valid YAML: a second document starts here (`---`)"),
        ("name: *a\n", "job.yaml:1: not valid YAML: found undefined alias 'a'"),
        ("name: a\ndata: {path: *.txt}\n", "job.yaml:2: not valid YAML: expected alphabetic or numeric character"),
        ("name: a\nmesh: &m {pp: *m}\n", "job.yaml:2 mesh.pp: the alias contains itself"),
        ("name: !!python/name:os.system a\n", "job.yaml:1 name: the YAML tag 'tag:yaml.org,2002:python/name:os"),
        (b"name: a\ndata: \xff\n", "job.yaml:2: is not UTF-8 text (byte 0xff)"),
        (b"name: a\x00\n", "job.yaml:1: not valid YAML: a control character (code 0)"),
    ],
)  # fmt: skip
def test_a_text_that_is_no_job_is_reported_with_its_line(folder: Path, text: str | bytes, message: str) -> None:
    found = problems(folder, text)
    assert str(found[0]).startswith(message)
    assert found[0].fix


def test_a_missing_file_and_a_directory_are_reported(folder: Path) -> None:
    for name, what in (("none.yaml", "does not exist"), (".", "is a directory")):
        with pytest.raises(JobError, match=what):
            load_job(name)


def test_a_setting_replaces_a_value_adds_a_section_and_the_last_one_wins(folder: Path) -> None:
    text = "name: a\nmesh: {pp: 2}\n"
    settings = [
        "mesh.pp=4", "train.optimizer.lr=3e-4", "pipeline.layers_per_stage=[3, 5]", "train.steps=1", "train.steps=2",
    ]  # fmt: skip
    job = load(folder, text, *settings, "train.clip_norm=", "data={kind: synthetic}").job
    assert (job.mesh.pp, job.train.optimizer.lr, job.pipeline.layers_per_stage) == (4, 3e-4, [3, 5])
    assert (job.train.steps, job.train.clip_norm, job.data.kind) == (2, None, "synthetic")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("mesh", "--set mesh: is not an override"),
        ("mesh.pp=x", "--set mesh.pp=x mesh.pp: must be a whole number ≥ 1, is 'x'"),
        ("mesh.ppp=3", "--set mesh.ppp=3 mesh.ppp: unknown key\n  fix: did you mean pp?"),
        ("name.x=3", "--set name.x=3: name is 'a', not a section of keys"),
        ("mesh={pp: [", "--set mesh={pp: [: not valid YAML: the text ends inside a bracket or a quote"),
    ],
)
def test_a_wrong_setting_is_reported_with_the_setting_as_its_place(folder: Path, setting: str, message: str) -> None:
    assert reported(folder, "name: a\nmesh: {pp: 1}\n", setting).startswith(message)


def test_a_problem_found_later_is_located_at_its_key_or_the_nearest_section_given(folder: Path) -> None:
    file = load(folder, "name: a\nmesh:\n  pp: 2\n", "train.steps=3", "data={seq_len: 8}")

    def where(key: str) -> str:
        return file.locate(Problem(key, "x")).where

    assert [where(key) for key in ("mesh.pp", "mesh.cp", "pipeline.microbatches", "train.steps", "data.seq_len")] == [
        "job.yaml:3", "job.yaml:2", "job.yaml:1", "--set train.steps=3", "--set data={seq_len: 8}",
    ]  # fmt: skip


def test_a_job_survives_the_way_through_json(folder: Path) -> None:
    job = load(folder, "name: a\nmodel: {kind: mixtral, num_experts: 4}\ndata: {eval: {fraction: 0.1}}\n").job
    document = json.loads(json.dumps(job_document(job)))
    assert parse_job(document) == job
    assert document["model"]["aux_loss_weight"] == 0.001
    assert document["train"]["optimizer"]["betas"] == [0.9, 0.95]


def test_a_users_own_model_keeps_its_further_keys() -> None:
    model = parse_job({"name": "a", "model": {"kind": "my.models:make", "width": 3}}).model
    assert model.model_dump()["width"] == 3


def test_paths_start_in_the_current_directory_then_beside_the_job_file(folder: Path, tmp_path: Path) -> None:
    (folder / "jobs").mkdir()
    for place in (folder / "here.txt", folder / "jobs" / "here.txt", folder / "jobs" / "beside.txt"):
        place.write_text("x")

    def data_path(path: str) -> str | None:
        (folder / "jobs" / "job.yaml").write_text(f"name: a\ndata: {{path: '{path}'}}\n")
        return load_job("jobs/job.yaml").job.data.path

    assert data_path("here.txt") == str(folder / "here.txt")
    assert data_path("beside.txt") == str(folder / "jobs" / "beside.txt")
    assert data_path("besi*.txt") == str(folder / "jobs" / "besi*.txt")
    assert data_path("nowhere.txt") == "nowhere.txt"
    assert data_path("s3://bucket/*.txt") == "s3://bucket/*.txt"


def test_the_checkpoint_url_is_absolute_and_a_tilde_is_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.delenv("RAYPP_HOME", raising=False)
    assert load(folder, "name: a\n").job.run_url == f"{folder}/home/.raypp/checkpoints/a"
    monkeypatch.setenv("RAYPP_HOME", "elsewhere")
    assert load(folder, "name: a\n").job.run_url == f"{folder}/elsewhere/checkpoints/a"
    assert load(folder, "name: a\ncheckpoint: {url: out}\n").job.checkpoint.url == f"{folder}/out"
    assert load(folder, "name: a\ncheckpoint: {url: s3://b/c/}\n").job.run_url == "s3://b/c/a"


BASE = """name: base
model:
  num_layers: 8
  hidden_size: 64
train:
  steps: 5
  optimizer: {betas: [0.8, 0.9], lr: 0.5}
"""


def included(tmp_path: Path, text: str, base: str = BASE, overrides: tuple[str, ...] = ()) -> JobFile:
    (tmp_path / "sub").mkdir(exist_ok=True)
    (tmp_path / "sub" / "base.yaml").write_text(base)
    (tmp_path / "job.yaml").write_text(text)
    return load_job(tmp_path / "job.yaml", overrides)


def test_a_job_replaces_values_of_the_file_that_it_includes(tmp_path: Path) -> None:
    text = "include: sub/base.yaml\nname: own\ntrain:\n  steps: 7\n  optimizer: {betas: [0.5, 0.6]}\n"
    file = included(tmp_path, text, overrides=("model.num_layers=4",))
    job = file.job
    assert (job.name, job.model.hidden_size, job.model.num_layers, job.train.steps) == ("own", 64, 4, 7)
    assert (job.train.optimizer.betas, job.train.optimizer.lr, job.include) == ((0.5, 0.6), 0.5, None)
    places = {
        key: file.locate(Problem(key, "")).where for key in ("model.hidden_size", "train.steps", "model.num_layers")
    }
    assert places == {
        "model.hidden_size": f"{tmp_path}/sub/base.yaml:4", "train.steps": f"{tmp_path}/job.yaml:4",
        "model.num_layers": "--set model.num_layers=4",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "base", "where", "fault"),
    [
        ("include: sub/none.yaml\n", BASE, "job.yaml:1", "sub/none.yaml does not exist"),
        ("name: a\ninclude: job.yaml\n", BASE, "job.yaml:2", "job.yaml is this file: a circle"),
        ("include: sub/base.yaml\n", "include: ../job.yaml\n", "sub/base.yaml:1", "includes this file: a circle"),
        ("include: sub/base.yaml\n", "name: b\ninclude: c.yaml\n", "sub/base.yaml:2", "which may include none"),
        ("include: sub/base.yaml\n", "name: b\ntrain: {step: 3}\n", "sub/base.yaml:2", "unknown key"),
        ("include: sub/base.yaml\ntrain: {step: 3}\n", BASE, "job.yaml:2", "unknown key"),
        ("include: [a]\n", BASE, "job.yaml:1", "must be the path of a job file"),
    ],
)
def test_what_is_wrong_with_an_include_names_the_right_file_and_line(
    text: str, base: str, where: str, fault: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError) as caught:
        included(tmp_path, text, base)
    (problem,) = caught.value.problems
    assert problem.where == f"{tmp_path}/{where}" and fault in problem.fault
