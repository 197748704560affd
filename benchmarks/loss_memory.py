"""Peak memory and time of the projection and the loss: `python -m benchmarks.loss_memory`.

Each row runs in a process of its own: one microbatch through forward and backward, by whole logits,
in chunks, and in chunks with the gradient of the projection computed in the backward (as schedules
with several microbatches in flight need it). The projection, its gradient and AdamW's two moments
exist before; the table shows what the peak of resident memory adds to them.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time

SIZES = ((32_000, 4096), (152_000, 1024), (152_000, 4096))
"""Vocabulary, and tokens of the microbatch."""
MODES = ("whole logits", "chunks", "chunks, later")


def measure(mode: str, vocabulary: int, tokens: int, hidden: int, threads: int) -> None:
    """Prints GiB that the peak adds, seconds, and the loss."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch
    from torch.nn.functional import linear

    from raypp.models.loss import Targets, loss_sum_in_chunks, token_loss_sum

    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(vocabulary, hidden, generator=generator).mul_(0.02))
    weight.grad = torch.zeros_like(weight).fill_(1.0)
    moments = [torch.ones_like(weight) for _ in range(2)]
    x = torch.randn(1, tokens, hidden, generator=generator).requires_grad_()
    labels = torch.randint(0, vocabulary, (1, tokens), generator=generator)
    before, start = _peak_kib(), time.perf_counter()
    if mode == "whole logits":
        loss = token_loss_sum(linear(x, weight), labels)
    else:
        loss = loss_sum_in_chunks(x, weight, Targets(labels, backward_next=mode == "chunks"))
    loss.backward()
    seconds, added = time.perf_counter() - start, (_peak_kib() - before) / 2**20
    assert len(moments) == 2  # still allocated
    print(f"{added:.2f} {seconds:.1f} {float(loss) / tokens:.6f}")


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Measures every size and mode, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", nargs=3, metavar=("MODE", "VOCABULARY", "TOKENS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        measure(given.one[0], int(given.one[1]), int(given.one[2]), given.hidden, given.threads)
        return
    from benchmarks.surroundings import announce

    announce(f"hidden size {given.hidden}, fp32, {given.threads} thread(s)")
    print("| vocabulary | tokens | way | GiB added | s | loss |\n|---|---|---|---|---|---|")
    for vocabulary, tokens in SIZES:
        for mode in MODES:
            common = [sys.executable, "-m", "benchmarks.loss_memory", "--hidden", str(given.hidden)]
            command = [*common, "--threads", str(given.threads), "--one", mode, str(vocabulary), str(tokens)]
            found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            print(f"| {vocabulary:,} | {tokens:,} | {mode} | {' | '.join(found)} |", flush=True)


if __name__ == "__main__":
    main()
