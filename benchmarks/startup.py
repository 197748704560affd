"""The time from `raypp submit` to the first finished step, by part, compared with torchrun.

torchrun starts the same ranks. Run it with `python -m benchmarks.startup`. It starts its own
embedded cluster, alternates `raypp submit` and torchrun on the mesh of the quickstart with a
directory store, and prints medians and the ratio.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.surroundings import announce
from raypp.ports import free_port

RAYPP = str(Path(sys.executable).parent / "raypp")
SHORT = ["--set", "train.steps=1", "--set", "checkpoint.every_steps=0"]


def events(place: str, environment: dict[str, str]) -> list[dict]:
    found = subprocess.run(
        [RAYPP, "events", place, "--json"], capture_output=True, text=True, check=True, env=environment
    )
    return json.loads(found.stdout)


def submit_once(folder: str, number: int, environment: dict[str, str]) -> dict[str, float]:
    name = f"start-{number}"
    began = time.time()
    subprocess.run(
        [RAYPP, "submit", "jobs/quickstart.yaml", "--set", f"name={name}", "--set", f"checkpoint.url={folder}", *SHORT],
        check=True, env=environment, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    told = events(f"{folder}/{name}", environment)
    at = {event["kind"]: event["time"] for event in reversed(told)}
    first = next(event for event in told if event["kind"] == "first_step")
    parts = {
        "check, package, submit": at["submitted"] - began if "submitted" in at else at["attempt_started"] - began,
        "controller": at["attempt_started"] - at.get("submitted", at["attempt_started"]),
        "placement, actors, imports": max(e["time"] for e in told if e["kind"] == "seated") - at["attempt_started"],
        **first["details"]["seconds"],
    }
    parts["to the first finished step"] = first["time"] - began
    return parts


def torchrun_once(folder: str, number: int, environment: dict[str, str]) -> float:
    name = f"torchrun-{number}"
    began = time.time()
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--master-addr", "127.0.0.1",
         "--master-port", str(free_port()), "-m", "raypp.rank", "--job", "jobs/quickstart.yaml",
         "--set", f"name={name}", "--set", f"checkpoint.url={folder}", *SHORT],
        check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    told = events(f"{folder}/{name}", environment)
    return next(event for event in told if event["kind"] == "first_step")["time"] - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    announce()
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "RAYPP_HOME": home, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment.pop("RAYPP_ADDRESS", None)
        subprocess.run([RAYPP, "local", "up"], check=True, env=environment, stdout=subprocess.DEVNULL)
        try:
            submits, torchruns = [], []
            for number in range(options.rounds):
                submits.append(submit_once(folder, number, environment))
                torchruns.append(torchrun_once(folder, number, environment))
                ours, theirs = submits[-1]["to the first finished step"], torchruns[-1]
                print(f"round {number + 1}: raypp submit {ours:.2f} s, torchrun {theirs:.2f} s", flush=True)
        finally:
            subprocess.run([RAYPP, "local", "down"], check=True, env=environment, stdout=subprocess.DEVNULL)
    report(submits[1:] or submits, torchruns[1:] or torchruns)


def report(submits: list[dict[str, float]], torchruns: list[float]) -> None:
    """Prints medians without the first round, which uploads the package."""
    print("\n| raypp submit, 4 CPU ranks | s, median |\n|---|---|")
    for part in submits[0]:
        print(f"| {part} | {statistics.median(s[part] for s in submits):.2f} |")
    ratios = sorted(s["to the first finished step"] / t for s, t in zip(submits, torchruns, strict=True))
    print(f"\ntorchrun, the same ranks, to the first finished step: {statistics.median(torchruns):.2f} s")
    print(f"raypp submit ÷ torchrun: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
