"""The Dockerfile without docker: its sources exist, and its commands install raypp."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_images_commands_install_raypp_in_a_plain_directory(tmp_path: Path) -> None:
    """Installs into a separate environment, without apt and useradd. Needs a package index."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "python")], check=True)
    place = tmp_path / "image"
    place.mkdir()
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment = outside | {"PATH": f"{tmp_path / 'python' / 'bin'}:{os.environ['PATH']}", "TORCH_INDEX": ""}
    for name, arguments in _instructions():
        *sources, target = arguments.split()
        if name == "COPY":
            for source in sources:
                if (_ROOT / source).is_dir():
                    shutil.copytree(_ROOT / source, place / target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(_ROOT / source, place / target)
        elif name == "RUN" and arguments.startswith("pip"):
            subprocess.run(arguments, shell=True, cwd=place, env=environment, check=True)
    shutil.rmtree(place)  # the installation must not depend on it
    for command in (["raypp", "--version"], ["raypp", "list-kinds"], ["ray", "--version"]):
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=120)
