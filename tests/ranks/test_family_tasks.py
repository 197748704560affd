"""Tasks and texts have the figures of the harness and transformers, for each kind of tokenizer."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from family_tokenizers import write_family
from lazily import Lazily
from local_tasks import TASKS, continued, drawn_rows, loss_of_texts, phrase, write_tasks
from their_models import keys_of, their_config, their_instance
from training import thinned

pytestmark = pytest.mark.timeout(600)
transformers: Any = Lazily("transformers")
ROOT = Path(__file__).parents[2]
KINDS = {
    "llama2-metaspace": "llama", "llama2": "llama", "gemma": "gemma2", "qwen": "qwen2", "llama3": "llama",
    "mistral": "mistral", "mistral-im-end": "mistral", "phi3": "phi3", "deepseek": "llama", "smollm": "llama",
    "olmo": "olmo2", "starcoder2": "starcoder2", "stablelm": "stablelm", "gpt-oss": "gpt_oss",
}  # fmt: skip
"""The model family of each kind of tokenizer."""
PROGRAM = """
import functools, json, sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from raypp.tools.inference import harness
from raypp.tools.inference.eval_job import data_job, task_job
from raypp.tools.inference.on_seat import answer
from raypp.tools.inference.prompts import end_ids
from raypp.tools.inference.source import find_source
from raypp.job.load import job_document
folder, names = sys.argv[1], sys.argv[2].split(",")
harness.TaskManager = functools.partial(TaskManager, include_defaults=False)  # thousands of files
source = find_source(folder)
asked = {"tasks": names, "limit": None, "ends": end_ids(source, source.open_tokenizer()), "folder": "."}
ours = answer({"source": vars(source), "job": job_document(task_job(source, 1)), **asked}, print)["tasks"]
loss = answer({"source": vars(source), "job": job_document(data_job(source, "held.txt", 1))}, print)
model, tasks = f"pretrained={folder},dtype=float32", TaskManager(include_defaults=False)
theirs = simple_evaluate(
    "hf", model, names, batch_size=1, device="cpu", log_samples=False, task_manager=tasks, bootstrap_iters=0
)
print(json.dumps([ours, theirs["results"], loss]))
"""


@pytest.mark.parametrize("name", thinned(KINDS, [], ["gemma"]))
def test_figures_are_those_of_the_harness_own_model(name: str, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    kind, folder = KINDS[name], tmp_path / "model"
    sizes: dict[str, Any] = {"vocab_size": 800, "max_position_embeddings": 128, "num_hidden_layers": 2}
    if kind == "gpt_oss":  # its own default is a context of 32 · 4096 tokens
        yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4, "rope_theta": 150000.0}
        sizes["rope_parameters"] = yarn | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    model = their_instance(kind, their_config(kind, {**keys_of(kind, "plain"), **sizes}))
    write_family(name, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.update(repetition_penalty=1.5, no_repeat_ngram_size=2)
    model.save_pretrained(folder)
    draw = random.Random(5)
    words = (ROOT / "jobs/data/kjv-new-testament.txt").read_text().split()[:4000]
    rows = drawn_rows(draw, words, 10, 20)
    rows[0]["question"] = " ".join(words[:200])  # longer than the model's context
    rows[1]["question"] = "" if tokenizer("")["input_ids"] else "In"
    rows[2]["question"] = f"{tokenizer.bos_token or tokenizer.eos_token}{phrase(draw, words, 9)}"
    for row in rows:
        guessed = continued(model, tokenizer, row["question"], 128) if row["question"] and draw.random() < 0.6 else ""
        row["continuation"] = guessed or phrase(draw, words, 3)
    texts = [phrase(draw, words, 40) for _ in range(6)]
    (tmp_path / "held.txt").write_text("\n\n".join(texts))
    names = write_tasks(tmp_path, rows, f"{tmp_path}/rows.jsonl")
    command = [sys.executable, "-c", PROGRAM, str(folder), names]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path), "RAYPP_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ours, theirs, found = json.loads(done.stdout.splitlines()[-1])
    assert ours.keys() == theirs.keys() == TASKS.keys()
    for task, metrics in ours.items():
        # Without bootstrapping the harness has no errors of perplexities.
        same = {metric: value for metric, value in theirs[task].items() if metric in metrics and value != "N/A"}
        assert same
        assert {metric: metrics[metric] for metric in same} == pytest.approx(same, rel=1e-4), task
    loss, tokens = loss_of_texts(model, tokenizer, texts)
    assert found["tokens"] == tokens and found["loss"] == pytest.approx(loss, rel=1e-5)
