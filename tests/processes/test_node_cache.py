"""Several processes fill a node's cache at once."""

import multiprocessing
from pathlib import Path

from raypp.storage.node_cache import made_once


def test_of_many_processes_one_makes_an_entry_and_all_see_it_whole(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(8)
    processes = [context.Process(target=_make_one, args=(tmp_path, barrier, number)) for number in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 8
    assert len(list(tmp_path.glob("made-by-*"))) == 1
    assert sorted(entry.name for entry in (tmp_path / "cache").iterdir()) == ["entry", "entry.lock"]


def _make_one(tmp_path: Path, barrier: object, number: int) -> None:
    def make(room: Path) -> None:
        (tmp_path / f"made-by-{number}").touch()
        for part in range(20):
            (room / str(part)).write_text("x")

    barrier.wait()  # type: ignore[attr-defined]
    entry = made_once(tmp_path / "cache" / "entry", make)
    assert len(list(entry.iterdir())) == 20
