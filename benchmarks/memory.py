"""Peak memory of the first stage by number of microbatches: `python -m benchmarks.memory`.

1F1B holds at most pp microbatches in flight, GPipe all of them. The figure is the peak resident
memory of a fresh process on CPU.
"""

from __future__ import annotations

import argparse

from benchmarks.surroundings import announce
from benchmarks.throughput import torchrun

COUNTS = (4, 8, 16, 32)
WIDTH = 50


def peak(schedule: str, microbatches: int) -> float:
    settings = [f"pipeline.schedule={schedule}", f"pipeline.microbatches={microbatches}"]
    arguments = ["--steps", "2", *(word for setting in settings for word in ("--set", setting))]
    return float(torchrun("benchmarks.timed_rank", arguments)[0]["peak_mib"])


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    announce()
    found = {schedule: [peak(schedule, count) for count in COUNTS] for schedule in ("1f1b", "gpipe")}
    print("\n| microbatches | " + " | ".join(str(count) for count in COUNTS) + " |\n|---|" + "---|" * len(COUNTS))
    for schedule, values in found.items():
        print(f"| {schedule}, MiB | " + " | ".join(f"{value:.0f}" for value in values) + " |")
    most = max(max(values) for values in found.values())
    print()
    for schedule, values in found.items():
        for count, value in zip(COUNTS, values, strict=True):
            print(f"{schedule:>6} m={count:<3} {'█' * round(WIDTH * value / most)} {value:.0f}")


if __name__ == "__main__":
    main()
