"""Fixtures: one embedded cluster for all tests that use the command line, and shared memory."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

# The duration of an example depends on the machine, not on the code.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")

# Set before torch is imported: OpenMP threads that wait for each other cost more than the small
# tensors of a test.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that runs tests in the background ignores SIGINT, and so would the commands they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Imports and collection leave many objects and next to no garbage. To look through them again and
# again took 1.6 of the 11 s of a collection.
gc.disable()

for folder in ("e2e", "servers"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

if TYPE_CHECKING:
    from laptop import Laptop, Run


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        # Of pytest-xdist, which waits for the process. To free torch and all tests takes it 6 s.
        # What is registered first runs last.
        atexit.register(os._exit, 0)


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        gc.collect()
        gc.freeze()  # pytest collects twice more


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("gate"):
        item.add_marker("slow")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laptop]:
    """Runs `raypp local up` with its own home directory. When the session ends, nothing that it
    started may be left."""
    from laptop import Laptop
    from one_at_a_time import one_at_a_time

    from raypp.state.memory.files import parse_name, remove_dead

    with one_at_a_time():
        laptop = Laptop.up(tmp_path_factory.mktemp("laptop"), cpus=8)
    try:
        yield laptop
    finally:
        left = laptop.down()
        # `raypp local down` removes snapshots that no process will use, so none can be left.
        dead = [name for name in remove_dead() if (slot := parse_name(name)) and slot.run in laptop.names]
        left += [f"a snapshot in shared memory: {name}" for name in dead]
    assert not left, f"left behind by the embedded cluster or its runs: {left}"


@pytest.fixture(scope="session")
def undisturbed(laptop: Laptop) -> Run:
    """The reference: the small job, submitted and followed to its end without a fault."""
    from held_back import held_back

    told, place = {"on_end": {"command": "sh -c 'cat > $TOLD'"}}, {"TOLD": f"{laptop.directory}/told.json"}
    run = laptop.start(laptop.job("undisturbed", observe=told, resources__env=place), "--json")
    with held_back([rank.pid for rank in run.wait_titles().values()]):
        run.seen_alive = run.facts_while_alive()
    run.wait()
    assert run.exit_code == 0, run.describe()
    return run


@pytest.fixture
def shared_memory() -> Iterator[Callable[[], Path]]:
    """Creates nodes' directories in shared memory. At the end, asserts that they have no files."""
    made: list[Path] = []

    def make() -> Path:
        made.append(Path(tempfile.mkdtemp(prefix="raypp-test-", dir="/dev/shm")))
        return made[-1]

    yield make
    left = [path.name for folder in made if folder.exists() for path in folder.iterdir()]
    for folder in made:
        shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"left in shared memory: {left}"
