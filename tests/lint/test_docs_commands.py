"""What the pages tell a reader to type, and what they say comes of it.

- A `yaml` block is a job, or sections that a job may have: it must pass what `raypp plan` checks.
- A `console` block is a session: each command after `$` is run, and what follows it must come out,
  in this order. A line with `…` alone stands for lines left out.
- Every other `raypp` command, in blocks and in text, must be one there is, with options there are.
  The job and the `--set`s of `submit`, `plan` and `parity` must pass what `raypp plan` checks.
"""

import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from markdown_pages import REPOSITORY, Block, blocks, guides, lines

from raypp.cli.main import COMMANDS, cli, run
from raypp.job.job import Job
from raypp.registry import load_object

WITHOUT_A_CLUSTER = ("plan", "init", "explain", "schema", "list-kinds", "data")
HOME = "/home/you"
"""What a page shows instead of the folder that a command was run in."""
BASE = """
name: base
model: {kind: llama, num_layers: 8, hidden_size: 256, num_heads: 4, ffn_size: 688, vocab_size: 4096}
data: {kind: text, path: my.txt, tokenizer: bytes, seq_len: 256}
checkpoint: {url: runs}
"""
"""What a block with some sections only is laid over."""

PAGES = [page for page in guides() if page.parts[0] in ("docs", "README.md", "CONTRIBUTING.md")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Makes and enters a reader's directory: the repository's jobs, one of their own, a text."""
    number = count()

    def enter() -> Path:
        place = tmp_path / str(next(number))
        place.mkdir()
        (place / "jobs").symlink_to(REPOSITORY / "jobs")
        (place / "docs").symlink_to(REPOSITORY / "docs")
        shutil.copy(REPOSITORY / "jobs/quickstart.yaml", place / "job.yaml")
        shutil.copytree(REPOSITORY / "jobs/data", place / "data")
        (place / "my.txt").write_text("In the beginning was the Word.\n\nAnd the Word was with God.\n" * 8)
        monkeypatch.chdir(place)
        return place

    monkeypatch.setenv("COLUMNS", "100")
    return enter


def of_kind(*languages: str) -> list[tuple[str, Block]]:
    """Returns the blocks of all pages in these languages, each with its place."""
    found = ((page, block) for page in PAGES for block in blocks(page) if block.language in languages)
    return [(f"{page}:{block.number}", block) for page, block in found]


def test_a_job_of_a_page_passes_the_checks(folder: Callable[[], Path], capsys: pytest.CaptureFixture[str]) -> None:
    wrong, job = [], folder() / "block.yaml"
    for where, block in of_kind("yaml"):
        reported = yaml.safe_load(block.text)
        if not isinstance(reported, dict) or not set(reported) <= set(Job.model_fields):
            wrong.append(f"{where} is no part of a job")
            continue
        whole = {"name", "model"} <= set(reported)
        job.write_text(block.text if whole else yaml.safe_dump(_over(yaml.safe_load(BASE), reported)))
        code, said = run(["plan", str(job), "--json"]), capsys.readouterr().err
        if code:
            wrong.append(f"{where} {said}")
    assert not wrong, "\n".join(wrong)


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Returns `below` with the keys of `above`; another kind of model or data replaces all."""
    merged = dict(below)
    for key, value in above.items():
        kept = isinstance(value, dict) and isinstance(below.get(key), dict) and not {"kind", "from_hf"} & set(value)
        merged[key] = {**below[key], **value} if kept else value
    return merged


def test_a_session_of_a_page_comes_out_as_it_stands_there(
    folder: Callable[[], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = []
    for where, block in of_kind("console"):
        place = folder()
        for session in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
            command, _, shown = session.partition("\n")
            arguments = shlex.split(command, comments=True)
            assert arguments[0] == "raypp" and arguments[1] in WITHOUT_A_CLUSTER, f"{where} {command}: cannot run here"
            run(arguments[1:])
            reported = capsys.readouterr()
            text = (reported.out + reported.err).replace(str(REPOSITORY), HOME).replace(str(place), HOME)
            if missing := _not_in_order(shown, text):
                wrong.append(f"{where} {command}\nnot there, or not in this order: {missing}\nwhat came out:\n{text}")
    assert not wrong, "\n".join(wrong)


def _not_in_order(shown: str, reported: str) -> str | None:
    """Returns the first line that should have come out, after those before it, and did not."""
    ahead = [" ".join(line.split()) for line in reported.splitlines()]
    for line in shown.splitlines():
        words = " ".join(line.split())
        if words in ("", "…"):
            continue
        if words not in ahead:
            return line
        ahead = ahead[ahead.index(words) + 1 :]
    return None


def commands(page: Path, sessions: bool = True) -> Iterator[tuple[int, list[str]]]:
    """Yields the `raypp` commands of a page: lines of blocks, and what is in backquotes."""
    for line in lines(page):
        if line.fence == "console" and not sessions:
            continue
        if line.fence is None:
            found = re.findall(r"`(raypp [^`]*)`", line.text)
        elif line.fence in ("", "sh", "text", "console"):
            found = re.findall(r"^(?:[#$] )?(raypp [^;>]*)", line.text)
        else:
            found = []
        for text in found:
            try:
                yield line.number, shlex.split(text, comments=True)
            except ValueError:
                yield line.number, text.split()


def _options(name: str, words: list[str]) -> tuple[set[str], list[str]]:
    """Returns the options of the command that the words begin with, and the commands below it."""
    command: click.Command = load_object(COMMANDS[name][0])
    if isinstance(command, click.Group):
        below = list(command.commands)
        if words and words[0] in below:
            return {one for param in command.commands[words[0]].params for one in param.opts}, []
        return {one for sub in command.commands.values() for param in sub.params for one in param.opts}, below
    return {one for param in command.params for one in param.opts}, []


def test_commands_and_options_that_a_page_names_are_there() -> None:
    general = {"--help", "-h", "--debug", "--version"} | {one for param in cli.params for one in param.opts}
    wrong = []
    for where, words in ((f"{page}:{number}", words) for page in PAGES for number, words in commands(page)):
        if len(words) == 1 or words[1].startswith("-") or not re.fullmatch(r"[a-z-]+", words[1]):
            continue
        if words[1] not in COMMANDS:
            wrong.append(f"{where} there is no command {words[1]}")
            continue
        options, below = _options(words[1], words[2:])
        if below and len(words) > 2 and re.fullmatch(r"[a-z]+", words[2]) and words[2] not in below:
            wrong.append(f"{where} raypp {words[1]} has no {words[2]}")
        reported = re.findall(r"(?<![\w-])(--[a-z][a-z-]*)", " ".join(words[2:]))
        wrong += [f"{where} raypp {words[1]} has no {one}" for one in reported if one not in options | general]
    assert not wrong


ELSEWHERE = re.compile("s3://bucket/|/path/to/")
"""Settings that name what only a reader has."""


def typed_jobs() -> Iterator[tuple[str, str, list[str]]]:
    """Yields the `submit` and `plan` commands of blocks that need nothing measured: where they are,
    their jobs and `--set`s."""
    for page in PAGES:
        for number, words in commands(page, sessions=False):
            if words[1:2] not in (["submit"], ["plan"], ["parity"]) or any(c in "…[|" for w in words for c in w):
                continue
            if len(words) > 2 and (words[2] == "job.yaml" or words[2].startswith("jobs/")):
                given = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
                settings = [part for one in given if not ELSEWHERE.search(one) for part in ("--set", one)]
                yield f"{page}:{number}", words[2], settings


def test_a_job_and_its_settings_that_a_page_types_pass_the_checks(
    folder: Callable[[], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder()
    wrong, done = [], set()
    for where, job, settings in typed_jobs():
        if (job, *settings) in done:
            continue
        done.add((job, *settings))
        code, said = run(["plan", job, *settings, "--json"]), capsys.readouterr().err
        if code:
            wrong.append(f"{where} {said}")
    assert not wrong, "\n".join(wrong)


MADE = re.compile(r"^([a-z0-9-]+):", re.M)


def test_targets_of_make_and_benchmarks_that_a_page_names_are_there() -> None:
    targets = set(MADE.findall((REPOSITORY / "Makefile").read_text(encoding="utf-8")))
    there = {"benchmarks", *(f"benchmarks.{path.stem}" for path in (REPOSITORY / "benchmarks").glob("*.py"))}
    wrong = []
    for page in PAGES:
        text = (REPOSITORY / page).read_text(encoding="utf-8")
        named = set(re.findall(r"(?:^|`)make ([a-z][a-z0-9-]*)", text, re.M))
        modules = set(re.findall(r"python -m (benchmarks(?:\.\w+)?)", text)) - {"benchmarks.NAME"}
        wrong += [f"{page} {name}" for name in (named - targets) | (modules - there)]
    assert not wrong
