"""The machine in the store: the newest counts, one process writes it, and damage is named."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from raypp.control.machine import Machine
from raypp.control.machine_log import MachineError, MachineLog
from raypp.storage import StoreError
from raypp.storage.directory import DirectoryStore
from raypp.storage.store import Data

FIRST = Machine(attempt=1, device="cpu")


def _log(store: DirectoryStore, writer: str, number: int = 1) -> tuple[MachineLog, Machine | None]:
    log = MachineLog(store, "r", writer)
    return log, log.open(number)


def _write(log: MachineLog, machine: Machine) -> None:
    log.put(machine)
    log.write()


def test_the_newest_machine_of_the_submission_counts_and_old_ones_go(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    log, _ = _log(store, "a")
    for attempt in range(1, 21):
        _write(log, replace(FIRST, attempt=attempt))
        log.write()  # nothing is new
    assert _log(store, "b")[1] == replace(FIRST, attempt=20)
    assert _log(store, "b", number=2)[1] is None, "another submission begins anew"
    keys = sorted(info.key for info in store.list("r/machine/"))
    assert keys == [f"r/machine/1-{version:06d}.json" for version in range(13, 21)]


def test_a_process_that_was_taken_for_dead_notices_that_another_one_leads(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    old, _ = _log(store, "old")
    _write(old, FIRST)
    new, left = _log(store, "new")
    assert left == FIRST
    _write(new, replace(FIRST, restarts=1))
    _write(old, replace(FIRST, restarts=9))
    assert (old.overtaken, new.overtaken) == (True, False)
    assert _log(store, "next")[1] == replace(FIRST, restarts=1)


class _LostAnswers(DirectoryStore):
    """Stores, and says that it failed."""

    def put(self, key: str, data: Data, *, if_absent: bool = False) -> None:
        super().put(key, data, if_absent=if_absent)
        raise StoreError("no answer")


def test_a_write_whose_answer_was_lost_is_this_process_own(tmp_path: Path) -> None:
    log, _ = _log(_LostAnswers(tmp_path), "a")
    for restarts in (0, 1):
        with pytest.raises(StoreError):
            _write(log, replace(FIRST, restarts=restarts))
    log._store = DirectoryStore(tmp_path)
    log.write()
    assert not log.overtaken and _log(log._store, "b")[1] == replace(FIRST, restarts=1)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[:40], "is not what a controller had decided: is not JSON"),
        (lambda text: text.replace('"attempt": 1', '"attempt": "one"'), 'machine.attempt is "one"'),
        (lambda text: text.replace('"device"', '"colour"'), "machine.colour is not a known key"),
        (lambda text: json.dumps({**json.loads(text), "version": 0, "more": 3}), "is of version 0; this raypp"),
    ],
)
def test_a_machine_that_cannot_be_read_is_named_with_what_to_do(tmp_path: Path, damage, words: str) -> None:
    store = DirectoryStore(tmp_path)
    _write(_log(store, "a")[0], FIRST)
    path = tmp_path / "r" / "machine" / "1-000001.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(MachineError) as refused:
        _log(store, "b")
    (problem,) = refused.value.problems
    assert problem.key.endswith("r/machine/1-000001.json") and words in problem.fault
    assert "raypp submit JOB --resume" in problem.fix
