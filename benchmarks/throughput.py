"""Compares raypp with a bare Schedule1F1B script, pp 2, in alternating rounds.

It prints the median over the rounds of the ratio of each round's median step, for speed and for CPU
seconds, and the fraction of a step that each of raypp's parts takes.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.awake import cores_awake
from benchmarks.sizes import MICROBATCHES, ROWS, SEQ_LEN
from benchmarks.surroundings import begin
from benchmarks.tables import head, spread
from raypp.ports import free_port

WARM = 2


def torchrun(module: str, arguments: list[str], ranks: int = 2, alone: bool = True) -> list[dict[str, Any]]:
    """Runs a module under torchrun; returns what each rank measured. `alone`: with one thread to a
    rank, and the cores kept awake. Raises CalledProcessError: a rank failed."""
    with tempfile.TemporaryDirectory() as folder, cores_awake() if alone else nullcontext():
        out = f"{folder}/out"
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks),
             "--master-addr", "127.0.0.1", "--master-port", str(free_port()), "-m", module, *arguments],
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **({"OMP_NUM_THREADS": "1"} if alone else {}), "GLOO_SOCKET_IFNAME": "lo",
                 "BENCH_OUT": out, "BENCH_STORE": f"{folder}/store"},
        )  # fmt: skip
        return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(ranks)]


def step_figures(ranks: list[dict[str, Any]]) -> tuple[float, float]:
    """Returns the median seconds of a step on rank 0, and its median CPU seconds over both ranks,
    without the first steps."""
    wall = statistics.median(ranks[0]["wall"][WARM:])
    cpu = statistics.median(sum(both) for both in zip(*(rank["cpu"][WARM:] for rank in ranks), strict=True))
    return wall, cpu


def main() -> None:
    options = begin(__doc__, rounds=(8, "runs of each variant"), steps=(7, "of each run"))
    variants: dict[str, tuple[str, list[str]]] = {
        "bare 4+4": ("benchmarks.bare_1f1b", ["--cut", "4,4"]),
        "bare 5+3": ("benchmarks.bare_1f1b", ["--cut", "5,3"]),
        "raypp 4+4": ("benchmarks.timed_rank", ["--cut", "4,4"]),
        "raypp": ("benchmarks.timed_rank", []),
    }
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    parts: list[dict[str, float]] = []
    for number in range(options.rounds):
        for name in list(variants)[:: -1 if number % 2 else 1]:
            module, arguments = variants[name]
            ranks = torchrun(module, [*arguments, "--steps", str(options.steps)])
            figures[name].append(step_figures(ranks))
            if name == "raypp":
                parts += ranks[0]["parts"][WARM:]
        print(f"round {number + 1}: " + "  ".join(f"{n} {figures[n][-1][0]:.3f} s" for n in variants), flush=True)
    report(figures, parts)


def report(figures: dict[str, list[tuple[float, float]]], parts: list[dict[str, float]]) -> None:
    tokens = ROWS * MICROBATCHES * SEQ_LEN
    print(head("variant | tokens/s | CPU s per step"))
    for name, values in figures.items():
        wall, cpu = (statistics.median(v[i] for v in values) for i in (0, 1))
        print(f"| {name} | {tokens / wall:,.0f} | {cpu:.3f} |")
    print(head("ratio, median over rounds (min to max) | speed | CPU seconds"))
    for ours, theirs in (("raypp", "bare 4+4"), ("raypp 4+4", "bare 4+4"), ("raypp", "bare 5+3")):
        pairs = list(zip(figures[ours], figures[theirs], strict=True))
        speed, spent = [b[0] / a[0] for a, b in pairs], [a[1] / b[1] for a, b in pairs]
        print(f"| {ours} ÷ {theirs} | {spread(speed, 3)} | {spread(spent, 3)} |")
    whole = statistics.median(sum(p.values()) for p in parts)
    print(head("part of raypp's step (rank 0) | ms | share"))
    for name in parts[0]:
        seconds = statistics.median(p.get(name, 0.0) for p in parts)
        print(f"| {name} | {seconds * 1e3:.2f} | {seconds / whole:.2%} |")


if __name__ == "__main__":
    main()
