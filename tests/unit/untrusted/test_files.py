import os
import socket
from pathlib import Path

import pytest

from raypp.errors import DataError
from raypp.untrusted.files import read_file


def test_a_regular_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    (tmp_path / "link").symlink_to(path)
    assert read_file(path, 5) == read_file(tmp_path / "link", 5) == b"12345"
    with pytest.raises(DataError, match="has more than 4 bytes"):
        read_file(path, 4)


def test_anything_else_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        said = {
            "fifo": "is a FIFO",
            "loop": "cannot be opened: Too many levels of symbolic links",
            "folder": "is a directory",
            "socket": "cannot be opened",
            "/dev/zero": "is a device",
            "none": "does not exist",
            "nul\x00": "cannot be opened",
            "a" * 300: "cannot be opened: File name too long",
        }
        for name, expected in said.items():
            with pytest.raises(DataError) as caught:
                read_file(tmp_path / name, 100, place="data.path")
            assert expected in str(caught.value) and str(caught.value).startswith("data.path: ")
