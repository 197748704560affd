"""The targets of `make fuzz` accept their samples, and the runner finds and keeps what fails."""

import json
import threading

import pytest

from raypp.errors import CheckpointError
from tests.fuzz import Target, all_targets, runner

TARGETS = all_targets()
_MUTATIONS = 10


@pytest.fixture
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make fuzz` looks for inputs that take seconds; a busy machine makes others take as long."""
    monkeypatch.setattr(runner, "CPU_S", 120.0)
    monkeypatch.setattr(runner, "WALL_S", 240.0)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_target_accepts_its_samples_and_survives_mutations(target: Target, no_hurry: None) -> None:
    for number in range(len(target.samples) + _MUTATIONS):
        one = runner.execute(target, runner.input_of(target, 1, number))
        assert one.failure is None, one.failure
        assert number >= len(target.samples) or one.refused is None, f"a sample is refused: {one.refused}"


def _fails(data: bytes) -> None:
    if json.loads(data)["a"] == -1:
        raise KeyError("a")


def _computes(data: bytes) -> None:
    try:
        while True:
            pass
    except Exception:  # noqa: BLE001  even this may not hide it
        pass


def _refuses(data: bytes) -> None:
    raise CheckpointError("this is no document")


def test_what_fails_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for run, said, cpu_s, wall_s in (
        (_fails, "KeyError: 'a'", 20.0, 60.0),
        (_computes, "0.1 s of CPU", 0.1, 60.0),
        (lambda _: threading.Event().wait(60), "0.2 s in all", 20.0, 0.2),
    ):
        monkeypatch.setattr(runner, "CPU_S", cpu_s)
        monkeypatch.setattr(runner, "WALL_S", wall_s)
        one = runner.execute(Target("x.y", run, [b"{}"], ()), b'{"a": -1}')
        assert one.failure is not None and said in one.failure
    refused = runner.execute(Target("x.y", _refuses, [b"{}"], ()), b"{}")
    assert (refused.failure, refused.refused) == (None, "this is no document")


def test_too_much_memory_is_found(no_hurry: None) -> None:
    one = runner.execute(Target("x.y", lambda _: len(b"x" * (250 << 20)), [b"{}"], ()), b"{}")
    assert one.failure is not None and "MB, more than 200 MB" in one.failure
