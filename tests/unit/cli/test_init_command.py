"""`raypp init` writes jobs that can be used where they are written, and overwrites nothing."""

import errno
import os
from io import FileIO
from pathlib import Path

import pytest
from gallery import NAMES

from raypp.api.checked_job import load_checked_job
from raypp.cli import job_commands
from raypp.cli.job_commands import TEMPLATES, files_of
from raypp.cli.main import run


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def here(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_file_that_the_disk_has_no_room_for_does_not_stay(tmp_path: Path) -> None:
    path = tmp_path / "quickstart.yaml"

    class OnFullDisk(FileIO):
        def write(self, content: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with OnFullDisk(path, "x") as file, pytest.raises(OSError, match="No space left"):
        job_commands._fill(file, b"name: a")
    assert not path.exists()


@pytest.mark.parametrize("name", NAMES)
def test_what_it_writes_is_all_that_the_job_needs(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["init", name]) == 0
    printed = capsys.readouterr().out
    written = here(tmp_path)
    assert sorted(written) == sorted(files_of(name)) and f"{name}.yaml" in written
    assert all(f"wrote {path}\n" in printed for path in written)
    assert all(content == (TEMPLATES / path).read_bytes() for path, content in written.items())
    job = load_checked_job(f"{name}.yaml").job
    sources = [job.data.part(index) for index in range(len(job.data.parts))] if job.data.parts else [job.data]
    paths = [Path(data.path) for data in sources if data.path is not None]
    assert paths and all(path.is_relative_to(tmp_path) for path in paths)
    assert job.model.from_hf is None or Path(job.model.from_hf).is_relative_to(tmp_path)


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "chat.yaml").write_text("mine")
    assert run(["init", "chat"]) == 2
    assert "chat.yaml is already here\n  fix: move it away" in capsys.readouterr().err
    assert here(tmp_path) == {"chat.yaml": b"mine"}


def test_another_file_gets_the_job_and_its_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init", "quickstart", "--out", "mine/first.yaml"]) == 0
    assert "wrote mine/first.yaml\n" in capsys.readouterr().out
    assert {*here(tmp_path)} == {
        f"mine/{'first.yaml' if p == 'quickstart.yaml' else p}" for p in files_of("quickstart")
    }
    assert run(["init", "lora", "--out", "mine/first.yaml"]) == 2
    assert "mine/first.yaml is already here" in capsys.readouterr().err
    assert (tmp_path / "mine/first.yaml").read_bytes() == (TEMPLATES / "quickstart.yaml").read_bytes()
