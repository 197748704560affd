"""Compares predicted with measured peak memory per rank: `python -m benchmarks.memory_prediction`.

Every configuration runs three real steps under torchrun on CPU. A rank's figure is the peak of its
resident memory (VmHWM) over these steps, less what the process had when its groups were there and
its model was not. The prediction is that of `raypp plan`. Nothing is fitted to the runs. It takes
about 8 minutes and at most 4 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.surroundings import announce
from raypp.planning.plan import make_plan
from raypp.ports import free_port
from raypp.spec.job import Job
from raypp.spec.load import parse_job

GOAL = 0.1
_MB = 1e6

JOB: dict[str, Any] = {
    "name": "memory",
    "model": {
        "kind": "llama", "num_layers": 8, "hidden_size": 768, "num_heads": 12, "num_kv_heads": 4,
        "ffn_size": 2048, "vocab_size": 8192,
    },
    "data": {"kind": "synthetic", "document_len": [256, 256], "seq_len": 256, "num_documents": 500},
    "mesh": {"pp": 2},
    "pipeline": {"schedule": "1f1b", "microbatches": 4, "lookahead": 0},
    "train": {"steps": 1000, "micro_batch_size": 1},
    "resources": {"device": "cpu"},
    "checkpoint": {"url": "/tmp/unused", "every_steps": 0},
}  # fmt: skip

MOE = (
    "model={kind: mixtral, num_layers: 4, hidden_size: 512, num_heads: 8, num_kv_heads: 4, "
    "num_experts: 4, experts_per_token: 2, expert_ffn_size: 1024, vocab_size: 8192}"
)
SMALL = "model.num_layers=4"
CONFIGURATIONS: list[list[str]] = [
    ["mesh={pp: 1}", SMALL],
    [],
    ["train.activation_checkpointing=full", "train.micro_batch_size=2"],
    ["train.activation_checkpointing=selective", "train.micro_batch_size=2"],
    ["pipeline.schedule=gpipe", "pipeline.microbatches=6"],
    ["pipeline.lookahead=2", "pipeline.microbatches=6"],
    ["pipeline.schedule=interleaved_1f1b", "pipeline.stages_per_rank=2"],
    ["pipeline.schedule=zbv", "pipeline.stages_per_rank=2"],
    ["mesh={pp: 1, fsdp: 2}", SMALL],
    ["mesh={pp: 2, fsdp: 2}"],
    ["mesh={pp: 1, fsdp: 2, reshard_after_forward: true}", SMALL],
    ["mesh={pp: 1, dp_replicate: 2}", SMALL],
    ["mesh={pp: 1, cp: 2, cp_style: ring}", SMALL, "data.seq_len=512"],
    ["mesh={pp: 1, cp: 2, cp_style: ulysses}", SMALL, "data.seq_len=512"],
    ["mesh={pp: 1, fsdp: 2, ep: 2}", MOE],
    ["mesh={pp: 2}", MOE],
    ["train.precision=bf16"],
    ["mesh={pp: 1, fsdp: 2}", SMALL, "train.precision=bf16"],
    ["model.vocab_size=50000", "model.hidden_size=256", "model.num_heads=4", "model.num_kv_heads=4"],
    ["model.tie_embeddings=true", "model.vocab_size=32000"],
    ["pipeline.wire={compression: int8}", "pipeline.lookahead=1"],
    ["pipeline.schedule=zbv", "pipeline.stages_per_rank=2", "pipeline.lookahead=3", "pipeline.microbatches=8"],
    ["pipeline.schedule=dualpipev", "pipeline.stages_per_rank=2", "pipeline.lookahead=1", "pipeline.microbatches=8"],
]


def job_of(settings: list[str]) -> Job:
    """Returns the benchmark's job with keys changed, each `section.key=value` or `section=…`."""
    document: dict[str, Any] = {section: dict(value) if isinstance(value, dict) else value
                                for section, value in JOB.items()}  # fmt: skip
    for setting in settings:
        key, _, value = setting.partition("=")
        section, _, name = key.partition(".")
        if name:
            document[section][name] = yaml.safe_load(value)
        else:
            document[section] = {**({} if section == "model" else document[section]), **yaml.safe_load(value)}
    length = document["data"]["seq_len"]
    document["data"]["document_len"] = [length, length]
    return parse_job(document)


def measured(job: Job, steps: int) -> list[dict[str, int]]:
    """Runs a job under torchrun; returns what each rank measured."""
    from raypp.spec.load import job_document

    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/out"
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(job.mesh.world),
             "--master-addr", "127.0.0.1", "--master-port", str(free_port()),
             "-m", "benchmarks.memory_rank", "--steps", str(steps), "--job", json.dumps(job_document(job))],
            check=False, capture_output=True, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "BENCH_OUT": out,
                 "BENCH_STORE": f"{folder}/store"},
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"the run failed:\n{done.stderr[-4000:]}")
        return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(job.mesh.world)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    everything = range(len(CONFIGURATIONS))
    parser.add_argument("--only", nargs="+", type=int, choices=everything, default=list(everything), metavar="N")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    announce()
    print("| | configuration | rank | measured, MB | predicted, MB | predicted ÷ measured | parts, MB |")
    print("|---|---|---|---|---|---|---|", flush=True)
    errors = []
    for index in options.only:
        settings = CONFIGURATIONS[index]
        job = job_of(settings)
        memory = make_plan(job).memory
        found = measured(job, options.steps)
        for pp, plan in enumerate(memory):
            peaks = [one["peak"] - one["before"] for one in found if one["pp"] == pp]
            peak = max(peaks)
            errors.append(abs(plan.total / peak - 1))
            parts = ", ".join(f"{name} {size / _MB:.0f}" for name, size in plan.as_dict().items()
                              if size and name != "total")  # fmt: skip
            words = ", ".join(settings) if pp == 0 else ""
            print(f"| {index} | {words} | pp{pp} | {' '.join(f'{one / _MB:.0f}' for one in peaks)} "
                  f"| {plan.total / _MB:.0f} | {plan.total / peak:.2f} | {parts} |", flush=True)  # fmt: skip
    near = sum(error <= GOAL for error in errors)
    print(f"\nwithin {GOAL:.0%}: {near} of {len(errors)} ranks; median error {statistics.median(errors):.0%}, "
          f"largest {max(errors):.0%}")  # fmt: skip


if __name__ == "__main__":
    main()
