"""Runs a node's ranks of `raypp.tools.doctor.group_check`, which tests NCCL, or gloo on CPUs."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from raypp.rank.joining.network import interface_to

GROUP_TIMEOUT_S = 60.0


def run_group(
    ranks: Sequence[tuple[int, str]], world: int, nodes: int, address: str, port: int, peer: str, off: str = ""
) -> dict[str, Any]:
    """Runs this node's ranks of a group, each in a process with a limit. `address`: address of rank
    0's node, with a free `port`. `peer`: another node, or this one if there is none: NCCL takes the
    interface to it. `off`: what NCCL must do without: `P2P`, `SHM` or `IB`; "": nothing. Returns
    `all_reduce` and `exchange` in GB/s, of the slowest rank; or `error`, `fix`, `peer`."""
    interface = interface_to(peer).name
    environment = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}", **os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(one for one in sys.path if one)  # where this process finds raypp
    if off:
        environment[f"NCCL_{off}_DISABLE"] = "1"
    command = [sys.executable, "-m", "raypp.tools.doctor.group_check"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(nodes), address, str(port), device],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for rank, device in ranks
    ]  # fmt: skip
    end = time.monotonic() + GROUP_TIMEOUT_S
    return slowest([_answer_of(process, end - time.monotonic()) for process in processes])


def slowest(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns a group's answer: the lowest rates, or the error that explains the others."""
    failed = [answer for answer in answers if "error" in answer]
    if failed:
        return min(failed, key=lambda answer: (bool(answer.get("peer")), not answer.get("fix")))
    return {name: min(answer[name] for answer in answers) for name in answers[0]}


def _answer_of(process: subprocess.Popen[str], limit_s: float) -> dict[str, Any]:
    """Returns what a process prints as its last JSON object; ends it if that takes too long."""
    try:
        printed, _ = process.communicate(timeout=max(0.1, limit_s))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"error": f"hangs: no end within {GROUP_TIMEOUT_S:.0f} s", "fix": "", "peer": True}
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    if not lines:
        return {"error": f"a process ended with code {process.returncode} and no answer", "fix": "", "peer": False}
    return dict(json.loads(lines[-1]))
