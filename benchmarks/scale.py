"""What networks can sustain, by simulation: `python -m benchmarks.scale`. Every number is computed.

Models run on 8 to 1,024 GPUs, eight per node, connected by 1 to 100 Gbit/s Ethernet with one port
per node. For every number of GPUs and rate, it prints the best mesh, schedule and lookahead that
`raypp plan --search` finds with 1F1B, as a fraction of the speed of the same GPUs with free links,
and the same for the best mesh without a pipeline (pp 1).
"""

from __future__ import annotations

import argparse
from itertools import product
from typing import Any

from benchmarks.surroundings import announce
from raypp.errors import RayppError
from raypp.planning.check import check_plan
from raypp.planning.costs import DEVICES, GIB, computed_costs
from raypp.planning.forecast import Forecast, forecast
from raypp.planning.machines import Machines
from raypp.spec.job import Job
from raypp.spec.load import parse_job

LLAMA_8B = {"kind": "llama", "num_layers": 32, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8,
            "ffn_size": 14336, "vocab_size": 128256}  # fmt: skip
LLAMA_70B = {**LLAMA_8B, "num_layers": 80, "hidden_size": 8192, "num_heads": 64, "ffn_size": 28672}
MODELS = {"8B": (LLAMA_8B, "rtx4090"), "70B": (LLAMA_70B, "h100")}
RATES = (1.0, 10.0, 25.0, 100.0)
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
PER_NODE = 8
LATENCY_S = 5e-5
TOKENS_PER_BATCH = 4 * 1024 * 1024
SEQ_LEN = 4096


def job_of(model: dict[str, Any], pp: int, fsdp: int, replicas: int, microbatches: int, reshard: bool) -> Job:
    return parse_job(
        {
            "name": "scale",
            "model": model,
            "data": {"kind": "synthetic", "seq_len": SEQ_LEN},
            "mesh": {"pp": pp, "fsdp": fsdp, "dp_replicate": replicas, "reshard_after_forward": reshard},
            "pipeline": {"schedule": "1f1b", "microbatches": microbatches},
            "train": {"precision": "bf16", "micro_batch_size": 1, "activation_checkpointing": "full"},
        }
    )


def best(name: str, gpus: int, gbps: float | None, *, pipeline: bool) -> tuple[Job, Forecast] | None:
    """Returns the fastest mesh that fits, with or without a pipeline."""
    model, kind = MODELS[name]
    device, rows = DEVICES[kind], TOKENS_PER_BATCH // SEQ_LEN
    found: list[tuple[Job, Forecast]] = []
    for pp in (2, 4, 8, 16, 32) if pipeline else (1,):
        data = gpus // pp
        if pp > gpus or gpus % pp or rows % data:
            continue
        microbatches = rows // data
        if microbatches < pp or 2 * pp * microbatches > 8_192:
            continue
        shards = sorted({data, min(data, PER_NODE), min(data, max(1, PER_NODE // pp))})
        for fsdp, reshard in product(shards, (False, True) if pp == 1 else (False,)):
            if data % fsdp:
                continue
            job = job_of(model, pp, fsdp, data // fsdp, microbatches, reshard)
            if check_plan(job):
                continue
            machines = Machines.alike(gpus, min(PER_NODE, gpus), gbps, LATENCY_S, inside_gbps=200.0)
            try:
                cast = forecast(job, machines, computed_costs(job, device), device.memory)
            except RayppError:
                continue
            if cast.peak_memory <= device.memory:
                found.append((job, cast))
    return min(found, key=lambda entry: entry[1].step_s) if found else None


def row(name: str, gpus: int) -> str:
    free = best(name, gpus, None, pipeline=True)
    single = best(name, gpus, None, pipeline=False)
    if free is None:
        return f"| {name} | {gpus} | does not fit |" + " |" * len(RATES)
    fastest = max(one[1].tokens_per_s for one in (free, single) if one is not None)
    cells = []
    for gbps in RATES:
        with_pp, without = (best(name, gpus, gbps, pipeline=wanted) for wanted in (True, False))
        if with_pp is None:
            cells.append("–")
            continue
        job, cast = with_pp
        mesh = f"pp {job.mesh.pp}, fsdp {job.mesh.fsdp}, dp {job.mesh.dp_replicate}, la {cast.lookahead}"
        other = f"; pp 1: {without[1].tokens_per_s / fastest:.0%}" if without else ""
        cells.append(f"**{cast.tokens_per_s / fastest:.0%}** ({mesh}){other}")
    return f"| {name} | {gpus} | {fastest / gpus:,.0f} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--gpus", nargs="*", type=int, default=list(GPUS))
    options = parser.parse_args()
    announce()
    print(f"\ncomputed; {TOKENS_PER_BATCH:,} tokens a batch in rows of {SEQ_LEN}, bf16, full recomputation,")
    print(f"{PER_NODE} GPUs and one port per node, 200 Gbit/s inside a node; pp 1 is missing where it does not fit")
    for name in options.models:
        kind = DEVICES[MODELS[name][1]]
        print(f"{name}: {kind.name}, {kind.share:.0%} of {kind.tflops['bf16']:g} TFLOP/s, {kind.memory // GIB} GiB")
    rates = " | ".join(f"{rate:g} Gbit/s" for rate in RATES)
    print(f"\n| model | GPUs | tokens/s per GPU, free links | {rates} |")
    print("|---|---|---|" + "---|" * len(RATES))
    for name in options.models:
        for gpus in options.gpus:
            print(row(name, gpus), flush=True)


if __name__ == "__main__":
    main()
