"""Measures the costs of a model's parts on one core, in turns, as `raypp plan --measure` does."""

import argparse
import os

import torch

from benchmarks.timed_rank import job_of
from benchmarks.turns import Gate
from raypp.tools.model_costs import open_meter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override a key of the job")
    parser.add_argument("--rounds", type=int, default=1, help="how often a turn times each part on every microbatch")
    arguments = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    gate = Gate()
    with open_meter(job_of(arguments.set, world=1, steps=4)) as meter:
        gate.step_begins()
        while True:
            costs = meter.take(arguments.rounds)
            gate.step_begins(lambda costs=costs: {"costs": costs})  # type: ignore[misc]


if __name__ == "__main__":
    main()
