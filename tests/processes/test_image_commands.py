"""Runs the Dockerfile's commands without docker."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_FILE = _ROOT / "cluster" / "Dockerfile"


def _instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n\s*", " ", _FILE.read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_images_commands_install_raypp_in_a_plain_directory(tmp_path: Path) -> None:
    """Uses a virtual environment, without apt and useradd. Needs a package index."""
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
    shutil.rmtree(place)  # the installed package must work without it
    for command in (["raypp", "--version"], ["raypp", "list-kinds"], ["ray", "--version"]):
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=120)
