"""One rank of the save benchmark: a process that does as it is told on stdin and answers in JSON, line by line.

`python -m benchmarks.save_rank WRITER RANK WORLD PORT MEGABYTES`; the S3 server is in the environment. A line is
`save N` (one save, nothing beside it) or `train N` (one save, and training goes on until it is durable).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

from benchmarks.save_writers import WIDTH, WRITERS, Answer, Place, Writer, state_bytes, step

_STEP_S = 0.5
_MOST_STEPS = 40


def memory() -> tuple[int, int]:
    """Resident bytes now, and the most since `forget_peak`."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if line[:2] == "Vm")
    return int(lines["VmRSS"].split()[0]) << 10, int(lines["VmHWM"].split()[0]) << 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def save(writer: Writer, number: int) -> Answer:
    """Seconds until it is durable, CPU seconds of this process, and the peak of its memory as a share of its state."""
    forget_peak()
    before, cpu, started = memory()[0], time.process_time(), time.perf_counter()
    writer.begin(number)
    facts = writer.finish()
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    state = state_bytes(writer.stage)
    return {"seconds": seconds, "cpu": cpu, "extra": (memory()[1] - before) / state, "state": state, **facts}


class Training:
    """Steps of about half a second beside which saves go on."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self._x = torch.ones(64, WIDTH)
        self._step()
        cpu = time.thread_time()
        self._step()
        self._x = torch.ones(max(64, int(64 * _STEP_S / (time.thread_time() - cpu))), WIDTH)

    def _step(self) -> float:
        started = time.perf_counter()
        step(self.writer.stage, self.writer.optimizer, self._x)
        return time.perf_counter() - started

    def save(self, number: int) -> Answer:
        """A step's time without a save; how long training stood still; what the save cost training in all: the time
        until it was durable, less what the steps done meanwhile take alone."""
        writer = self.writer
        alone = [self._step() for _ in range(3)]
        started = time.perf_counter()
        writer.begin(number)
        begin = time.perf_counter() - started
        steps = [self._step()]
        while writer.busy() and len(steps) < _MOST_STEPS:
            steps.append(self._step())
        elapsed, stall = time.perf_counter() - started, begin + writer.held_s()
        writer.finish()
        # Before and after: the machine's speed drifts.
        plain = statistics.median([*alone, *(self._step() for _ in range(3))])
        lost = elapsed - len(steps) * plain
        return {"plain": plain, "begin": begin, "stall": stall, "lost": lost, "beside": steps[0]}


def main() -> None:
    torch.set_num_threads(1)
    name, numbers = sys.argv[1], [int(text) for text in sys.argv[2:]]
    # What libraries print must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    writer, training = WRITERS[name](Place(*numbers)), None
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        what, number = line.split()
        if what == "train":
            training = training or Training(writer)
            answer = training.save(int(number))
        else:
            answer = save(writer, int(number))
        print(json.dumps(answer), file=answers, flush=True)
    # Destroying a group whose peer is gone already may hang; nothing is left to be said.
    os._exit(0)


if __name__ == "__main__":
    main()
