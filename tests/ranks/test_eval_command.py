"""`raypp eval` finds the loss of the run's own evaluation, and that of transformers."""

import json
import math
import os
import random
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from lazily import Lazily
from local_tasks import TASKS, continued, drawn_rows, loss_of_texts, write_tasks

from raypp.cli.main import run as run_command
from raypp.errors import RunFailedError
from raypp.job.load import job_document, parse_job
from raypp.ports import free_port
from raypp.rank.own_seat import local_seat
from raypp.state.run_records.reader import RunReader
from raypp.storage import open_store
from raypp.tools.inference.eval_job import task_job
from raypp.tools.inference.source import Source, find_source
from raypp.tools.inference.task_model import Scored, ask_on_seat
from raypp.tools.local_ranks import run_ranks

transformers: Any = Lazily("transformers")
ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "jobs/data/kjv-new-testament.txt").read_text().split("\n\n")
TRAINED, HELD_OUT = ([text.strip() for text in part if 8 < len(text) < 250] for part in (TEXT[:160], TEXT[500:560]))
JOB: dict[str, Any] = {
    "name": "small",
    "model": {"kind": "llama", "num_layers": 4, "hidden_size": 32, "num_heads": 4, "ffn_size": 48, "vocab_size": 264},
    "data": {"kind": "text", "path": "train.txt", "seq_len": 256, "eval": {"path": "held.txt"}},
    "pipeline": {"microbatches": 3},
    "train": {"steps": 3, "micro_batch_size": 2, "eval_every_steps": 2, "optimizer": {"lr": 0.01}},
    "checkpoint": {"url": "store", "every_steps": 2, "memory_tier": False},
}


def environment(folder: Path, **more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "RAYPP_HOME": str(folder / "home"), "HF_HOME": str(folder)} | more


def trained(folder: Path, name: str, *changes: str, ranks: int = 1) -> str:
    command = [sys.executable, "-m", "raypp.rank", "--job", "job.json", "--set", f"name={name}"]
    command += [word for change in changes for word in ("--set", change)]
    port = str(free_port())
    processes = [
        subprocess.Popen(
            command,
            cwd=folder,
            env=environment(folder, RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    for process in processes:
        said, _ = process.communicate(timeout=200)
        assert process.returncode == 0, said
    return str(folder / "store" / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "train.txt").write_text("\n\n".join(TRAINED))
    (folder / "held.txt").write_text("\n\n".join(HELD_OUT))
    (folder / "job.json").write_text(json.dumps(JOB))
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> str:
    return trained(folder, "small")


@pytest.fixture(scope="module")
def exported(folder: Path, run: str) -> Path:
    assert raypp(folder, "checkpoints", "export", run, str(folder / "hf"))["tensors"] > 0
    return folder / "hf"


def said(folder: Path, *words: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "raypp", *words]
    done = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def raypp(folder: Path, *words: str) -> Any:
    code, out, err = said(folder, *words, "--json")
    assert code == 0, err
    return json.loads(out.splitlines()[-1])


def own(folder: Path, name: str) -> dict[int, tuple[float, int]]:
    found = RunReader(open_store(str(folder / "store")), name).evaluations()
    return {one["step"]: (one["loss"], one["tokens"]) for one in found}


@pytest.mark.gate
def test_the_loss_of_each_checkpoint_is_that_of_the_run_bit_for_bit(folder: Path, run: str) -> None:
    expected = own(folder, "small")
    assert sorted(expected) == [2, 3]
    newest = raypp(folder, "eval", run)
    assert list(newest) == ["loss", "perplexity", "tokens", "bytes_per_token"]
    assert (newest["loss"], newest["tokens"]) == expected[3]
    assert newest["perplexity"] == math.exp(newest["loss"]) and newest["bytes_per_token"] == 1.0
    older = raypp(folder, "eval", f"{run}/step-2", "--mesh", "pp=2")
    assert (older["loss"], older["tokens"]) == expected[2] != expected[3]


@pytest.mark.slow
def test_a_run_on_a_pipeline_with_a_fraction_held_out_is_evaluated_in_one_process(folder: Path) -> None:
    changes = ("mesh.pp=2", "data.eval={fraction: 0.2}", "train.precision=bf16", "pipeline.variable_seq_len=step")
    place = trained(folder, "pipeline", *changes, ranks=2)
    found = raypp(folder, "eval", place)
    assert (found["loss"], found["tokens"]) == own(folder, "pipeline")[3]


@pytest.mark.slow
def test_transformers_finds_the_same_loss(folder: Path, run: str, exported: Path) -> None:
    model, tokenizer = (
        transformers.AutoModelForCausalLM.from_pretrained(exported),
        transformers.AutoTokenizer.from_pretrained(exported),
    )
    loss, tokens = loss_of_texts(model, tokenizer, HELD_OUT)
    ours = raypp(folder, "eval", str(exported), "--data", "held.txt")
    assert (ours["tokens"], ours["bytes_per_token"]) == (tokens, 1.0)
    assert ours["loss"] == pytest.approx(loss, rel=1e-5)
    assert ours["loss"] == pytest.approx(raypp(folder, "eval", run)["loss"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tasks_have_the_numbers_of_the_harness_on_the_exported_model(folder: Path, run: str, exported: Path) -> None:
    pytest.importorskip("lm_eval")
    draw = random.Random(5)
    words = " ".join(TRAINED).split()
    rows = drawn_rows(draw, words, 21, 40)
    rows[3]["question"] = " ".join(words[:90])  # longer than the model's context
    theirs_of = (
        transformers.AutoModelForCausalLM.from_pretrained(exported),
        transformers.AutoTokenizer.from_pretrained(exported),
    )
    for row in rows:  # half of them as the model continues them
        row["continuation"] = continued(*theirs_of, row["question"], 256) if draw.random() < 0.5 else "no"
    names = write_tasks(folder, rows, f"{folder}/rows.jsonl")
    program = (
        "import json, logging\n"
        "from lm_eval import simple_evaluate\n"
        f"found = simple_evaluate('hf', 'pretrained={exported},dtype=float32', {names.split(',')!r}, batch_size=1,\n"
        "    device='cpu', log_samples=False)\n"
        "print(json.dumps(found['results']))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    for words_of_command in ((run,), (str(exported), "--mesh", "pp=2")):
        ours = raypp(folder, "eval", *words_of_command, "--tasks", names)["tasks"]
        assert ours.keys() == theirs.keys() == TASKS.keys()
        for name, metrics in ours.items():
            same = {metric: value for metric, value in theirs[name].items() if metric in metrics}
            assert {"choices": 4, "rolling": 2, "texts": 2, "next": 4}[name] == len(metrics) == len(same)
            assert metrics == pytest.approx(same, rel=1e-5)
    assert 0.2 < ours["texts"]["exact_match,none"] < 0.8
    few = raypp(folder, "eval", run, "--tasks", "choices.yaml", "--limit", "4")["tasks"]["choices"]
    assert few["acc,none"] in (0, 0.25, 0.5, 0.75, 1)


def broken_pipe(report: Any) -> None:
    raise BrokenPipeError("nobody reads the progress")


def score_for_nobody(rank: int, port: int, _tell: object, source: dict[str, Any], document: dict[str, Any]) -> None:
    trained, job = Source(**source), parse_job(document)
    rows = [Scored(range(1, 9), 3)] * 40
    ask_on_seat(trained, job, local_seat(rank, 2, port, job), [256], lambda model: model.score(rows), broken_pipe)


@pytest.mark.gate
def test_an_error_between_two_steps_of_a_request_ends_all_ranks(folder: Path, run: str) -> None:
    source = find_source(run)
    with pytest.raises(RunFailedError, match="nobody reads the progress"):
        run_ranks(2, score_for_nobody, asdict(source), job_document(task_job(source, 2)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["MODEL"], "does not name any data\n  fix: give --data PATH"),
        (["MODEL", "--data", "nowhere.txt"], "--data: there is no nowhere.txt"),
        (["MODEL", "--data", "held.txt", "--set", "data.tokenizer=large.json"], "data.tokenizer: does not fit"),
        (["MODEL", "--mesh", "pp=5", "--data", "held.txt"], "has more ranks than"),
        (["MODEL", "--mesh", "fsdp=2", "--data", "held.txt"], "is not pp=N\n  fix: give the number"),
        (["MODEL", "--tasks", "nowhere.yaml"], "there is no file"),
        (["MODEL", "--tasks", "broken.yaml"], "broken.yaml cannot be loaded"),
        (["MODEL", "--tasks", "hellaswg"], "there is no task 'hellaswg'\n  fix: did you mean hellaswag"),
        (["MODEL", "--tasks", "a", "--data", "held.txt"], "tasks bring their own data"),
        (["MODEL", "--data", "held.txt", "--limit", "3"], "belongs to --tasks"),
        (["RUN/step-1"], "committed steps: 2, 3"),
        (["store/nothing"], "there is no run"),
    ],
)
def test_what_is_wrong_is_named(
    words: list[str],
    reported: str,
    folder: Path,
    run: str,
    exported: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "--tasks" in words:
        pytest.importorskip("lm_eval")
    (folder / "empty.txt").write_text(" \n\n")
    (folder / "broken.yaml").write_text("task: [")
    vocabulary = {f"w{index}": index for index in range(300)} | {"</s>": 300}
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}}
    (folder / "large.json").write_text(json.dumps({**tokenizer, "added_tokens": []}))
    named = [word.replace("MODEL", str(exported)).replace("RUN", run) for word in words]
    monkeypatch.chdir(folder)
    monkeypatch.setenv("RAYPP_HOME", str(folder / "home"))
    assert run_command(["eval", *named]) == 2
    assert reported in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_without_a_tokenizer_asks_for_one(folder: Path, exported: Path) -> None:
    bare = folder / "bare"
    shutil.copytree(exported, bare)
    (bare / "tokenizer.json").unlink()
    code, _, err = said(folder, "eval", str(bare), "--data", "held.txt")
    assert code == 2 and "has no tokenizer" in err
    named = raypp(folder, "eval", str(bare), "--data", "held.txt", "--set", "data.tokenizer=bytes")
    assert named == raypp(folder, "eval", str(exported), "--data", "held.txt")
