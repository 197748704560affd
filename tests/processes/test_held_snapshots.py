"""Tests snapshots in shared memory that live and dead processes hold."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from raypp.own_process import OwnProcess
from raypp.state.checkpoint.snapshot import SnapshotBuffer
from raypp.state.checkpoint.state import slice_of
from raypp.state.memory.files import SlotName, keeper, open_locked, peek, remove_dead, remove_run
from raypp.state.memory.slot import Slot

NAME = SlotName("a-run", "0123456789ab", 3, 1, "own", 0)


def sealed(directory: Path) -> Slot:
    slot = Slot.create(directory, NAME)
    about = {"run": NAME.run, "attempt": NAME.attempt, "rank": NAME.rank, "keeper": keeper()}
    slot.begin(NAME, about)
    snapshot = SnapshotBuffer(slot.memory).take([slice_of("w", torch.ones(250))])
    slot.seal(snapshot, 7, "{}")
    return slot


def test_what_a_living_process_holds_is_neither_read_nor_removed(tmp_path: Path) -> None:
    slot = sealed(tmp_path)
    path = slot.path
    slot.close()
    code = "import sys,time; from pathlib import Path; from raypp.state.memory.files import open_locked\n"
    code += "print(open_locked(Path(sys.argv[1])) is not None, flush=True); time.sleep(60)"
    zombie = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert zombie.stdout is not None and zombie.stdout.readline() == "True\n"
        assert peek(path) is None and open_locked(path) is None
        assert remove_run(NAME.life, tmp_path) == [] and remove_dead(tmp_path) == []
    finally:
        zombie.kill()
        zombie.wait()
    assert peek(path) is not None
    assert remove_run("ba9876543210", tmp_path) == []
    assert remove_run(NAME.life, tmp_path) == [path.name]


def test_leftovers_go_when_the_process_that_would_start_a_successor_is_gone(tmp_path: Path) -> None:
    here = sealed(tmp_path)
    here.close()
    dead = Slot.create(tmp_path, SlotName("dead-run", "0123456789ab", 1, 0, "own", 0))
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    keeper_of_dead = OwnProcess.of(child.pid)
    dead.begin(dead.name, {"keeper": [keeper_of_dead.pid, keeper_of_dead.started]})
    dead.close()
    assert remove_dead(tmp_path) == []
    child.kill()
    child.wait()
    assert remove_dead(tmp_path) == [dead.path.name]
    os.utime(here.path, (0, 0))  # nothing has happened for more than an hour
    assert remove_dead(tmp_path) == [here.path.name]
