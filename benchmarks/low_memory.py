"""Compares loss, memory and step time by precision and optimizer state: `python -m
benchmarks.low_memory`.

Loss: the quickstart's model on the King James New Testament, in one process on one thread, with the
same rows in the same order. Memory: peak of a larger model on one rank, as `memory_prediction`
measures it, beside what `raypp plan` predicts. Time: CPU seconds per step of the runs that give the
loss, so that other processes count little. All on CPUs: without AVX512_BF16 or AMX, bf16 products
are slower than fp32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.memory_prediction import job_of, measured
from benchmarks.surroundings import announce
from raypp.planning.plan import make_plan
from raypp.ports import free_port
from raypp.records import StepReport
from raypp.spec.load import parse_job

_JOBS = Path(__file__).parents[1] / "jobs"
_PURE, _8BIT = "train.precision=bf16_pure", "train.optimizer={state: 8bit}"
WAYS: dict[str, list[str]] = {
    "fp32": [],
    "bf16": ["train.precision=bf16"],
    "bf16_pure": [_PURE],
    "bf16_pure, rounded to nearest": [_PURE],
    "bf16_pure, gradients summed in bf16": [_PURE, "train.reduce_dtype=bf16"],
    "8bit": [_8BIT],
    "bf16_pure and 8bit": [_PURE, _8BIT],
}
_NEAREST = "bf16_pure, rounded to nearest"
"""Not an option of raypp: shows what stochastic rounding is for."""
_MEMORY_MODEL = ["mesh={pp: 1}", "model.num_layers=4"]


def train(way: str, steps: int, seq_len: int, lr: float) -> dict[str, Any]:
    """Trains in this process; returns the losses, and CPU seconds per step."""
    import torch

    import raypp.train.bf16_weights
    from raypp.measure.parity import train_some_steps
    from raypp.train.own_seat import local_seat

    torch.set_num_threads(1)
    if way == _NEAREST:
        to_nearest = {"round_to_bf16": lambda values, bits: values.to(torch.bfloat16)}
        vars(raypp.train.bf16_weights).update(to_nearest)
    document = yaml.safe_load((_JOBS / "quickstart.yaml").read_text())
    document["data"]["path"] = str(_JOBS / "data" / "kjv-new-testament.txt")
    document["mesh"], document["pipeline"] = {}, {"microbatches": 4}
    document["data"]["seq_len"], document["train"]["micro_batch_size"] = seq_len, 1
    document["resources"], document["checkpoint"] = {"device": "cpu"}, {"url": "/tmp/unused"}
    document["train"]["steps"] = steps
    for setting in WAYS[way]:
        key, _, value = setting.partition("=")
        found = yaml.safe_load(value)
        name = key.partition(".")[2]
        document["train"][name] = document["train"][name] | found if isinstance(found, dict) else found
    document["train"]["optimizer"]["lr"] = lr
    job = parse_job(document)
    started = [0.0]

    def before(step: int, _runner: Any) -> None:
        if step == 2:  # the first step allocates
            started[0] = time.process_time()

    reports: list[StepReport] = train_some_steps(
        job, local_seat(0, 1, free_port(), job), steps, lambda name, tensors: None, before=before
    )
    cpu_s = (time.process_time() - started[0]) / (steps - 1)
    return {"losses": [one.loss for one in reports], "cpu_s": cpu_s, "tokens": reports[-1].tokens}


def in_own_process(way: str, steps: int, seq_len: int, lr: float) -> dict[str, Any]:
    """Runs `train` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.low_memory", "--steps", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, "--seq-len", str(seq_len), "--lr", str(lr), "--here", way],
        check=False, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{way} failed:\n{done.stderr[-4000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seq-len", type=int, default=128, help="tokens of a row; a step has 4 microbatches of 1")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate of the loss runs")
    parser.add_argument("--only", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="WAY")
    parser.add_argument("--parts", nargs="+", choices=("loss", "memory"), default=("loss", "memory"))
    parser.add_argument("--here", choices=list(WAYS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(train(options.here, options.steps, options.seq_len, options.lr)))
        return
    announce(f"learning rate {options.lr}")
    if "loss" in options.parts:
        last = min(50, options.steps)
        print(f"| way | loss, mean of the last {last} of {options.steps} steps | last step | CPU s per step "
              "| tokens per CPU s |\n|---|---|---|---|---|", flush=True)  # fmt: skip
        for way in options.only:
            found = in_own_process(way, options.steps, options.seq_len, options.lr)
            losses = found["losses"]
            print(f"| {way} | {statistics.mean(losses[-last:]):.4f} | {losses[-1]:.4f} | {found['cpu_s']:.2f} "
                  f"| {found['tokens'] / found['cpu_s']:.0f} |", flush=True)  # fmt: skip
    if "memory" in options.parts:
        print("\n| way | measured peak, MB | predicted, MB | predicted ÷ measured | weights | gradients | state |\n"
              "|---|---|---|---|---|---|---|", flush=True)  # fmt: skip
        for way in options.only:
            if way == _NEAREST:
                continue
            job = job_of([*_MEMORY_MODEL, *WAYS[way]])
            (plan,) = make_plan(job).memory
            (rank,) = measured(job, 3)
            peak = rank["peak"] - rank["before"]
            parts = " | ".join(f"{size / 1e6:.0f}" for size in (plan.weights, plan.gradients, plan.optimizer))
            print(
                f"| {way} | {peak / 1e6:.0f} | {plan.total / 1e6:.0f} | {plan.total / peak:.2f} | {parts} |", flush=True
            )


if __name__ == "__main__":
    main()
