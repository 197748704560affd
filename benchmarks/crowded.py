"""How long a save stalls training, and what length negotiation costs.

Run it with `python -m benchmarks.crowded`. It runs the quickstart (4 CPU ranks) under torchrun,
with a save every few steps into a directory and into a real S3 server on loopback, and reads the
run's own records.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.surroundings import announce
from raypp.clusters.seaweed import SeaweedServer
from raypp.observe.reader import RunReader
from raypp.ports import free_port
from raypp.storage import open_store


def run(url: str, steps: int, environment: dict[str, str]) -> None:
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--master-addr", "127.0.0.1",
         "--master-port", str(free_port()), "-m", "raypp.train", "--job", "jobs/quickstart.yaml",
         "--set", "name=saves", "--set", f"checkpoint.url={url}", "--set", f"train.steps={steps}",
         "--set", "checkpoint.every_steps=4"],
        check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def figures(url: str, kind: str) -> str:
    reader = RunReader(open_store(url), "saves")
    reports = reader.reports()[2:]
    step = statistics.median(r.step_s for r in reports)
    negotiate = statistics.median(r.parts_s["negotiate"] for r in reports)
    commits = [event.details for event in reader.events() if event.kind == "committed"]
    stalls = sorted(c["stall_s"] for c in commits)
    seconds = statistics.median(c["seconds"] for c in commits)
    size = commits[-1]["bytes"] / 1e6
    return (
        f"| {kind} | {step * 1e3:.0f} | {negotiate * 1e3:.2f} ({negotiate / step:.2%}) | {size:.1f} "
        f"| {statistics.median(stalls) * 1e3:.0f} ({stalls[-1] * 1e3:.0f}) | {seconds:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    announce()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        run(f"{folder}/directory", options.steps, environment)
        lines.append(figures(f"{folder}/directory", "directory"))
        server = SeaweedServer.start(Path(folder) / "s3", buckets=("bench",))
        try:
            os.environ.update(server.environment())
            run("s3://bench/runs", options.steps, {**environment, **server.environment()})
            lines.append(figures("s3://bench/runs", "SeaweedFS"))
        finally:
            server.stop()
    print("\n| store | step, ms | negotiation, ms (share) | MB per save | stop per save, ms (longest) | save, s |")
    print("|---|---|---|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
