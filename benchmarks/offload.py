"""What offloading costs and moves: one rank on this machine's device, a step's time and peak.

    python -m benchmarks.offload [--steps 6] [--layers 8]

On a CPU host memory is the device's: the figures show what the copies cost, not what is saved. What
would be saved is counted: the bytes that are in host memory between forward and backward, and
between two updates.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

import torch

from benchmarks.surroundings import announce
from raypp.ports import free_port
from raypp.records import Requests
from raypp.spec.load import parse_job
from raypp.train.assemble import assemble
from raypp.train.own_seat import local_seat
from raypp.train.step import StepRunner, Stopwatch

CASES: dict[str, dict[str, Any]] = {
    "full recomputation": {"activation_checkpointing": "full"},
    "inputs of layers offloaded": {"activation_checkpointing": "offload"},
    "state and masters offloaded": {"activation_checkpointing": "full", "optimizer": {"offload": True}},
    "both offloaded": {"activation_checkpointing": "offload", "optimizer": {"offload": True}},
}


def document(layers: int, device: str, train: dict[str, Any]) -> dict[str, Any]:
    large = device == "cuda"
    return {
        "name": "offload",
        "model": {
            "kind": "llama", "num_layers": layers, "hidden_size": 2048 if large else 256,
            "num_heads": 16 if large else 4, "num_kv_heads": 4, "ffn_size": 5632 if large else 704, "vocab_size": 8192,
        },
        "data": {"kind": "synthetic", "num_documents": 2000, "document_len": [200, 512], "seq_len": 512},
        "pipeline": {"microbatches": 4, "schedule": "gpipe", "variable_seq_len": "off"},
        "train": {"steps": 100, "precision": "bf16", "micro_batch_size": 4, **train},
        "resources": {"device": device},
    }  # fmt: skip


def measured(source: dict[str, Any], steps: int, device: str) -> dict[str, float]:
    job = parse_job(source)
    with assemble(job, local_seat(0, 1, free_port(), job, device=device), hang_timeout_s=60) as rank:
        runner, times, tokens, most = StepRunner(rank), [], 0, 0
        offload: Any = rank.built.runtime.offload

        def mark(action: str) -> None:
            nonlocal most
            kept = [] if offload is None else [one for ones in offload._kept.values() for one in ones]
            most = max(most, sum(one.host.nbytes for one in kept if one.host is not None))

        rank.built.runtime.mark = mark
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for step in range(1, steps + 1):
            watch = Stopwatch(rank.device)
            began = time.perf_counter()
            tokens = runner.run(step, runner.read(Requests(), watch), watch).tokens
            times.append(time.perf_counter() - began)
        state = sum(tensor.nbytes for tensor in getattr(rank.optimizer, "_host", {}).values())
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    seconds = statistics.median(times[2:])
    return {
        "step_s": round(seconds, 3), "tokens_per_s": round(tokens / seconds), "peak_MB": round(peak / 1e6, 1),
        "activations_in_host_memory_MB": round(most / 1e6, 2), "state_in_host_memory_MB": round(state / 1e6, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    announce(device)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name, train in CASES.items():
        found = measured(document(options.layers, device, train), options.steps, device)
        print(f"{name:30}", json.dumps(found))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
