"""Memory and speed of quantised bases under adapters: `python -m benchmarks.quantised_base`.

Each row runs in a process of its own, on one rank. The first table is of loading: a model is read
from Hugging Face's files in bf16. It compares the bytes of the frozen weights with the plan's, and
shows how much the peak of resident memory exceeds them meanwhile. The second is of training
adapters: tokens/s, and the peak of resident memory. With `--against bitsandbytes` (not a dependency
of raypp: install it first) the rows are compared with its nf4.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODEL = {
    "kind": "llama", "num_layers": 2, "hidden_size": 2048, "num_heads": 16, "num_kv_heads": 4, "ffn_size": 5632,
    "vocab_size": 4096,
}  # fmt: skip
BASES = (("bf16", "bf16"), ("bf16", "int8"), ("bf16", "nf4"), ("fp32", "fp32"), ("fp32", "int8"), ("fp32", "nf4"))
"""train.precision and model.lora.base."""
STEPS = 3


def _job(precision: str, base: str, tokens: int) -> Any:
    from raypp.spec.load import parse_job

    return parse_job(
        {
            "name": "base",
            "model": {**MODEL, "lora": {"rank": 16, "base": base}},
            "data": {"kind": "synthetic", "document_len": [tokens, tokens], "seq_len": tokens},
            "pipeline": {"microbatches": 1},
            "train": {"steps": STEPS, "micro_batch_size": 1, "precision": precision},
        }
    )


def write_model(folder: Path) -> None:
    """Writes the model with random weights in bf16."""
    import json

    import torch
    from safetensors.torch import save_file

    from raypp.hf.config import config_from_options
    from raypp.hf.names import model_tensors

    options = _job("fp32", "fp32", 8).model.model_copy(update={"lora": None})
    tensors = {name: torch.randn(shape).mul_(0.02).bfloat16() for name, shape in model_tensors(options).items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps(config_from_options(options, dtype="bfloat16", context=64, eos_id=0))
    )


def loading(precision: str, base: str, folder: str) -> str:
    """Loads the model; returns MiB of frozen weights, by plan, and of the peak beyond; seconds."""
    import torch

    from raypp.hf.initial_weights import load_from_hf
    from raypp.models.quantised import store_rest
    from raypp.models.stage import build_stage
    from raypp.parallel.apply import compute_dtype
    from raypp.planning.memory import base_bytes

    job = _job(precision, base, 8)
    layers = range(job.model.num_layers)
    stage = build_stage(job.model, layers, first=True, last=True)
    store_rest(stage, torch.bfloat16 if base == "bf16" else compute_dtype(job))
    stage.to_empty(device="cpu")
    frozen = [parameter for parameter in stage.parameters() if not parameter.requires_grad]
    for parameter in stage.parameters():
        parameter.data.zero_()  # the pages are there before the load begins
    before, start = _peak_kib(), time.perf_counter()
    load_from_hf(folder, [stage], frozen=True)
    seconds, added = time.perf_counter() - start, (_peak_kib() - before) / 2**10
    held = sum(parameter.numel() * parameter.element_size() for parameter in frozen)
    rest = torch.empty(0, dtype=compute_dtype(job)).element_size()
    planned = base_bytes(job.model, layers, first=True, last=True, rest=2 if base == "bf16" else rest)
    return f"{held / 2**20:.2f} {planned / 2**20:.2f} {added:.0f} {seconds:.1f}"


def steps(precision: str, base: str, tokens: int) -> str:
    """Trains; returns tokens/s of the fastest step after the first, and MiB of the peak."""
    from raypp.measure.parity import train_some_steps
    from raypp.ports import free_port
    from raypp.train.own_seat import local_seat

    job = _job(precision, base, tokens)
    start = _peak_kib()
    reports = train_some_steps(job, local_seat(0, 1, free_port(), job), STEPS, lambda name, tensors: None)
    rate = max(report.tokens_per_s for report in reports[1:])
    return f"{rate:.0f} {(_peak_kib() - start) / 2**10:.0f} {reports[-1].loss:.5f}"


def against_bitsandbytes() -> None:
    """Compares codes, errors and times of nf4 on three kinds of weights."""
    import torch
    from bitsandbytes import functional

    from raypp.models.quantised_rows import dequantise_rows, quantise_rows

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = (1024, 4096)
    normal = torch.randn(shape)
    kinds = {
        "normal": normal,
        "Student t, 3 degrees": torch.distributions.StudentT(3.0).sample(shape),
        "normal, 0.2 % of columns × 50": normal * (1 + 49 * (torch.rand(4096) < 0.002)),
    }
    print("| weights | equal codes | error | bitsandbytes | its fp32 scales |\n|---|---|---|---|---|")
    for name, weights in kinds.items():
        stored = quantise_rows(weights, "nf4")
        single, scales = functional.quantize_4bit(weights, blocksize=64, quant_type="nf4", compress_statistics=False)
        double, nested = functional.quantize_4bit(weights, blocksize=64, quant_type="nf4", compress_statistics=True)
        equal = (stored[:, :2048].reshape(-1) == single.view(-1)).float().mean()
        found = (
            dequantise_rows(stored, "nf4", 4096, torch.float32),
            functional.dequantize_4bit(double, nested),
            functional.dequantize_4bit(single, scales),
        )
        errors = [f"{float((back - weights).norm() / weights.norm()):.5f}" for back in found]
        print(f"| {name} | {float(equal):.7f} | {' | '.join(errors)} |")
    ways = {
        "to bytes": (
            lambda: quantise_rows(normal, "nf4"),
            lambda: functional.quantize_4bit(normal, blocksize=64, quant_type="nf4", compress_statistics=True),
        ),
        "to weights": (
            lambda: dequantise_rows(stored, "nf4", 4096, torch.float32),
            lambda: functional.dequantize_4bit(double, nested),
        ),
    }
    print("\n| ms, one thread, fp32 | raypp | bitsandbytes |\n|---|---|---|")
    for name, (ours, theirs) in ways.items():
        print(f"| {name} | {_milliseconds(ours):.1f} | {_milliseconds(theirs):.1f} |")


def _milliseconds(function: Any) -> float:
    times = []
    for _ in range(7):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Measures every base, and prints two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a microbatch")
    parser.add_argument("--against", choices=["bitsandbytes"])
    parser.add_argument("--one", nargs=4, metavar=("TABLE", "PRECISION", "BASE", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        table, precision, base, folder = given.one
        print(loading(precision, base, folder) if table == "loading" else steps(precision, base, given.tokens))
        return
    from benchmarks.surroundings import announce

    announce()
    if given.against:
        against_bitsandbytes()
        return
    heads = {
        "loading": "| precision | base | MiB | by plan | MiB added by loading | s |\n|---|---|---|---|---|---|",
        "steps": "| precision | base | tokens/s | MiB at the peak | loss |\n|---|---|---|---|---|",
    }
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for table, head in heads.items():
            print(head, flush=True)
            for precision, base in BASES:
                command = [sys.executable, "-m", "benchmarks.quantised_base", "--tokens", str(given.tokens)]
                command += ["--one", table, precision, base, folder]
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                told = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
                print(f"| {precision} | {base} | {' | '.join(told.split())} |", flush=True)
            print()


if __name__ == "__main__":
    main()
