"""Fixtures for tests that go through the command line: one embedded cluster for all of them."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says something about the machine, not about the code.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")

# Before torch is imported: threads of OpenMP that wait for each other burn more than the small tensors of a test cost.
os.environ.setdefault("OMP_NUM_THREADS", "1")

for folder in ("e2e", "servers"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

if TYPE_CHECKING:
    from laptop import Laptop, Run


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one cluster stay with one worker of pytest-xdist (`--dist loadgroup`), which has it for its session."""
    for item in items:
        for cluster in {"laptop", "cluster", "office"}.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(cluster))


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], AbstractContextManager[None]]:
    """What is done inside, one worker of pytest-xdist does at a time.

    A cluster chooses ports some seconds before it listens on them.
    """
    place = tmp_path_factory.getbasetemp().parent / "alone"

    @contextmanager
    def lock() -> Iterator[None]:
        with place.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    return lock


@pytest.fixture(scope="session")
def laptop(
    tmp_path_factory: pytest.TempPathFactory, alone: Callable[[], AbstractContextManager[None]]
) -> Iterator[Laptop]:
    """`raypp local up` with a home of its own; whatever it started must be gone when the session ends."""
    from laptop import Laptop

    from raypp.memory.files import remove_dead

    with alone():
        laptop = Laptop.up(tmp_path_factory.mktemp("laptop"), cpus=8)
    try:
        yield laptop
    finally:
        left = laptop.down()
        # `raypp local down` removes snapshots that nobody will come back for: now there can be none.
        left += [f"a snapshot in shared memory: {name}" for name in remove_dead()]
    assert not left, f"left behind by the embedded cluster or its runs: {left}"


@pytest.fixture(scope="session")
def undisturbed(laptop: Laptop) -> Run:
    """The reference: the small job, submitted and followed to its end, with nothing in its way."""
    run = laptop.start(laptop.job("undisturbed"), "--json")
    run.wait_titles()
    run.seen_alive = run.facts_while_alive()
    run.wait()
    assert run.exit_code == 0, run.told()
    return run
