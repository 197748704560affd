"""The cost of a memory snapshot per step, and the read time of a restart from memory.

Run it with `python -m benchmarks.memory_tier`. One process has a module of equal matrices with
AdamW (three tensors of state each) and takes a snapshot after every step. The step is a busy loop
of fixed length outside torch, which makes the cost of the tier visible. "waits" is the time that
the training thread is stalled (taking the snapshot, and the update waiting for its copy). "CPU" is
the additional CPU time of all threads. The restart is compared with reading the same state from a
directory.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.surroundings import announce
from raypp.checkpoint.announce import Announcements
from raypp.checkpoint.load_checkpoint import Load, load_checkpoint
from raypp.checkpoint.save import CheckpointSaver
from raypp.checkpoint.state import state_in_objects
from raypp.memory.files import DIRECTORY_VARIABLE, list_slots
from raypp.memory.rank_slots import RunLife
from raypp.memory.slot import reading
from raypp.memory.tier import MemoryTier
from raypp.records import Coordinates, Event, Requests, Seat
from raypp.storage.directory import DirectoryStore

STEPS, STEP_S = 12, 0.1
ONE = Coordinates(1, 1, 1, 1)
SEAT = Seat("bench", 1, 0, 1, Coordinates(), ONE)


class Silent:
    def phase(self, name: str, detail: str = "", reached: object = None) -> None: ...

    def step(self, report: object) -> None: ...

    def event(self, event: Event) -> None: ...

    def requests(self) -> Requests:
        return Requests()


def model(megabytes: float, tensors: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Builds matrices whose weights and AdamW state together take this many MB."""
    width = max(2, int((megabytes * 1e6 / 12 / tensors) ** 0.5))
    module = nn.ParameterList([nn.Parameter(torch.randn(width, width)) for _ in range(tensors)])
    for parameter in module:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=False)
    optimizer.step()
    return module, optimizer


def train(module: nn.Module, optimizer: torch.optim.Optimizer, tier: MemoryTier | None) -> tuple[float, float]:
    """Returns the median stall of the training thread per step, and the CPU seconds of a step."""
    held, used = [], []
    update = _timed(optimizer.step)
    plain = median(update() for _ in range(3))
    for step in range(1, STEPS + 1):
        before, waited = time.process_time(), 0.0
        if tier is not None:
            started = time.perf_counter()
            signals = tier.signals()
            tier.step_begins(
                step, signals, lambda: state_in_objects([module], optimizer, SEAT.coordinates), lambda: "{}"
            )
            waited = time.perf_counter() - started
        end = time.perf_counter() + STEP_S
        while time.perf_counter() < end:
            time.sleep(0.001)
        waited += max(0.0, update() - plain)
        held.append(waited)
        used.append(time.process_time() - before)
    return median(held[4:]), median(used[4:])


def _timed(action: Callable[[], object]) -> Callable[[], float]:
    def run() -> float:
        started = time.perf_counter()
        action()
        return time.perf_counter() - started

    return run


def one_size(megabytes: float, tensors: int, folder: Path) -> None:
    module, optimizer = model(megabytes, tensors)
    _, without = train(module, optimizer, None)
    tier = MemoryTier(RunLife("bench", "0" * 12, "0"), SEAT, 1, Silent())
    tier.start([0], [None], 0, None, optimizer, -1)
    waits, cpu = train(module, optimizer, tier)
    tier.close(delete=False)
    newest = max((entry for entry in list_slots(folder) if entry[0].step), key=lambda entry: entry[0].step or 0)
    started = time.perf_counter()
    with reading(newest[1], newest[0]) as stored:
        load = Load(stored.files, [module], optimizer, "memory")
        load.fetch()
        load.apply()
        memory_s = time.perf_counter() - started
        size = stored.control["data_size"]
    for _, path in list_slots(folder):
        path.unlink()
    with tempfile.TemporaryDirectory() as root:
        store = DirectoryStore(Path(root))
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        saver = CheckpointSaver(store, "bench", {}, SEAT, Announcements(server, 1), Silent(), 1)
        saver.save(1, [module], optimizer, {})
        saver.wait()
        saver.close()
        started = time.perf_counter()
        load_checkpoint(store, "bench", 1, [module], optimizer)
        store_s = time.perf_counter() - started
    print(
        f"| {size / 1e6:.1f} MB, {3 * tensors} tensors | {waits * 1e3:.2f} ms | {(cpu - without) * 1e3:.1f} ms "
        f"| {memory_s * 1e3:.1f} ms | {store_s * 1e3:.1f} ms |",
        flush=True,
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    announce()
    torch.set_num_threads(1)
    print(
        "\n| state of a rank | a step waits | CPU per snapshot | restart from memory | from a directory (page cache) |"
    )
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        os.environ[DIRECTORY_VARIABLE] = folder
        for megabytes, tensors in ((1, 40), (30, 40), (300, 40), (300, 400)):
            one_size(megabytes, tensors, Path(folder))


if __name__ == "__main__":
    main()
