"""Runs ranks as processes of this machine, without a cluster."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from raypp.errors import RayppError, RunFailedError
from raypp.ports import free_port

RankFunction = Callable[..., Any]
"""Called with the rank, the port of the rendezvous, and the arguments. Returns plain JSON."""


def run_ranks(world: int, function: RankFunction, *arguments: Any, patience_s: float | None = 600.0) -> Any:
    """Runs a function in `world` new processes, with one thread each, and waits for all.

    Args:
        function: A function of a module that processes can import.
        arguments: Passed after rank and port.
        patience_s: Longest duration. None: no limit.

    Returns:
        What rank 0's function returned.

    Raises:
        RunFailedError: A rank failed; includes its message.
    """
    with TemporaryDirectory(prefix="raypp-ranks-") as name:
        folder = Path(name)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([function.__module__])
        port = free_port()
        processes = []
        deadline = None if patience_s is None else time.monotonic() + patience_s
        try:
            for number in range(world):
                # No daemon: those may not start processes, as lm-evaluation-harness does.
                process = context.Process(target=_rank, args=(number, port, function, arguments, name), daemon=False)
                process.start()
                processes.append(process)
            while any(process.is_alive() for process in processes):
                late = deadline is not None and time.monotonic() > deadline
                if late or any(process.exitcode for process in processes):
                    break
                time.sleep(0.02)
        finally:
            failed = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        if failed:
            reports = sorted(folder.glob("failed.*"))
            cause = reports[0].read_text().strip() if reports else f"no answer within {patience_s or 0:.0f} s"
            which = reports[0].suffix[1:] if reports else failed[0]
            raise RunFailedError(f"rank {which} of {len(processes)} failed: {cause}")
        return json.loads((folder / "answer").read_text())


def _rank(rank: int, port: int, function: RankFunction, arguments: tuple[Any, ...], folder: str) -> None:
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    try:
        answer = function(rank, port, *arguments)
        if rank == 0:
            (Path(folder) / "answer").write_text(json.dumps(answer))
    except RayppError as error:
        (Path(folder) / f"failed.{rank}").write_text(str(error))
        sys.exit(error.exit_code)
    except BaseException:
        (Path(folder) / f"failed.{rank}").write_text(traceback.format_exc())
        raise
