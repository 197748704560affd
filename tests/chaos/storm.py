"""A random fault storm: one long run, faults at exponentially distributed times, and where the time
went.

`make chaos MINUTES=30 MTBF=20 SEED=1` starts an embedded cluster and trains on three stages. Faults
from outside hit the ranks, the controller and the store. After the given minutes the run stops with
a last save. Then the same number of steps is trained undisturbed, and weights and history are
compared bit for bit. The seed determines kinds, victims and times, but not the point of the run at
which a fault hits.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from laptop import Laptop, Run, assert_same_weights, numbers, wait_for
from timeline import Part, in_words, parts_of, totals

from benchmarks.surroundings import describe

WORLD, EVERY, HANG_S = 3, 10, 4.0
STORE_SILENT_S = 3.0
KINDS = {
    "SIGKILL of a rank": 6, "SIGSEGV of a rank": 2, "SIGSTOP of a rank": 1, "SIGKILL of two ranks": 1,
    "SIGKILL of all ranks": 1, "SIGKILL of the controller": 2, "SIGKILL of the controller and a rank": 1,
    "the store silent for 3 s": 1,
}  # fmt: skip
"""Relative frequency of each kind."""


@dataclass
class Fault:
    """A fault that was applied: seconds since 1970, to which ranks of which attempt."""

    kind: str
    at: float
    ranks: tuple[int, ...]
    attempt: int


@dataclass
class Storm:
    run: Run
    seed: int
    mtbf_s: float
    faults: list[Fault] = field(default_factory=list)

    def rage(self, seconds: float) -> None:
        """Draws times and kinds. Between two attempts, a fault waits until there is a target."""
        draw = random.Random(self.seed)
        end = time.time() + seconds
        due = time.time() + draw.expovariate(1 / self.mtbf_s)
        while due < end:
            kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
            ranks = tuple(draw.sample(range(WORLD), WORLD))
            time.sleep(max(0.0, due - time.time()))
            self._strike(kind, ranks, end)
            due += draw.expovariate(1 / self.mtbf_s)
        time.sleep(max(0.0, end - time.time()))

    def _strike(self, kind: str, order: tuple[int, ...], end: float) -> None:
        laptop, name = self.run.laptop, self.run.name
        if kind.startswith("the store"):
            self.faults.append(Fault(kind, time.time(), (), self._attempt()))
            with laptop.frozen_store():
                laptop.wait_until_store_is_missed(name, STORE_SILENT_S)
            return
        hit: tuple[int, ...] = ()
        if "rank" in kind:
            hit = order[: 3 if "all" in kind else 2 if "two" in kind else 1]
        pids = self._pids(hit, end)
        if len(pids) < len(hit):
            return
        at, attempt = time.time(), self._attempt()
        if "controller" in kind:
            actor = wait_for(lambda: laptop.actors().get(f"raypp/{name}"), "the controller", 60)
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(actor["pid"]), signal.SIGKILL)
        number = {"SIGSEGV": signal.SIGSEGV, "SIGSTOP": signal.SIGSTOP}.get(kind.partition(" ")[0], signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        self.faults.append(Fault(kind, at, hit, attempt))

    def _attempt(self) -> int:
        return max((event.attempt for event in self.run.events("attempt_started")), default=0)

    def _pids(self, ranks: tuple[int, ...], end: float) -> list[int]:
        """Returns the living processes in these seats of the newest attempt."""
        while ranks and time.time() < end:
            attempt = self._attempt()
            pids = {e.rank: e.details["pid"] for e in self.run.events("seated") if e.attempt == attempt}
            found = [pids[rank] for rank in ranks if rank in pids and psutil.pid_exists(pids[rank])]
            if len(found) == len(ranks):
                return found
            time.sleep(0.1)
        return []


def job(laptop: Laptop, name: str, steps: int) -> Path:
    """Writes the job of the storm. A run under the storm has too many steps to finish by itself."""
    return laptop.job(
        name,
        mesh={"pp": WORLD},
        train__steps=steps,
        train__micro_batch_size=1,
        data__seq_len=32,
        pipeline__microbatches=4,
        checkpoint__every_steps=EVERY,
        recovery={"max_restarts": 20, "hang_timeout_s": HANG_S},
    )


def compare(run: Run, calm: Run, steps: int) -> list[str]:
    wrong = []
    history = run.history()
    if [row["step"] for row in history] != list(range(1, steps + 1)):
        wrong.append("the history has gaps or duplicates")
    if numbers(history) != numbers(calm.history()):
        wrong.append("losses, norms or token counts differ")
    try:
        assert_same_weights(run.weights(steps), calm.weights(steps))
    except AssertionError:
        wrong.append("the weights differ")
    return wrong


def left_behind(run: Run) -> list[str]:
    laptop, name = run.laptop, run.name
    wait_for(lambda: not laptop.workers(f"{name}/"), "", 30, fail=False)
    left = list(laptop.workers(f"{name}/")) + [n for n in laptop.actors() if n.startswith(f"raypp/{name}")]
    return left + [str(path) for path in Path("/dev/shm").glob(f"*{name}*")]


def recovery_times(run: Run, faults: list[Fault]) -> dict[str, list[float]]:
    """Returns the seconds from each fault that ended an attempt to the next finished step."""
    firsts = sorted(event.time for event in run.events("first_step"))
    found: dict[str, list[float]] = {}
    for number, fault in enumerate(faults):
        following = next((time for time in firsts if time > fault.at), None)
        if fault.ranks and following is not None:
            later = faults[number + 1].at if number + 1 < len(faults) else float("inf")
            if following < later:  # otherwise the next fault hit before the run recovered
                found.setdefault(fault.kind, []).append(following - fault.at)
    return found


def report(run: Run, faults: list[Fault], parts: list[Part], wrong: list[str], reported: str) -> str:
    sums = totals(parts)
    whole = sum(sums.values())
    stepping = sums["training"] + sums["redoing"]
    times = recovery_times(run, faults)
    lines = [
        reported,
        "",
        "| fault | how often | seconds to the next finished step, median (longest) |",
        "|---|---|---|",
    ]
    for kind, count in Counter(fault.kind for fault in faults).most_common():
        seconds = times.get(kind)
        words = f"{statistics.median(seconds):.1f} ({max(seconds):.1f})" if seconds else "–"
        lines.append(f"| {kind} | {count} | {words} |")
    lines += ["", "| time | s | share |", "|---|---|---|"]
    lines += [f"| {kind} | {seconds:.1f} | {seconds / whole:.1%} |" for kind, seconds in sums.items()]
    useful = sums["training"] / stepping if stepping else 0.0
    lines += [
        "",
        f"Of the steps' time {useful:.1%} was useful (goal: ≥ 97 % at one fault per ten checkpoint intervals). "
        + ("Weights, optimizer state and history: those of the undisturbed run, bit for bit; nothing was left behind."
           if not wrong else "NOT AS IT SHOULD BE: " + "; ".join(wrong)),
        "", "```", in_words(parts), "```",
    ]  # fmt: skip
    return "\n".join(lines)


def weather(laptop: Laptop, options: argparse.Namespace) -> int:
    run = laptop.start(job(laptop, "storm", 1_000_000), "--json")
    run.wait_step(EVERY)
    storm = Storm(run, options.seed, options.mtbf)
    started = time.time()
    storm.rage(options.minutes * 60)
    stopped = time.time()
    run.until(lambda: run.events("first_step")[-1].attempt == storm._attempt(), "the last recovery", 120)
    laptop.raypp("stop", "storm")
    run.wait(300)
    state = run.status()["state"]
    steps = len(run.history())
    wrong = [] if state == "STOPPED" else [f"the run ended {state}: {run.status().get('error')}"]
    wrong += [f"left behind: {one}" for one in left_behind(run)]
    calm = laptop.start(job(laptop, "calm", steps), "--json")
    calm.wait(900)
    wrong += compare(run, calm, steps)
    parts = parts_of(run, [fault.at for fault in storm.faults], started, stopped)
    interval = statistics.median(row["step_s"] for row in run.history()) * EVERY
    command = f"make chaos MINUTES={options.minutes:g} MTBF={options.mtbf:g} SEED={options.seed}"
    reported = (
        f"`{command}`: {len(storm.faults)} faults and {len(run.events('restarting'))} restarts while {steps} steps "
        f"were done; a checkpoint every {EVERY} steps ({interval:.1f} s), so one fault per "
        f"{options.mtbf / interval:.1f} intervals. {describe()}; load average {os.getloadavg()[0]:.0f}."
    )
    text = report(run, storm.faults, parts, wrong, reported)
    print(text)
    if options.out:
        out = Path(options.out)
        out.mkdir(parents=True, exist_ok=True)
        (out / "storm.md").write_text(text + "\n")
        events = [
            {"kind": e.kind, "time": e.time, "attempt": e.attempt, "message": e.message} for e in run.reader.events()
        ]
        (out / "storm.json").write_text(json.dumps({"faults": [asdict(one) for one in storm.faults], "events": events}))
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--mtbf", type=float, default=20, help="mean seconds between faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="", help="a folder for storm.md and storm.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="storm-") as directory:
        laptop = Laptop.up(Path(directory), cpus=8)
        try:
            code = weather(laptop, options)
        finally:
            left = laptop.down()
            print("\n".join(left))
    return code or (1 if left else 0)


if __name__ == "__main__":
    sys.exit(main())
