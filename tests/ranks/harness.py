"""Runs a function on several gloo ranks, each in a real process, and collects the results.

Processes come from a fork server that has torch imported, so a rank starts in tens of milliseconds.
"""

import contextlib
import faulthandler
import io
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.forkserver import ensure_running
from typing import Any

import torch

from raypp import ports

TIMEOUT_S = 240.0
"""Less than the 300 s of a test. On a loaded machine, compiling a model can take two minutes."""


def _part_of(room: Callable[[], range]) -> Callable[[], range]:
    """Restricts a range of ports to this worker's share under pytest-xdist, so that no worker takes
    a port that another one has assigned."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return lambda: room()[worker::workers]


ports._room = _part_of(ports._room)
_context = multiprocessing.get_context("forkserver")
OWN_PATH = "RAYPP_TESTS_PYTHONPATH"
"""Variable with the PYTHONPATH of the tests, which the ranks get back."""


def start_fork_server() -> None:
    """Starts the fork server if none runs. It finds `forked` by PYTHONPATH: Python 3.11 does not
    give it the path of its parent."""
    _context.set_forkserver_preload(["forked"])  # raypp's own ranks want another module
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    if before is not None:
        os.environ[OWN_PATH] = before
    try:
        ensure_running()
    finally:
        os.environ.pop(OWN_PATH, None)
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _serve(connection: Any, rank: int, world: int, once: bool) -> None:
    # Each rank would start as many compiling processes as there are cores; each imports torch.
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", TORCHINDUCTOR_COMPILE_THREADS="1")
    torch.set_num_threads(1)
    faulthandler.enable()  # A rank that a signal ends prints where it was.
    with contextlib.suppress(EOFError):  # the tests have closed this world
        more = True
        while more:
            function, port, arguments = connection.recv()
            more = not once
            try:
                # Sends plain bytes: torch would share tensors through file descriptors that close
                # when this process exits.
                result = io.BytesIO()
                torch.save(function(rank, world, port, *arguments), result)
                connection.send((True, result.getvalue()))
            except BaseException:  # noqa: BLE001 - any error of the rank belongs in the test's report
                connection.send((False, traceback.format_exc()))
                return


class World:
    """Processes that are ranks 0 to `size - 1` of what they run, one function after another."""

    def __init__(self, size: int, once: bool = False) -> None:
        start_fork_server()
        self.size = size
        self._pipes, self._processes = [], []
        for rank in range(size):
            here, there = _context.Pipe()
            process = _context.Process(target=_serve, args=(there, rank, size, once), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Calls `function(rank, size, port, *arguments)` on all ranks. Returns the results in rank
        order. Fails with the first rank's traceback when one raises, dies or takes longer than
        `TIMEOUT_S`. The world is then closed."""
        port = ports.free_port()
        try:
            for pipe in self._pipes:
                with contextlib.suppress(ConnectionError):  # a rank that has died: `_collect` says which
                    pipe.send((function, port, arguments))
            return _collect(self._pipes)
        except BaseException:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        return not self._processes

    def close(self) -> None:
        """Ends the processes: they leave, or are killed after 5 s."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    ranks = World(world, once=True)
    try:
        return ranks.run(function, *arguments)
    finally:
        ranks.close()


_living: dict[int, tuple[Any, World]] = {}


def run_in_living(size: int, alike: Any, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Like `run_ranks`, in the processes of the call before of this size if that had an equal
    `alike`. To start and end processes costs as much as a small job."""
    key, world = _living.get(size, (None, None))
    if world is None or world.closed or key != alike:
        if world is not None:
            world.close()
        _living[size] = alike, (world := World(size))
    return world.run(function, *arguments)


def run_in_turn(world: int, function: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
    """Like `run_ranks` for several cases, which the same processes run one after another. Each
    rendezvous has its own port.

    Returns:
        For each case, the results in rank order.
    """
    results = run_ranks(world, _in_turn, ports.free_ports(len(cases)), function, list(cases))
    return [list(case) for case in zip(*results, strict=True)]


def _in_turn(
    rank: int, world: int, port: int, ports: list[int], function: Callable[..., Any], cases: list[tuple[Any, ...]]
) -> list[Any]:
    found = []
    for index, (own_port, case) in enumerate(zip(ports, cases, strict=True)):
        try:
            found.append(function(rank, world, own_port, *case))
        except BaseException as error:
            error.add_note(f"in case {index} of {len(cases)}: {case}")
            raise
    return found


def _collect(pipes: list[Any]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(waiting), timeout=TIMEOUT_S)
        assert ready, f"ranks {sorted(waiting.values())} did not answer within {TIMEOUT_S:.0f} s"
        for pipe in ready:
            rank = waiting[pipe]
            try:
                fine, value = pipe.recv()
            except (EOFError, ConnectionError):
                raise AssertionError(f"rank {rank} died without a word") from None
            assert fine, f"rank {rank} raised:\n{value}"
            results[rank] = torch.load(io.BytesIO(value), weights_only=False)
    return [results[rank] for rank in range(len(pipes))]
