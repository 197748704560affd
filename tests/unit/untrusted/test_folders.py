from __future__ import annotations

import glob
import os
import random
from pathlib import Path

import pytest

from raypp.untrusted.files import files_below, matches

_NAMES = ("a", "b", ".h", "x.txt", "y.txt", "c d", "[q]")
_PATTERNS = (
    "*", "**", "**/*", "**/*.txt", "a/**", "a/*/x.txt", "*/*/*", "**/b/**/*.txt", ".*", "**/.h/*", "a/b", "none",
    "a/../*", "[[]q]/*", "./*", "a//b/*", "*/", "**/", "?.txt", "[xy].txt",
)  # fmt: skip


def _make(folder: Path, levels: int, drawn: random.Random) -> None:
    for name in _NAMES:
        path = folder / name
        if drawn.random() < 0.6 and not path.exists():
            if levels and not name.endswith("txt") and drawn.random() < 0.7:
                path.mkdir()
                _make(path, levels - 1, drawn)
            else:
                path.touch()


@pytest.mark.parametrize("seed", range(3))
def test_a_search_finds_what_glob_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    (tmp_path / "a").mkdir()
    _make(tmp_path, 3, random.Random(seed))
    monkeypatch.chdir(tmp_path)
    for pattern in _PATTERNS:
        for prefix in ("", f"{tmp_path}/"):
            theirs = {os.path.normpath(path) for path in glob.glob(prefix + pattern, recursive=True)}  # noqa: PTH207
            ours = {os.path.normpath(path) for path in matches(prefix + pattern)}
            assert ours == theirs, prefix + pattern
    theirs = {str(path) for path in tmp_path.rglob("*") if path.is_file()}
    assert set(files_below(tmp_path)) == theirs


def test_loops_of_links_end(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").touch()
        for number in range(3):
            (tmp_path / name / f"up{number}").symlink_to(tmp_path)
    found = list(matches(f"{tmp_path}/**/*.txt"))
    assert {Path(path).resolve() for path in found} == {tmp_path / "a/x.txt", tmp_path / "b/x.txt"}
    assert len(list(files_below(tmp_path))) == 2  # links to folders are not followed
