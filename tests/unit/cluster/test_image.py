"""The Dockerfile without an engine: its sources exist. tests/hosts builds it."""

import re
from pathlib import Path

_ROOT = Path(__file__).parents[3]
_FILE = _ROOT / "cluster" / "Dockerfile"


def _instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n\s*", " ", _FILE.read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


def test_what_the_image_copies_is_there_and_reaches_the_build() -> None:
    allowed = {line[1:] for line in _FILE.with_suffix(".dockerignore").read_text().splitlines() if line.startswith("!")}
    for name, arguments in _instructions():
        if name == "COPY":
            for source in arguments.split()[:-1]:
                assert (_ROOT / source).exists()
                assert source in allowed


def test_the_image_has_a_python_that_raypp_takes_and_no_root() -> None:
    found = dict(_instructions())
    version = re.match(r"python:3\.(\d+)", found["FROM"])
    assert version and int(version[1]) >= 11
    assert found["USER"] == "ray"
