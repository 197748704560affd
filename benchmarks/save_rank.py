"""One rank of the save benchmark: reads commands from stdin and answers in JSON lines.

Run it with `python -m benchmarks.save_rank WRITER RANK WORLD PORT MEGABYTES`; the environment has
the S3 server. A command is `save N` (one save and nothing else) or `train N` (one save, while
training continues until it is durable).
"""

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
    """Returns the resident bytes now, and their peak since `forget_peak`."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if line[:2] == "Vm")
    return int(lines["VmRSS"].split()[0]) << 10, int(lines["VmHWM"].split()[0]) << 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def save(writer: Writer, number: int) -> Answer:
    """Runs one save. Returns the seconds until it is durable, the CPU seconds of this process, and
    its peak memory as a fraction of its state."""
    forget_peak()
    before, cpu, started = memory()[0], time.process_time(), time.perf_counter()
    writer.begin(number)
    facts = writer.finish()
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    state = state_bytes(writer.stage)
    return {"seconds": seconds, "cpu": cpu, "extra": (memory()[1] - before) / state, "state": state, **facts}


class Training:
    """Training with steps of about half a second, during which saves run."""

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
        """Runs one save during training. Returns the time of a step without a save, the stall of
        training, and the total cost to training: the time until the save was durable, minus the
        time that the steps done meanwhile take without it."""
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
        # Measure before and after, because the machine's speed drifts.
        plain = statistics.median([*alone, *(self._step() for _ in range(3))])
        lost = elapsed - len(steps) * plain
        return {"plain": plain, "begin": begin, "stall": stall, "lost": lost, "beside": steps[0]}


def main() -> None:
    torch.set_num_threads(1)
    name, numbers = sys.argv[1], [int(text) for text in sys.argv[2:]]
    # Output of libraries must not mix with the answers.
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
    # Destroying a group whose peer is already gone may hang, and nothing is left to do.
    os._exit(0)


if __name__ == "__main__":
    main()
