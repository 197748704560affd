"""Fixtures of several tests of commands."""

from pathlib import Path

import pytest

from raypp.storage import ObjectStore, open_store


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """An empty store in the current directory, and a home in which nothing is remembered."""
    monkeypatch.setenv("RAYPP_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RAYPP_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
