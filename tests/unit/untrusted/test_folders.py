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
    theirs = glob.glob(f"{tmp_path}/**", recursive=True)  # noqa: PTH207
    assert set(files_below(tmp_path)) == {path for path in theirs if Path(path).is_file()}


def test_loops_of_links_end(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").touch()
        for number in range(3):
            (tmp_path / name / f"up{number}").symlink_to(tmp_path)
    found = list(matches(f"{tmp_path}/**/*.txt"))
    assert {Path(path).resolve() for path in found} == {tmp_path / "a/x.txt", tmp_path / "b/x.txt"}
    assert len(list(files_below(tmp_path))) == 2


def test_a_linked_folder_is_read_like_a_pattern_does_and_what_is_there_anyway_only_once(tmp_path: Path) -> None:
    for name in ("data/a.txt", "data/part-1/b.txt", "data/.hidden/c.txt", "disk/d.txt", "disk/.e.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for link, target in (
        ("latest", "part-1"),
        ("more", "../disk"),
        ("again", "../disk"),
        ("own", ".hidden"),
        ("up", ".."),
    ):
        (tmp_path / "data" / link).symlink_to(target)
    found = sorted(files_below(tmp_path / "data"))
    assert found == sorted(path for path in matches(f"{tmp_path}/data/**") if Path(path).is_file())
    names = [os.path.relpath(path, tmp_path / "data") for path in found]
    assert names == ["a.txt", "again/d.txt", "own/c.txt", "part-1/b.txt"]
