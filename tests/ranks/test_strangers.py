"""Strangers attack every port of a run while it trains; a partner gives back what it should not."""

import re
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from local_run import Kill, LocalRun, _Speaker, same
from strangers import Address, Siege
from test_memory_tier import document, lose
from training import thinned

from raypp.state.memory import fetch, restore

STEPS = 12
PAGE = Path(__file__).parents[2] / "docs" / "ports.md"


def job(**checkpoint: Any) -> dict[str, Any]:
    whole = document(**checkpoint)
    return whole | {"train": {**whole["train"], "steps": STEPS}}


def train_until_the_siege_is_over(_rank: int, _world: int, _port: int, *, folder: Path) -> None:
    """Makes steps slow, and the last one wait. The process may open few descriptors at first.
    `folder` gets two files: `begun`, which the run makes, and `over`."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    phase = _Speaker.phase

    def slow(self: _Speaker, name: str, detail: str = "") -> None:
        if detail.endswith(" read"):
            time.sleep(0.1)
            if detail == "4 read":
                (folder / "begun").touch()
            end = time.monotonic() + 90
            while detail == f"{STEPS} read" and not (folder / "over").exists() and time.monotonic() < end:
                time.sleep(0.05)
        phase(self, name, detail)

    _Speaker.phase = slow  # type: ignore[method-assign]


class Observer:
    """Finds the ports of a run's processes, attacks them, and then lets the run end.

    Attributes:
        found: The addresses that each rank listens on, with what listens there.
        error: What went wrong.
    """

    def __init__(self, local_run: LocalRun, folder: Path) -> None:
        self.found: dict[int, dict[Address, str]] = {}
        self.connections = 0
        self.error: BaseException | None = None
        self._lives, self._folder = local_run, folder
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join(120)
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            self._look()
            siege = Siege([address for ports in self.found.values() for address in ports], 100)
            siege.wait()
            self.connections = siege.connections
        except BaseException as error:  # noqa: BLE001 - raised again by `wait`
            self.error = error
        finally:
            (self._folder / "over").touch()

    def _look(self) -> None:
        """Waits until the run trains, then asks each of its ports what it is."""
        end = time.monotonic() + 60
        while not (self._folder / "begun").exists():
            assert time.monotonic() < end, "the run does not begin"
            time.sleep(0.05)
        with ExitStack() as stack, selectors.DefaultSelector() as selector:
            for rank, (process, _) in list(self._lives._processes.items()):
                self.found[rank] = {}
                for one in psutil.Process(process.pid).net_connections("tcp"):
                    if one.status == "LISTEN":
                        self.found[rank][one.laddr] = "rendezvous" if one.laddr[1] == self._lives.port else "gloo"
                        link = stack.enter_context(socket.create_connection(one.laddr, 5))
                        selector.register(link, selectors.EVENT_READ, (rank, one.laddr))
            end = time.monotonic() + 5  # raypp's own ports speak first
            while time.monotonic() < end:
                for key, _ in selector.select(0.1):
                    rank, address = key.data
                    assert len(key.fileobj.recv(100)) == 32, f"port {address} says something"  # type: ignore[union-attr]
                    self.found[rank][address] = "copies of snapshots"
                    selector.unregister(key.fileobj)


def documented(*opened: str) -> dict[str, str]:
    """Returns the ports of docs/ports.md that are open at some times, and who opens them."""
    rows = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in PAGE.read_text().splitlines()
            if line.startswith("|")]  # fmt: skip
    return {name: process for name, when, process, *_ in rows if when in opened}


@pytest.mark.gate
def test_every_port_of_a_run_is_documented_and_strangers_change_no_bit(
    tmp_path: Path, shared_memory: Callable[[], Path]
) -> None:
    reference = LocalRun(job(memory_tier=False), tmp_path / "reference", [tmp_path] * 2, [0, 0])
    losses = reference.attempt_once().losses
    prepare = partial(train_until_the_siege_is_over, folder=tmp_path)
    local_run = LocalRun(job(), tmp_path / "local_run", [shared_memory(), shared_memory()], [0, 1], prepare=prepare)
    observer = Observer(local_run, tmp_path)
    reported = local_run.attempt_once()
    observer.wait()
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert reported.losses == losses and same(local_run.final_state(), reference.final_state()), reported
    assert not reported.errors and not reported.left and observer.connections > 800

    table = documented("while ranks train", "while ranks train on several nodes, with the memory tier")
    everywhere = {name for name, process in table.items() if process == "every rank"}
    assert set(observer.found[1].values()) == everywhere
    assert set(observer.found[0].values()) == set(table)
    assert {address[0] for ports in observer.found.values() for address in ports} == {"127.0.0.1"}

    refused = [(event.rank, event.message) for event in reported.of_kind("refused_connection")]
    assert sorted(rank for rank, _ in refused) == [0, 1]
    for _, message in refused:
        assert re.match("a connection from 127.0.0.1 to the port for copies was refused: ", message)


# A hostile partner --------------------------------------------------------------------------------


def announce(size: int) -> None:
    def give(_part: torch.Tensor, to: int) -> None:
        dist.send(torch.tensor([size]), to)
        wanted = torch.ones(1, dtype=torch.int64)
        dist.recv(wanted, to)
        assert not wanted

    restore.give = give


def change(call: int, changed: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Changes the parts that are given: 0 is control block and headers, 1 data."""
    real = fetch.give

    def give(part: torch.Tensor, to: int) -> None:
        first = part[:1].tolist() == [ord("{")]
        real(changed(part.clone()) if first == (call == 0) else part, to)

    restore.give = give


def deep(part: torch.Tensor) -> torch.Tensor:
    return torch.full_like(part, ord("["))


def flipped(part: torch.Tensor) -> torch.Tensor:
    return part ^ 1


LIES: dict[str, tuple[Callable[[], None], str]] = {
    "sizes": (partial(announce, 2**62), " cannot come from rank 0's node, which announces 4611686018427387904 bytes"),
    "negative sizes": (partial(announce, -5), " cannot come from rank 0's node, which announces -5 bytes"),
    "deep json": (partial(change, 0, deep), "the control block from rank 0's node"),
    "garbage": (partial(change, 0, flipped), "the control block from rank 0's node"),
    "other data": (partial(change, 1, flipped), " is corrupt between bytes"),
}


def lie(name: str, rank: int, _world: int, _port: int) -> None:
    if rank == 0:
        LIES[name][0]()


@pytest.mark.parametrize("name", thinned(LIES, ["other data"], ["sizes"]))
def test_a_partner_that_lies_is_not_believed_and_the_store_is_used(
    name: str, tmp_path: Path, shared_memory: Callable[[], Path], undisturbed: Any
) -> None:
    here, there = shared_memory(), shared_memory()
    local_run = LocalRun(document(every_steps=3), tmp_path, [here, there], [0, 1])
    local_run.attempt_once(Kill((0, 1), after=5, copies=2, commit=3))
    lose(there)
    local_run._prepare = partial(lie, name)
    second = local_run.attempt_once()
    assert second.restored().startswith("from the store: step 3; ") and LIES[name][1] in second.restored()
    assert "rank 1's snapshot of step " in second.restored()
    assert second.losses == undisturbed[0] and not second.errors
