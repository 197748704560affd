"""A wheel of raypp has the example jobs: `raypp init` works for somebody who only installed it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from raypp.cli.init_command import TEMPLATES

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with what the wheel installs."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    shutil.copytree(ROOT / "raypp", source / "raypp", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(place)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (wheel,) = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place / "site")
    return place / "site"


def files_below(folder: Path) -> list[str]:
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in found if "__pycache__" not in path.parts)


def test_the_wheel_has_all_files_of_the_package(installed: Path) -> None:
    assert files_below(installed / "raypp/templates") == files_below(TEMPLATES)
    assert files_below(installed / "raypp") == files_below(ROOT / "raypp")


def test_init_and_plan_work_where_only_the_wheel_is_installed(installed: Path, tmp_path: Path) -> None:
    def raypp(*words: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(installed)}
        command = [sys.executable, "-P", "-m", "raypp", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "quickstart" in raypp("init")
    raypp("init", "quickstart")
    assert '"world": 4' in raypp("plan", "quickstart.yaml", "--json")
    where = subprocess.run(
        [sys.executable, "-P", "-c", "import raypp; print(raypp.__file__)"],
        env=os.environ | {"PYTHONPATH": str(installed)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(where.stdout.strip()).is_relative_to(installed), "the repository's raypp was imported"
