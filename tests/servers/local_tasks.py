"""Tasks of lm-evaluation-harness whose data are files: one for each kind of request."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F

TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "texts": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{continuation}}",
        "generation_kwargs": {"until": ["e", "\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    # The harness computes the error of this perplexity in processes of its own.
    "next": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{question}}",
        "doc_to_target": " {{continuation}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
}


def write_tasks(folder: Path, rows: Sequence[dict[str, Any]], data: str) -> str:
    """Writes the tasks, and rows of `question`, `choices`, `answer` and `continuation`, into a
    folder. The tasks name `data` as the path of the rows. Returns what `raypp eval --tasks` takes
    there."""
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": data}}}
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, "test_split": "test", **files, **task}))
    return ",".join(f"{name}.yaml" for name in TASKS)


def phrase(draw: Random, words: Sequence[str], most: int) -> str:
    start = draw.randrange(len(words) - most)
    return " ".join(words[start : start + draw.randrange(1, most)])


def drawn_rows(draw: Random, words: Sequence[str], count: int, most: int) -> list[dict[str, Any]]:
    """Returns rows without a continuation, whose questions have fewer than `most` words."""
    return [
        {
            "question": phrase(draw, words, most),
            "choices": [f" {phrase(draw, words, 4)}" for _ in range(4)],
            "answer": draw.randrange(4),
        }
        for _ in range(count)
    ]


def continued(model: Any, tokenizer: Any, text: str, context: int) -> str:
    """Returns 12 tokens of greedy continuation by transformers, up to an `e` or a line's end."""
    ids = torch.tensor([tokenizer(text)["input_ids"][12 - context :]])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    return re.split("e|\n", tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True))[0]


def loss_of_texts(model: Any, tokenizer: Any, texts: Sequence[str]) -> tuple[float, int]:
    """Returns transformers' mean loss of texts, each with its end, and the number of tokens."""
    total, tokens = 0.0, 0
    for text in texts:
        ids = torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1]
        total += float(F.cross_entropy(logits.double(), ids[1:], reduction="sum"))
        tokens += len(ids) - 1
    return total / tokens, tokens
