"""Follows the recipes of CONTRIBUTING.md exactly, with example kinds in a copy of the project."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]

SCHEDULE = '''"""Two forwards, two backwards, and so on."""

from raypp.kinds import ScheduleKind
from raypp.planning.schedules.action import Action, Program

KIND = ScheduleKind("pairs", "two forwards, two backwards, in turn", stages_per_rank=(1, 1), source="made up")


def build(pp: int, stages_per_rank: int, microbatches: int, lookahead: int = 0) -> Program:
    """The program of every rank; one stage each."""
    return {
        rank: [
            Action(rank, kind, index)
            for first in range(0, microbatches, 2)
            for kind in ("F", "B")
            for index in range(first, min(first + 2, microbatches))
        ]
        for rank in range(pp)
    }
'''

SOURCE = '''"""A document is a line of plain text."""

from raypp.rank.data.corpus import Corpus
from raypp.rank.data.source_files import find_files
from raypp.rank.data.tokenised import Request, Text, tokenise
from raypp.kinds import SourceKind

KIND = SourceKind("lines", "a line of text is a document", endings=(".lines",))


def read(request: Request) -> Corpus:
    """All lines of all files, in order of file name; blank ones are passed over."""
    files = find_files(request.path, KIND.endings, request.place)

    def documents():
        for file in files:
            for number, line in file.lines():
                if line.strip():
                    yield Text(f"{file.name}:{number}", line)

    return tokenise(request, files, documents)
'''

STORE = '''"""A shelf: a directory under another name."""

from pathlib import Path

from raypp.kinds import StoreKind
from raypp.storage.directory import DirectoryStore

KIND = StoreKind("shelf", "a directory, called a shelf", form="shelf:///directory", local=True)


def open_url(url, *, missing_bucket="error", patience=None):
    return Shelf(Path(url.partition("://")[2]))


class Shelf(DirectoryStore):
    @property
    def url(self):
        return f"shelf://{self.root}"
'''

OPTIMIZER = '''"""Descent along the signs of the gradient."""

import torch

from raypp.kinds import OptimizerKind
from raypp.stages.parallel.shard import local_part
from raypp.rank.optimizers.optimizer import decay_groups

KIND = OptimizerKind("signs", "descent along the signs of the gradient", states=0)


def build(named, options, precision):
    return Signs(decay_groups(named, options), {"lr": options.lr})


class Signs(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    local_part(parameter).sub_(local_part(parameter.grad).sign(), alpha=group["lr"])
'''

FILES = {
    "raypp/planning/schedules/pairs.py": SCHEDULE,
    "raypp/rank/data/lines.py": SOURCE,
    "raypp/storage/shelf.py": STORE,
    "raypp/rank/optimizers/signs.py": OPTIMIZER,
    "tests/unit/data/samples/lines.lines": "one line\nanother line\n\na third line\n",
}
"""The files that the recipes ask for: one per kind, and the sample that a data source's contract
test reads."""


def tree_with(place: Path, files: Mapping[str, str] = FILES) -> Path:
    """Creates a copy of the project with more files: by default, the example kinds."""
    for folder in ("raypp", "tests", "jobs"):
        shutil.copytree(ROOT / folder, place / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", place)
    for name, text in files.items():
        assert not (place / name).exists()
        (place / name).write_text(text, encoding="utf-8")
    return place


def python_in(place: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHONPATH": str(place), "COLUMNS": "120", "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(
        [sys.executable, *arguments], cwd=place, env=variables, capture_output=True, text=True, timeout=300
    )


def job_text(place: Path, *, schedule: str = "pairs", data: str = "lines", optimizer: str = "signs") -> str:
    """Returns a job of two ranks that uses all example kinds."""
    (place / "words.lines").write_text("".join(f"line {number} of some\n" for number in range(200)), encoding="utf-8")
    return f"""
name: recipes
model: {{num_layers: 4, hidden_size: 32, num_heads: 2, num_kv_heads: 1, ffn_size: 48, vocab_size: 320}}
data: {{kind: "{data}", path: {place}/words.lines, seq_len: 32}}
mesh: {{pp: 2}}
pipeline: {{schedule: "{schedule}", microbatches: 4, lookahead: 0}}
train: {{steps: 3, micro_batch_size: 2, optimizer: {{kind: "{optimizer}", lr: 0.001}}}}
checkpoint: {{url: "shelf://{place}/shelf", every_steps: 0, memory_tier: false}}
resources: {{device: cpu}}
"""
