"""Two hosts (network namespaces) with a core each and a cable of a set rate, and ranks on them."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.awake import cores_awake
from benchmarks.turns import Held
from cluster.testbed import Network

PATIENCE_S = 900.0


@contextmanager
def two_hosts(prefix: str, *, awake: bool = True) -> Iterator[Hosts]:
    """Makes the hosts; afterwards, also after SIGTERM, nothing of them is left.

    Args:
        prefix: Two letters that the network's name begins with.
        awake: Keep the machine's cores awake meanwhile (`benchmarks.awake`).
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    network = Network.make(f"{prefix}{os.getpid() % 100000}", 2)
    try:
        with cores_awake() if awake else nullcontext():
            yield Hosts(network)
    finally:
        network.remove()


class Hosts:
    """Rank r of a program is on host r, on core r; with several ranks per host they take turns: 0, 1, 0, 1."""

    def __init__(self, network: Network) -> None:
        self.network, self._port = network, 29700

    def set_cable(self, mbit: float | None) -> None:
        """The rate of both hosts' cables, each way; None: no limit."""
        for host in range(2):
            self.network.set_rate(host, f"{mbit:.3f}mbit" if mbit else "none")

    def run(
        self, module: str, arguments: Sequence[str], more: Mapping[str, str] | None = None, per_host: int = 1
    ) -> list[dict[str, Any]]:
        """What all ranks of a module measured, with `sent`: bytes that left the rank's host through its card.

        Args:
            module: `benchmarks.timed_rank`, or another that reads torchrun's variables and writes to BENCH_OUT.
            arguments: Its arguments.
            more: Environment on top.
            per_host: Ranks on each host.

        Raises:
            SystemExit: A rank failed; the end of what all said is told.
        """
        sent = self.sent()
        with tempfile.TemporaryDirectory() as folder:
            ranks = []
            for rank, (command, environment) in enumerate(self._commands(module, arguments, per_host)):
                with Path(f"{folder}/said.{rank}").open("wb") as said:
                    own = {"BENCH_OUT": f"{folder}/out", "BENCH_STORE": f"{folder}/store", **(more or {})}
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
            figures["sent"] = after[rank % 2] - sent[rank % 2]
        return found

    def hold(self, module: str, arguments: Sequence[str], per_host: int = 1) -> Held:
        """Starts the ranks of a program that trains by turns, as long as it is told to; arguments as of `run`."""
        return Held(self._commands(module, [*arguments, "--steps", str(10**6)], per_host), self.sent)

    def sent(self) -> list[int]:
        """Bytes the switch has received from each host."""
        folder = Path("/sys/class/net")
        return [int((folder / self.network.cable(host) / "statistics/rx_bytes").read_text()) for host in range(2)]

    def _commands(self, module: str, arguments: Sequence[str], per_host: int) -> list[tuple[list[str], dict[str, str]]]:
        """What starts each rank, with its environment."""
        self._port += 1
        found = []
        for rank in range(2 * per_host):
            command = self.network.command(rank % 2, pinned(rank % 2, module, arguments))
            found.append((command, self._environment(rank, per_host)))
        return found

    def _environment(self, rank: int, per_host: int) -> dict[str, str]:
        return {
            **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "RANK": str(rank),
            "WORLD_SIZE": str(2 * per_host), "LOCAL_RANK": str(rank // 2), "LOCAL_WORLD_SIZE": str(per_host),
            "GROUP_RANK": str(rank % 2),
            "MASTER_ADDR": self.network.address(0), "MASTER_PORT": str(self._port),
        }  # fmt: skip


def pinned(core: int, module: str, arguments: Sequence[str]) -> list[str]:
    """The command that runs a module on one core, or on one of those that are there."""
    return ["taskset", "-c", str(core % (os.cpu_count() or 1)), sys.executable, "-m", module, *arguments]


def spread(values: Sequence[float]) -> str:
    """`1.23 (1.10 to 1.40)`: the median, and the range when there are several."""
    middle = f"{statistics.median(values):.2f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.2f} to {max(values):.2f})"
