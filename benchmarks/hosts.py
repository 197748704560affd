"""Hosts (network namespaces) with one core each, cables of a set rate, and ranks on them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.awake import cores_awake
from benchmarks.turns import Held
from cluster.testbed import Network, why_not

PATIENCE_S = 900.0


@contextmanager
def some_hosts(prefix: str, count: int = 2, *, awake: bool = True, share_cores: bool = False) -> Iterator[Hosts]:
    """Creates the hosts, and removes them afterwards, even after SIGTERM. Says why and exits where
    it cannot, or has fewer cores than hosts, unless they `share_cores`. `prefix`: two letters at
    the start of the network's name. `awake`: keep the cores awake (`benchmarks.awake`)."""
    cores = len(os.sched_getaffinity(0))
    few = f"{count} hosts need {count} cores, and there are {cores}" if cores < count and not share_cores else ""
    if reason := why_not() or few:
        print(f"skipped: {reason}")
        sys.exit()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    network = Network.make(f"{prefix}{os.getpid() % 100000}", count)
    try:
        with cores_awake() if awake else nullcontext():
            yield Hosts(network, count)
    finally:
        network.remove()


class Hosts:
    """Some hosts. Rank r runs on host and core r."""

    def __init__(self, network: Network, count: int) -> None:
        self.network, self.count, self._port = network, count, 29700

    def set_cable(self, mbit: float | None) -> None:
        """Sets the rate of every host's cable, each way; None: no limit."""
        for host in range(self.count):
            self.network.set_rate(host, f"{mbit:.3f}mbit" if mbit else "none")

    def run(self, module: str, arguments: Sequence[str]) -> list[dict[str, Any]]:
        """Runs the ranks of a module, which reads torchrun's variables and writes to BENCH_OUT, and
        returns what all of them measured, and `sent`: the bytes that the rank's host sent through
        its network card. Raises SystemExit: a rank failed; with the last output of all ranks."""
        sent = self.sent()
        with tempfile.TemporaryDirectory() as folder:
            ranks = []
            for rank, (command, environment) in enumerate(self._commands(module, arguments)):
                with Path(f"{folder}/said.{rank}").open("wb") as said:
                    own = {"BENCH_OUT": f"{folder}/out", "BENCH_STORE": f"{folder}/store"}
                    ranks.append(subprocess.Popen(command, env=environment | own, stdout=said, stderr=said))
            end = time.monotonic() + PATIENCE_S
            for process in ranks:
                process.wait(max(1.0, end - time.monotonic()))
            if any(process.returncode for process in ranks):
                told = [f"{module} {' '.join(arguments)}"]
                for rank in range(len(ranks)):
                    told.append(f"rank {rank}: {Path(f'{folder}/said.{rank}').read_text(errors='replace')[-3000:]}")
                raise SystemExit("\n".join(told))
            found: list[dict[str, Any]] = [
                json.loads(Path(f"{folder}/out.{rank}").read_text()) for rank in range(len(ranks))
            ]
        after = self.sent()
        for rank, figures in enumerate(found):
            figures["sent"] = after[rank] - sent[rank]
        return found

    def hold(self, module: str, arguments: Sequence[str]) -> Held:
        """Starts the ranks of a program that trains in turns; the arguments are those of `run`."""
        return Held(self._commands(module, [*arguments, "--steps", str(10**6)]), self.sent)

    def sent(self) -> list[int]:
        """Returns the bytes that the switch has received from each host."""
        folder = Path("/sys/class/net")
        cables = [folder / self.network.cable(host) for host in range(self.count)]
        return [int((cable / "statistics/rx_bytes").read_text()) for cable in cables]

    def _commands(self, module: str, arguments: Sequence[str]) -> list[tuple[list[str], dict[str, str]]]:
        """Returns the command and the environment of each rank."""
        self._port += 1
        shared = {
            **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "WORLD_SIZE": str(self.count),
            "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": self.network.address(0),
            "MASTER_PORT": str(self._port),
        }  # fmt: skip
        commands = [self.network.command(rank, pinned(rank, module, arguments)) for rank in range(self.count)]
        return [(one, shared | {"RANK": str(rank), "GROUP_RANK": str(rank)}) for rank, one in enumerate(commands)]


def pinned(core: int, module: str, arguments: Sequence[str]) -> list[str]:
    """Returns the command that runs a module on a core; wraps around if there are fewer cores."""
    return ["taskset", "-c", str(core % (os.cpu_count() or 1)), sys.executable, "-m", module, *arguments]


def keys(*settings: str) -> list[str]:
    """Returns the arguments that set keys of the job, as in `train.steps=5`."""
    return [word for setting in settings for word in ("--set", setting)]
