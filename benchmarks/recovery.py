"""The time from `kill -9` of a rank to the next finished step, and the cold start of the same run.

It starts its own embedded cluster (with an S3 server), trains a tiny model on three pipeline
stages, and kills one rank after the other. For each, it prints the time until the failure was
detected, the time until the next step was finished, the number of processes kept, and the number of
steps done twice; once with the memory tier and once without.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.surroundings import begin
from benchmarks.tables import head

RAYPP = str(Path(sys.executable).parent / "raypp")
TEXT = Path("jobs/data/kjv-new-testament.txt")
STANDBY_READY_S = 8.0
PATIENCE_S = 180.0
PP = 3


@contextmanager
def embedded_cluster() -> Iterator[dict[str, str]]:
    """Starts a cluster, and stops it in the end; yields the environment of its commands."""
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "RAYPP_HOME": home}
        environment.pop("RAYPP_ADDRESS", None)
        subprocess.run([RAYPP, "local", "up"], check=True, env=environment, stdout=subprocess.DEVNULL)
        try:
            yield environment
        finally:
            subprocess.run([RAYPP, "local", "down", "--delete-data", "--yes"], check=False, env=environment)


@dataclass(frozen=True)
class Recovery:
    """A kill and the recovery from it, in seconds."""

    victim: str
    known: float
    seats: float
    next_step: float
    kept: int
    steps_again: int


@dataclass
class Trial:
    """A run that the benchmark observes."""

    name: str
    environment: dict[str, str]

    def ask(self, *command: str) -> str:
        return subprocess.run(
            [RAYPP, *command], env=self.environment, capture_output=True, text=True, check=True
        ).stdout

    def events(self, kind: str, attempt: int) -> list[dict[str, Any]]:
        told = json.loads(self.ask("events", self.name, "--json"))
        return [event for event in told if event["kind"] == kind and event["attempt"] == attempt]

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        end = time.monotonic() + PATIENCE_S
        while not (answer := condition()):
            if time.monotonic() > end:
                raise SystemExit(f"timeout while waiting for: {what}; see raypp events {self.name}")
            time.sleep(0.3)
        return answer

    def seats(self, attempt: int) -> dict[str, int]:
        """Returns the process id of each rank."""
        told = self.until(lambda: len(s := self.events("seated", attempt)) == PP and s, f"seats of attempt {attempt}")
        return {event["details"]["label"]: event["details"]["pid"] for event in told}

    def first_step(self, attempt: int) -> dict[str, Any]:
        return self.until(lambda: self.events("first_step", attempt), f"a step of attempt {attempt}")[0]

    def kill(self, victim: str, attempt: int) -> Recovery:
        """Kills a rank of a training attempt; returns once the next attempt trains."""
        before = self.seats(attempt)
        begun = self.first_step(attempt)["step"]
        self.until(lambda: json.loads(self.ask("status", self.name, "--json"))["step"] >= begun + 7, "progress")
        time.sleep(STANDBY_READY_S)
        at = time.time()
        os.kill(before[victim], signal.SIGKILL)
        first = self.first_step(attempt + 1)
        after = self.seats(attempt + 1)
        failed = next(e for e in self.events("rank_failed", attempt) if e["details"]["pid"] == before[victim])
        seated = max(event["time"] for event in self.events("seated", attempt + 1))
        kept = sum(after[label] == before[label] for label in before)
        again = max(0, failed["step"] - (first["step"] - 1))
        return Recovery(victim, failed["time"] - at, seated - at, first["time"] - at, kept, again)


def observe(tier: bool, rounds: int, folder: str, environment: dict[str, str]) -> tuple[float, list[Recovery]]:
    """Starts a run; returns the seconds of its cold start, and the recovery from every kill."""
    name = f"recovery-{'tier' if tier else 'store'}"
    document: dict[str, Any] = {
        "name": name,
        "model": {"kind": "llama", "num_layers": 6, "hidden_size": 32, "num_heads": 2, "vocab_size": 320},
        "data": {"kind": "text", "path": str(TEXT.resolve()), "seq_len": 64},
        "mesh": {"pp": PP},
        "train": {"steps": 1_000_000, "micro_batch_size": 1},
        "checkpoint": {"url": "s3://raypp/bench", "every_steps": 20, "memory_tier": tier},
        "resources": {"device": "cpu"},
    }
    job = Path(folder) / f"{name}.yaml"
    job.write_text(yaml.safe_dump(document))
    trial = Trial(name, environment)
    trial.ask("submit", str(job), "--detach")
    started = trial.until(lambda: trial.events("attempt_started", 1), "the first attempt")[0]["time"]
    cold = trial.first_step(1)["time"] - started
    victims = ["pp0", "pp1", "pp2"] * rounds
    recoveries = [trial.kill(victim, attempt) for attempt, victim in enumerate(victims, start=1)]
    trial.ask("stop", name, "--no-save")
    return cold, recoveries


def main() -> None:
    options = begin(__doc__, rounds=(1, "kills of each rank"))
    titles = "memory tier | killed | known s | seats s | next step s | of a cold start | processes kept | steps again"
    print(head(titles))
    with tempfile.TemporaryDirectory() as folder, embedded_cluster() as environment:
        for word in ("on", "off"):
            cold, recoveries = observe(word == "on", options.rounds, folder, environment)
            for one in recoveries:
                print(f"| {word} | {one.victim} | {one.known:.2f} | {one.seats:.2f} | {one.next_step:.2f} "
                      f"| {one.next_step / cold:.2f} | {one.kept} of {PP} | {one.steps_again} |")  # fmt: skip
            median = statistics.median(one.next_step for one in recoveries)
            print(f"| {word} | median | | | {median:.2f} | {median / cold:.2f} of {cold:.2f} s | | |", flush=True)


if __name__ == "__main__":
    main()
