"""The example jobs, and what their headers tell a user to type."""

import re
import shlex

from raypp.cli.job_commands import TEMPLATES, template_names

NAMES = template_names()


def header(name: str) -> str:
    """Returns the comment at the top of a job, without the marks."""
    lines = (TEMPLATES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    top = lines[: next(at for at, line in enumerate(lines) if not line.startswith("#"))]
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in top)


def commands(name: str) -> list[list[str]]:
    """Returns the words of every `raypp` command that stands on lines of its own."""
    joined = header(name).replace("\\\n", " ")
    found = re.findall(r"^ +(?:PYTHONPATH=\. )?raypp (.*)$", joined, re.M)
    return [shlex.split(words, comments=True) for words in found]


def settings(words: list[str]) -> list[str]:
    return [words[at + 1] for at, word in enumerate(words) if word == "--set"]


def small(name: str) -> list[str]:
    """Returns the settings that make the job's twin for any machine."""
    (words,) = [words for words in commands(name) if words[0] == "submit" and "name=" in " ".join(words)]
    return settings(words)
