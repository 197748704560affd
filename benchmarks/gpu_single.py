"""Speed, memory and MFU of one device.

Trains Llama models of 1B and 8B parameters in bf16 on one device, with every mode of recomputation,
with and without torch.compile, on one long document per row and on packed short ones. The 8B model
has bf16 weights and 8-bit moments, so that it fits into 80 GB. Needs neither Ray nor S3. Without a
CUDA device it trains a toy model on the CPU, which shows that the benchmark runs, not how fast a
GPU is.

MFU is the share of the device's peak that a run's model FLOPs take. Recomputation does not count.
Three formulas are in use, and all three are printed, per token of a row of T tokens:

- `6N`: 6 per parameter that is in a product, so without the input embedding.
- `causal`: 6N, and 6 T per layer and head width for attention to half of the row on average
  (12 T of PaLM, arXiv:2204.02311, appendix B, halved).
- `full`: 6N, and 12 T per layer and head width, as if attention read the whole row. PaLM's formula.

The peak is the data sheet's. `of matmul` is the causal formula as a share of the rate that this
device reaches in a square product of matrices.
"""

import json
import multiprocessing
import re
import statistics
import subprocess
import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.hosts import keys
from benchmarks.surroundings import begin
from benchmarks.tables import head
from benchmarks.throughput import torchrun
from benchmarks.timed_rank import job_of
from raypp.job.job import Job
from raypp.planning.costs import DEVICES
from raypp.planning.flops import head_flops
from raypp.planning.sizes import sizes_of

WARM = 3
MODELS: dict[str, dict[str, Any]] = {
    "8b": {"num_layers": 32, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "ffn_size": 14336,
           "vocab_size": 128256, "rope_theta": 500000.0},
    "1b": {"num_layers": 16, "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 8, "ffn_size": 8192,
           "vocab_size": 128256, "rope_theta": 500000.0, "tie_embeddings": True},
    "toy": {"num_layers": 4, "hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 688,
            "vocab_size": 4096},
}  # fmt: skip
"""Sizes of Llama 3.1 8B and Llama 3.2 1B (their config.json), and of a model for CPUs."""
BATCH = {"8b": (1, 4), "1b": (1, 8), "toy": (2, 4)}
"""Rows of a microbatch and microbatches of a step."""
LESS_MEMORY: dict[str, dict[str, Any]] = {
    "8b": {"train.precision": "bf16_pure", "train.optimizer": {"kind": "adamw", "state": "8bit"}},
}
"""Settings of models whose fp32 weights and moments do not fit. A CPU has no 8b."""


@dataclass(frozen=True)
class Variant:
    """One run: what differs, for the table; a key of MODELS; tokens of a row; keys of the job."""

    name: str
    model: str
    seq_len: int
    settings: dict[str, Any]

    def words(self, precision: str) -> list[str]:
        """Returns the keys of the job, as in `train.steps=5`."""
        rows, microbatches = BATCH[self.model]
        values: dict[str, Any] = {
            "model": {"kind": "llama", **MODELS[self.model]},
            "data.seq_len": self.seq_len,
            "data.document_len": [self.seq_len, self.seq_len],
            "train.micro_batch_size": rows,
            "pipeline.microbatches": microbatches,
            "train.precision": precision,
            "train.compile": False,
            "checkpoint.memory_tier": False,  # its first snapshots would fall into the timed steps
            **LESS_MEMORY.get(self.model, {}),
            **self.settings,
        }
        return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def variants(models: list[str], seq_lens: list[int]) -> list[Variant]:
    """Returns the runs of the table, the reference of each model and length first."""
    found = []
    for model in models:
        for seq_len in seq_lens:
            modes = [(compiled, kept) for compiled in (True, False) for kept in ("full", "selective", "none")]
            for compiled, kept in modes:
                name = f"recomputation {kept}{', compiled' if compiled else ''}"
                settings = {"train.compile": compiled, "train.activation_checkpointing": kept}
                found.append(Variant(name, model, seq_len, settings))
            base = {"train.compile": True, "train.activation_checkpointing": "full"}
            others: dict[str, Any] = {"packed documents": {"data.document_len": [seq_len // 16, seq_len // 2]}}
            if model in LESS_MEMORY:
                others["fp32 moments"] = {"train.optimizer": {"kind": "adamw", "state": "fp32"}}
            else:
                others["fp32 without TF32"] = {"train.precision": "fp32", "train.tf32": False}
            if torch.cuda.is_available():
                others |= {f"attention {kernel}": {"train.attention": kernel} for kernel in ("plain", "flex")}
            for name, changed in others.items():
                found.append(Variant(f"recomputation full, compiled, {name}", model, seq_len, base | changed))
    return found


def run(variant: Variant, precision: str, steps: int) -> dict[str, Any] | str:
    """Runs a variant in a process of its own; returns its figures, or why it has none."""
    arguments = ["--steps", str(steps), "--no-save", *keys(*variant.words(precision))]
    try:
        return torchrun("benchmarks.timed_rank", arguments, ranks=1, alone=False)[0]
    except subprocess.CalledProcessError as error:
        if "out of memory" in error.stderr:
            return "out of memory"
        errors = [line for line in error.stderr.splitlines() if re.match(r"\[rank0\]: \S*Error: ", line)]
        return errors[-1].removeprefix("[rank0]: ")[:120] if errors else f"exit code {error.returncode}"


def model_flops(job: Job) -> dict[str, float]:
    """Returns the FLOPs of forward and backward per token, by formula."""
    model = job.model
    products = sum(layer.multiplied for layer in sizes_of(model).layers) + head_flops(model) / 2
    six_n = 6.0 * products
    attention = 6.0 * model.num_layers * model.num_heads * model.dim_per_head * job.data.seq_len
    return {"6N": six_n, "causal": six_n + attention, "full": six_n + 2 * attention}


def best_product(device: str, precision: str) -> float:
    """Measures the FLOP/s of a square product of matrices: the best of several."""
    size = 8192 if device == "cuda" else 1024
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    wait, best = torch.cuda.synchronize if device == "cuda" else lambda: None, float("inf")
    for _ in range(10):
        wait()
        start = time.perf_counter()
        one @ other
        wait()
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


def data_sheet_rate(precision: str) -> tuple[str, float]:
    """Returns the device's name and its FLOP/s by the data sheet; 0.0 if it is unknown."""
    if not torch.cuda.is_available():
        return "cpu", 0.0
    name = torch.cuda.get_device_name()
    words = name.lower().replace("rtx ", "rtx").split()
    known = next((known for known in DEVICES.values() if known.name in words), None)
    return name, known.tflops[precision] * 1e12 if known is not None else 0.0


def main() -> None:
    cuda = torch.cuda.is_available()
    options = begin(
        __doc__,
        models=(["1b", "8b"] if cuda else ["toy"], "their sizes", MODELS),
        seq_lens=([4096, 32768] if cuda else [256], "tokens of a row"),
        steps=(10, "of each variant"),
        only=("", "variants whose name contains this"),
    )
    device, precision = ("cuda", "bf16") if cuda else ("cpu", "fp32")
    name, sheet = data_sheet_rate(precision)
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # a process that then leaves the device to the runs
        measured = pool.apply(best_product, (device, precision))
    print(f"{name}; a product of matrices in {precision}: {measured / 1e12:.2f} TFLOP/s measured"
          + (f", {sheet / 1e12:.0f} by the data sheet" if sheet else ""))  # fmt: skip
    titles = "model | T | variant | tokens/s | × first | GiB reserved | GiB used | MFU 6N | causal | full | of matmul"
    print(head(titles))
    first: dict[tuple[str, int], float] = {}
    for variant in variants(options.models, options.seq_lens):
        if options.only not in variant.name:
            continue
        cells = f"| {variant.model} | {variant.seq_len} | {variant.name} |"
        found = run(variant, precision, options.steps)
        if isinstance(found, str):
            print(f"{cells} {found} | | | | | | | |", flush=True)
            continue
        rate = statistics.median(t / s for t, s in list(zip(found["tokens"], found["wall"], strict=True))[WARM:])
        reference = first.setdefault((variant.model, variant.seq_len), rate)
        flops = model_flops(job_of(variant.words(precision), world=1, steps=1))
        shares = [f"{rate * each / sheet:.1%}" if sheet else "" for each in flops.values()]
        print(
            f"{cells} {rate:,.0f} | {rate / reference:.2f} | {found['peak_mib'] / 1024:.2f} "
            f"| {found['used_mib'] / 1024:.2f} | {' | '.join(shares)} | {rate * flops['causal'] / measured:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
