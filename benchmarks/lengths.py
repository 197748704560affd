"""The gain from negotiating the length of every microbatch, on real text.

Run it with `python -m benchmarks.lengths`. Two pipeline ranks train on the New Testament in bytes,
with lengths per microbatch, lengths per step, and the static maximum; with packed rows, and with
one document per row.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from benchmarks.sizes import MICROBATCHES
from benchmarks.surroundings import announce
from benchmarks.throughput import WARM, torchrun

TEXT = Path(__file__).parents[1] / "jobs" / "data" / "kjv-new-testament.txt"
MODES = ("microbatch", "step", "off")


def tokens_per_second(mode: str, packing: bool, seq_len: int, steps: int) -> float:
    settings = [
        "data.kind=text", f"data.path={TEXT}", f"data.seq_len={seq_len}", f"data.packing={str(packing).lower()}",
        f"pipeline.variable_seq_len='{mode}'", f"pipeline.microbatches={MICROBATCHES}",
    ]  # fmt: skip
    arguments = ["--steps", str(steps), *(word for setting in settings for word in ("--set", setting))]
    rank = torchrun("benchmarks.timed_rank", arguments)[0]
    pairs = list(zip(rank["tokens"], rank["wall"], strict=True))[WARM:]
    return sum(tokens for tokens, _ in pairs) / sum(seconds for _, seconds in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    announce()
    cases = [("packed rows of 256", True, 256), ("a document per row, at most 384", False, 384)]
    print(
        "\n| data | " + " | ".join(f"{mode}, tokens/s" for mode in MODES) + " | microbatch ÷ step | microbatch ÷ off |"
    )
    print("|---|---|---|---|---|---|")
    for name, packing, seq_len in cases:
        rates: dict[str, list[float]] = {mode: [] for mode in MODES}
        for _ in range(options.rounds):
            for mode in MODES:
                rates[mode].append(tokens_per_second(mode, packing, seq_len, options.steps))
        ratios = [
            statistics.median(a / b for a, b in zip(rates["microbatch"], rates[other], strict=True))
            for other in ("step", "off")
        ]
        print(
            f"| {name} | " + " | ".join(f"{statistics.median(rates[mode]):,.0f}" for mode in MODES)
            + f" | {ratios[0]:.2f} | {ratios[1]:.2f} |"
        )  # fmt: skip


if __name__ == "__main__":
    main()
