"""Runs a job under a chain of strikes, and checks everything that must hold afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml
from injected_faults import Strike, put, read, write_plan
from laptop import Laptop, assert_same_weights, numbers, wait_for, weights
from matrix import EVERY, HANG_S, SHAPES, STEPS, WORLD, Chain

from raypp.control import client
from raypp.control.clusters.find import find_cluster, lend_store_settings
from raypp.job.job_file import load_job
from raypp.job.load import job_document
from raypp.state.checkpoint.commit import list_checkpoints
from raypp.state.run_records.reader import RunReader
from raypp.state.run_records.status import is_final
from raypp.storage import open_store

PATIENCE_S = 900.0
STILL_S = 120.0
"""Timeout for a new report. After it the run is given up, and its ranks' stacks are printed."""
STORE_SILENT_S = 3.0
_HERE = Path(__file__).parent
KINDS = {
    "kill": ("killed",), "segfault": ("segfault",), "freeze": ("hung",), "hang": ("hung",), "raise": ("raised",),
    "nan": ("nonfinite", "corrupt"),
}  # fmt: skip
"""The names that events may give to each kind of strike."""


@dataclass
class FaultedRun:
    """One run, submitted and observed from here. `fallen` has what a strike's rank recorded."""

    laptop: Laptop
    chain: Chain
    directory: Path
    name: str = ""
    fallen: dict[int, dict[str, Any]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    pids: set[int] = field(default_factory=set)
    state: str = ""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.name = self.chain.name
        self.store = self.laptop.store()
        self.reader = RunReader(self.store, self.name)

    # Running --------------------------------------------------------------------------------------

    def live(self) -> None:
        """Submits the run and strikes outside the ranks, until the run or the patience ends."""
        write_plan(self.directory, list(self.chain.strikes))
        begun = time.monotonic()
        self._submit()
        reported, heard = 0, begun
        while not is_final(self.reader.status()):
            now = time.monotonic()
            news = len(list(self.reader.events())) + len(self.reader.history())
            reported, heard = (news, now) if news != reported else (reported, heard)
            if now - begun > PATIENCE_S or now - heard > STILL_S:
                self._give_up()
                break
            self._look()
            time.sleep(0.05)
        self._look()
        self.seconds = time.monotonic() - begun
        self.state = str((self.reader.status() or {}).get("state"))
        self.events = list(self.reader.events())
        self.pids = {event.details["pid"] for event in self.events if event.kind == "seated"}

    def _submit(self) -> None:
        path = self.laptop.job(
            self.name,
            **SHAPES[self.chain.shape],
            train__steps=STEPS,
            train__micro_batch_size=1,
            data__seq_len=32,
            pipeline__microbatches=4,
            checkpoint__every_steps=EVERY,
            checkpoint__memory_tier=self.chain.tier,
            recovery={"max_restarts": 6, "hang_timeout_s": HANG_S, "on_nonfinite": "restart"},
            resources__env={"CHAOS_DIR": str(self.directory)},
        )
        with self._here():
            job = load_job(path).job
            store = open_store(job.checkpoint.url)
            store.put(f"{self.name}/spec.json", yaml.safe_dump(job_document(job)).encode())
            self.submission = client.submit_run(
                job, find_cluster(), store.url, rank_function="injected_faults:run_rank"
            )

    @contextlib.contextmanager
    def _here(self) -> Iterator[None]:
        """Gives this process the environment of the laptop's user inside the context."""
        before = dict(os.environ)
        os.environ.clear()
        paths = [str(_HERE), *filter(None, [self.laptop.environment.get("PYTHONPATH")])]
        os.environ.update(self.laptop.environment | {"PYTHONPATH": os.pathsep.join(paths)})
        lend_store_settings()
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)

    def _give_up(self) -> None:
        for title, process in self.laptop.workers(f"{self.name}/").items():
            command = [str(Path(sys.executable).parent / "py-spy"), "dump", "--pid", str(process.pid)]
            stacks = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            print(f"{title}\n{stacks.stdout[-6000:]}{stacks.stderr[-300:]}")
        for event in self.reader.events():
            print(f"{event.time:.2f} {event.kind} {event.attempt} {event.rank} {event.message[:300]}")
        self.laptop.raypp("stop", self.name, "--no-save")

    def _look(self) -> None:
        """Records the strikes that have fallen, and applies their outside part."""
        for strike in self.chain.strikes[len(self.fallen) :]:
            fact = read(self.directory / f"fallen-{strike.number}")
            if fact is None:
                return
            self.fallen[strike.number] = fact
            if strike.outside:
                self._strike_outside(strike)

    def _strike_outside(self, strike: Strike) -> None:
        done = self.directory / f"done-{strike.number}"
        if strike.outside == "store":
            with self.laptop.frozen_store():
                put(done, {})
                self.laptop.wait_until_store_is_missed(self.name, STORE_SILENT_S)
            return
        wait_for(lambda: self._killed(strike.outside), f"a {strike.outside} to kill")
        put(done, {})

    def _killed(self, what: str) -> bool:
        """Kills what was asked for; False if Ray still lists one that is dead."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid_of(what), signal.SIGKILL)
            return True
        return False

    def _pid_of(self, what: str) -> int:
        if what == "driver":
            job = next(job for job in self.laptop.jobs() if job["metadata"]["raypp_run"] == self.name)
            return int(job["driver_info"]["pid"])
        return int(wait_for(lambda: self.laptop.actors().get(f"raypp/{self.name}"), "the controller")["pid"])

    # Checks ---------------------------------------------------------------------------------------

    def failures_after(self, strike: Strike) -> list[Any]:
        """Returns the failures reported for the attempt that a strike hit."""
        attempt = self.fallen[strike.number]["attempt"]
        return [event for event in self.events if event.kind == "rank_failed" and event.attempt == attempt]

    def judge_strike(self, strike: Strike) -> None:
        """Asserts that the strike fell, and that events report rank, kind and time, or none."""
        assert strike.number in self.fallen, f"it never fell: the run is {self.state}, {self._last_words()}"
        fact = self.fallen[strike.number]
        reported = self.failures_after(strike)
        if strike.ends_attempt:
            own = [event for event in reported if event.rank == strike.rank and event.details["pid"] == fact["pid"]]
            assert own, f"no rank_failed of rank {strike.rank}, pid {fact['pid']}: {_rows(reported)}"
            assert own[0].details["kind"] in KINDS[strike.kind], _rows(reported)
            there = max(fact["step"], fact["in_step"])  # a save runs in parallel with later steps
            assert 0 <= there - (own[0].step or 0) <= _known_late(strike), _rows(reported)
            blamed = {event.rank for event in reported if event.details["kind"] != "lost_peer"}
            # All ranks agree that a step is not finite, and it ends all of them.
            assert strike.kind == "nan" or blamed <= {strike.rank, *strike.also}, _rows(reported)
            if strike.kind in ("freeze", "hang"):
                assert re.search(r"\(allowed: \d+ s\)", own[0].message), own[0].message
        elif not any(other.ends_attempt for other in self._in_attempt(fact["attempt"])):
            assert not reported, _rows(reported)
        if strike.outside == "controller":
            restarts = [e for e in self.events if e.kind == "controller_restarted" and e.time > fact["time"]]
            assert restarts, "no event of the controller's next life"

    def _in_attempt(self, attempt: int) -> list[Strike]:
        return [self.chain.strikes[number] for number, fact in self.fallen.items() if fact["attempt"] == attempt]

    def judge_run(self, reference: FaultedRun | None) -> None:
        """Asserts an undisturbed run's end, the expected restarts, and nothing left over."""
        assert self.state == "SUCCEEDED", self._last_words()
        due = sum(strike.ends_attempt for strike in self.chain.strikes)
        restarts = [event for event in self.events if event.kind == "restarting"]
        assert len(restarts) == due, f"{len(restarts)} restarts for {due} strikes: {[e.message for e in restarts]}"
        history = self.reader.history()
        assert [row["step"] for row in history] == list(range(1, STEPS + 1))
        commits = [event.step for event in self.events if event.kind == "committed"]
        assert len(commits) == len(set(commits)), f"a commit was reported twice: {commits}"
        assert list_checkpoints(self.store, self.name)[-1].step == STEPS
        self.judge_leftovers()
        if reference is not None:
            assert numbers(history) == numbers(reference.reader.history())
            assert_same_weights(self.weights(), reference.weights())

    def judge_leftovers(self) -> None:
        laptop, name = self.laptop, self.name
        wait_for(lambda: not laptop.workers(f"{name}/"), f"the end of every rank: {laptop.workers()}")
        wait_for(lambda: not [one for one in laptop.actors() if one.startswith(f"raypp/{name}")], "no actor")
        assert laptop.groups(f"raypp/{name}") <= {"REMOVED"}
        assert not [pid for pid in self.pids if _is_worker(pid)]
        assert not list(Path("/dev/shm").glob(f"*{name}*"))
        assert not list(Path(tempfile.gettempdir()).glob(f"*{name}*"))

    def weights(self) -> dict[str, Any]:
        return weights(self.store, self.name)

    def known_s(self, strike: Strike) -> float | None:
        """Returns the seconds from a strike to the first report of a failure in its attempt."""
        reported = self.failures_after(strike) if strike.number in self.fallen and strike.ends_attempt else []
        return min(event.time for event in reported) - self.fallen[strike.number]["time"] if reported else None

    def recovery_s(self, strike: Strike) -> float | None:
        """Returns the seconds to the next attempt's first step; None if that was hit before."""
        fact = self.fallen.get(strike.number)
        if fact is None or not strike.ends_attempt:
            return None
        first = [e.time for e in self.events if e.kind == "first_step" and e.attempt == fact["attempt"] + 1]
        return min(first) - fact["time"] if first else None

    def _last_words(self) -> str:
        reported = [f"{event.kind}: {event.message}"[:300] for event in self.events[-6:]]
        return f"{(self.reader.status() or {}).get('error')}; {reported}"


def _is_worker(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return "raypp/" in " ".join(psutil.Process(pid).cmdline())
    return False


def _rows(events: list[Any]) -> list[str]:
    return [f"rank {e.rank} pid {e.details['pid']} step {e.step} {e.details['kind']}: {e.message}" for e in events]


def _known_late(strike: Strike) -> int:
    """Returns how many steps the controller may not know of: those of half a second."""
    return 0 if strike.kind == "raise" and strike.moment not in ("finish",) else STEPS


def reference_chain(shape: str) -> Chain:
    return Chain(f"undisturbed-{WORLD[shape]}", shape, True, ())
