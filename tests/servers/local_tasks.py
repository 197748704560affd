"""Tasks of lm-evaluation-harness whose data are files: one for each kind of request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
