"""`raypp generate` and `eval` give on the cluster what they give here, and leave nothing."""

import json
import os
import signal
import subprocess
from typing import Any

import pytest
from laptop import Answer, Laptop, Run, wait_for
from local_tasks import TASKS, write_tasks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

NAME = "used"
PROMPTS = ["In the beginning", "G", "And it came to pass, that", "Verily", "x"]


@pytest.fixture(scope="module")
def model(laptop: Laptop, undisturbed: Run) -> str:
    """A run with a checkpoint in the cluster's S3 server, for generations."""
    (laptop.directory / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in PROMPTS))
    return undisturbed.name


@pytest.fixture(scope="module")
def held_out(laptop: Laptop) -> str:
    """One that holds documents out, for evaluations."""
    run = laptop.start(laptop.job(NAME, train__steps=5, data__eval={"fraction": 0.1}))
    assert run.wait() == 0, run.describe()
    return NAME


def left(laptop: Laptop) -> dict[str, Any]:
    """Returns what the cluster still holds of generations and evaluations."""
    used = ("raypp/generate-", "raypp/eval-")
    found = {
        "groups": [state for use in used for state in laptop.groups(use) if state != "REMOVED"],
        "actors": [name for name in laptop.actors() if name.startswith(used)],
        "processes": [title for use in ("generate-", "eval-") for title in laptop.workers(use)],
        "jobs": [one["status"] for one in laptop.dashboard.jobs() if one["status"] in ("PENDING", "RUNNING")],
    }
    return {what: there for what, there in found.items() if there}


def nothing_is_left(laptop: Laptop) -> None:
    wait_for(lambda: not left(laptop), f"something is left: {left(laptop)}", patience_s=30)


DRAWS = ("--temperature", "1.3", "--top-p", "0.9", "--seed", "7")


@pytest.mark.parametrize("choice", [(), pytest.param(DRAWS, marks=pytest.mark.gate)])
def test_the_tokens_are_those_of_the_local_command(laptop: Laptop, model: str, choice: tuple[str, ...]) -> None:
    words = ("generate", model, "--prompts", "prompts.jsonl", "--max-new-tokens", "12", "--batch-size", "2", "--json")
    here = laptop.raypp(*words, *choice, "--mesh", "pp=1")
    there = laptop.raypp(*words, *choice, "--mesh", "pp=2", "--on-cluster")
    assert here.code == there.code == 0, (here, there)
    assert [row["prompt"] for row in there.rows()] == PROMPTS
    assert there.out == here.out
    nothing_is_left(laptop)


def test_the_loss_is_that_of_the_local_command(laptop: Laptop, held_out: str) -> None:
    here = laptop.raypp("eval", held_out, "--json")
    there = laptop.raypp("eval", held_out, "--mesh", "pp=2", "--address", laptop.state["dashboard"], "--json")
    assert here.code == there.code == 0, (here, there)
    assert there.out == here.out and there.json()["tokens"] > 100
    nothing_is_left(laptop)


@pytest.fixture(scope="module")
def tasks(laptop: Laptop) -> str:
    pytest.importorskip("lm_eval")
    words = (laptop.directory / "words.txt").read_text().split()
    rows = [
        {
            "question": " ".join(words[7 * row : 7 * row + 2 + row % 4]),
            "choices": [f" {words[7 * row + other]}" for other in range(4)],
            "answer": row % 4,
            "continuation": words[7 * row + 3] if row % 2 else "",
        }
        for row in range(13)
    ]
    return write_tasks(laptop.directory, rows, "rows.jsonl")


def test_tasks_have_the_results_of_the_local_command(laptop: Laptop, model: str, tasks: str) -> None:
    words = ("eval", model, "--tasks", tasks, "--json")
    cache = {"HF_HOME": str(laptop.directory / "hf")}
    here = laptop.raypp(*words, environment=cache)
    there = laptop.raypp(*words, "--mesh", "pp=2", "--on-cluster", environment=cache)
    assert here.code == there.code == 0, (here, there)
    assert there.out == here.out and there.json()["tasks"].keys() == TASKS.keys()
    found = there.json()["tasks"]["next"]
    assert found["perplexity_stderr,none"] > 0 and found["acc,none"] < 1
    few = laptop.raypp(*words, "--limit", "3", "--on-cluster", environment=cache).json()
    assert few == laptop.raypp(*words, "--limit", "3", environment=cache).json() != there.json()
    nothing_is_left(laptop)


def slow(laptop: Laptop, model: str) -> subprocess.Popen[str]:
    """Starts a generation that takes long, and returns it once tokens arrive."""
    (laptop.directory / "many.jsonl").write_text("\n".join(json.dumps({"prompt": "In the "}) for _ in range(4000)))
    words = ("generate", model, "--prompts", "many.jsonl", "--batch-size", "1", "--on-cluster", "--mesh", "pp=2")
    process = laptop.popen(*words, "--json", "--temperature", "1")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["prompt"] == "In the ", "texts are printed as they come"
    return process


@pytest.mark.gate
def test_a_killed_rank_is_named(laptop: Laptop, model: str) -> None:
    process = slow(laptop, model)
    [(_, rank)] = [one for one in laptop.workers("generate-").items() if one[0].endswith("pp1")]
    rank.send_signal(signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1, err
    assert "the process of rank 1 on " in err and f"(pid {rank.pid}) ended" in err and "Traceback" not in err, err
    nothing_is_left(laptop)


def test_ctrl_c_ends_the_job(laptop: Laptop, model: str) -> None:
    process = slow(laptop, model)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "interrupted" in err, err
    nothing_is_left(laptop)


@pytest.mark.parametrize(
    ("words", "code", "reported"),
    [
        (("generate", NAME, "--chat"), 2, "--chat: a conversation runs on this machine only"),
        (("generate", NAME, "--prompt", "x", "--mesh", "pp=4", "--address", "127.0.0.1:1"), 3, "no Ray cluster"),
        (("eval", NAME, "--tasks", "nowhere.yaml"), 2, "nowhere.yaml on node "),
        (("eval", NAME, "--tasks", "hellaswg"), 2, "no task 'hellaswg'\n  fix: did you mean hellaswag"),
        (("eval", NAME, "--set", "resources.cpus_per_rank=64"), 4, "1 ranks need 1 places of 64 CPU"),
        (("eval", NAME, "--set", "data.path=nowhere.txt", "--set", "data.eval=null"), 2, "nowhere.txt"),
    ],
)
def test_what_is_wrong_is_named(
    laptop: Laptop, held_out: str, words: tuple[str, ...], code: int, reported: str
) -> None:
    answer: Answer = laptop.raypp(*words, "--on-cluster")
    assert answer.code == code and reported in answer.err and not answer.out, answer
    nothing_is_left(laptop)


def test_an_error_of_a_rank_is_reported_as_here(laptop: Laptop, model: str) -> None:
    folder = laptop.directory / "torn"
    document = laptop.raypp("checkpoints", "export", model, str(folder), "--json")
    assert document.code == 0, document
    [weights] = folder.glob("*.safetensors")
    os.truncate(weights, weights.stat().st_size - 1000)
    words = ("generate", str(folder), "--prompt", "x", "--max-new-tokens", "2")
    here, there = laptop.raypp(*words), laptop.raypp(*words, "--on-cluster", "--mesh", "pp=2")
    assert here.code == there.code != 0, (here, there)
    assert there.err == here.err and weights.name in here.err, (here, there)
    nothing_is_left(laptop)
