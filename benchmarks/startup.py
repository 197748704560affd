"""The time from `raypp submit` to the first finished step, by part, compared with torchrun.

torchrun starts the same ranks. The benchmark starts its own embedded cluster, alternates `raypp
submit` and torchrun on the mesh of the quickstart with a directory store, and prints medians and
the ratio.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks.recovery import RAYPP, embedded_cluster
from benchmarks.surroundings import begin
from benchmarks.tables import head, spread
from raypp.ports import free_port

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
    submitted = at.get("submitted", at["attempt_started"])
    return {
        "check, package, submit": submitted - began,
        "controller": at["attempt_started"] - submitted,
        "placement, actors, imports": max(e["time"] for e in told if e["kind"] == "seated") - at["attempt_started"],
        **first["details"]["seconds"],
        "to the first finished step": first["time"] - began,
    }


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
    options = begin(__doc__, rounds=(5, "starts of both"))
    submits, torchruns = [], []
    with tempfile.TemporaryDirectory() as folder, embedded_cluster() as environment:
        environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        for number in range(options.rounds):
            submits.append(submit_once(folder, number, environment))
            torchruns.append(torchrun_once(folder, number, environment))
            ours, theirs = submits[-1]["to the first finished step"], torchruns[-1]
            print(f"round {number + 1}: raypp submit {ours:.2f} s, torchrun {theirs:.2f} s", flush=True)
    report(submits[1:] or submits, torchruns[1:] or torchruns)


def report(submits: list[dict[str, float]], torchruns: list[float]) -> None:
    """Prints medians without the first round, which uploads the package."""
    print(head("raypp submit, 4 CPU ranks | s, median"))
    for part in submits[0]:
        print(f"| {part} | {statistics.median(s[part] for s in submits):.2f} |")
    ratios = [s["to the first finished step"] / t for s, t in zip(submits, torchruns, strict=True)]
    print(f"\ntorchrun, the same ranks, to the first finished step: {statistics.median(torchruns):.2f} s")
    print(f"raypp submit ÷ torchrun: {spread(ratios)}")


if __name__ == "__main__":
    main()
