"""Tests of this tier start no process: what needs one belongs into tests/processes or ranks."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system")
_watching = False


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and event in STARTS:
        raise AssertionError(f"a unit test starts a process ({event} {arguments[:1]}): move it to tests/processes")


sys.addaudithook(_refuse)  # cannot be taken back: it looks at unit tests only


@pytest.fixture(scope="module", autouse=True)
def no_wait_for_the_disk() -> Iterator[None]:
    """A file that is written survives the end of a process without `fsync`, and no test here ends
    the machine. Waiting for the disk took a fifth of the time of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: os.fstat(file) and None)
        yield


@pytest.fixture(scope="module", autouse=True)
def no_folder_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What raypp remembers of a test's runs and jobs is not for who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYPP_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@contextmanager
def _watched() -> Iterator[None]:
    global _watching
    _watching = True
    try:
        yield
    finally:
        _watching = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    with _watched():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    with _watched():
        return (yield)
