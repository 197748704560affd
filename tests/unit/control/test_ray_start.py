"""Starting Ray's head on this machine."""

import socket
import tempfile
from pathlib import Path

import pytest

from raypp.control.clusters.ray_head import short_temporary_directory


@pytest.mark.parametrize(("length", "long"), [(75, False), (76, True), (300, True)])
def test_ray_gets_a_temporary_folder_in_which_its_sockets_have_room(
    length: int, long: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as base:
        folder = Path(base)
        while (left := length - len(str(folder))) > 1:
            folder /= "t" * min(left - 1, 200)
        folder.mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        used = short_temporary_directory()
        assert used == ({"TMPDIR": "/tmp"} if long else {})
        inside = Path(used.get("TMPDIR", str(folder)))
        with tempfile.TemporaryDirectory(prefix="pymp-", dir=inside) as own, socket.socket(socket.AF_UNIX) as one:
            one.bind(f"{own}/listener-12345678")
