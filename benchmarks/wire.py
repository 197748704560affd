"""What compressed messages cost in loss and save in bytes, on real text.

It trains the same job with pp 2 on two CPU ranks once per wire format, from the same weights on the
same rows, evaluates the final weights on held-out text, and prints the losses as a table. The row
of another seed shows how large a difference by chance is. The figures do not depend on the load of
the machine.
"""

import json
import multiprocessing
import os
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.surroundings import begin
from benchmarks.tables import head
from raypp.job.load import parse_job
from raypp.planning.decide import decide
from raypp.ports import free_port
from raypp.rank.own_seat import local_seat
from raypp.rank.rank import run_rank
from raypp.records import Event, Requests, StepReport

WIRES: dict[str, dict[str, Any]] = {
    "as computed (fp32)": {},
    "bf16": {"dtype": "bf16"},
    "int8": {"compression": "int8"},
    "int8 / bf16": {"compression": {"activations": "int8", "gradients": "bf16"}},
}
"""Wire formats: name (activations / gradients) and `pipeline.wire`."""
OTHER_SEED = "as computed, another seed"
LAST = 10
"""The final training loss is the mean over this many steps."""


class Losses:
    """A reporter that collects losses, bytes and the evaluation."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {"loss": [], "bytes": []}

    def phase(self, name: str, detail: str = "", reached: object = None) -> None:
        pass

    def step(self, report: StepReport) -> None:
        self.figures["loss"].append(report.loss)
        self.figures["bytes"].append(report.wire_bytes)

    def event(self, event: Event) -> None:
        if event.kind == "evaluated":
            self.figures["held_out"] = event.details["loss"]

    def requests(self) -> Requests:
        return Requests()


def document(wire: dict[str, Any], steps: int, seed: int) -> dict[str, Any]:
    return {
        "name": "wire",
        "model": {"kind": "llama", "num_layers": 6, "hidden_size": 160, "num_heads": 4, "num_kv_heads": 2,
                  "ffn_size": 432, "vocab_size": 320},
        "data": {"kind": "text", "path": str(Path(__file__).parents[1] / "jobs/data/kjv-new-testament.txt"),
                 "seq_len": 128, "eval": {"fraction": 0.01}},
        "mesh": {"pp": 2},
        "pipeline": {"microbatches": 4, "lookahead": 1, "wire": wire},
        "train": {"steps": steps, "micro_batch_size": 4, "seed": seed, "optimizer": {"kind": "adamw", "lr": 2.0e-3},
                  "lr_schedule": {"kind": "cosine", "warmup_steps": 10, "min_ratio": 0.1}, "eval_every_steps": steps},
        "checkpoint": {"every_steps": 0, "memory_tier": False},
    }  # fmt: skip


def rank(number: int, world: int, port: int, job: dict[str, Any], out: str) -> None:
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    losses, parsed = Losses(), parse_job(job)
    run_rank(decide(parsed), local_seat(number, world, port, parsed), losses)
    if number == 0:
        Path(out).write_text(json.dumps(losses.figures))


def train(job: dict[str, Any], world: int, name: str) -> dict[str, Any]:
    """Runs one training on so many CPU ranks; returns its losses, bytes and held-out loss."""
    context, port = multiprocessing.get_context("spawn"), free_port()
    with TemporaryDirectory() as folder:
        job = {**job, "checkpoint": {**job["checkpoint"], "url": f"{folder}/store"}}
        out = f"{folder}/out"
        given = [(number, world, port, job, out) for number in range(world)]
        ranks = [context.Process(target=rank, args=one, daemon=True) for one in given]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"a rank failed with {name}")
        figures: dict[str, Any] = json.loads(Path(out).read_text())
        return figures


def table(found: dict[str, dict[str, Any]]) -> str:
    """Returns a Markdown table of final losses, with those of no compression and another seed."""
    last = {name: statistics.mean(figures["loss"][-LAST:]) for name, figures in found.items()}
    exact, exact_last = (some["as computed (fp32)"] for some in (found, last))
    titles = f"activations / gradients | MB per step | share | loss, mean of the last {LAST} steps | difference "
    lines = [head(f"{titles}| held-out loss | difference")]
    for name, figures in found.items():
        size, base = figures["bytes"][-1], exact["bytes"][-1]
        lines.append(
            f"| {name} | {size / 1e6:.2f} | {size / base:.3f} "
            f"| {last[name]:.4f} | {last[name] - exact_last:+.4f} "
            f"| {figures['held_out']:.4f} | {figures['held_out'] - exact['held_out']:+.4f} |"
        )
    return "\n".join(lines)


def main() -> None:
    steps = begin(__doc__, steps=(200, "of each training")).steps
    found = {}
    for name, wire, seed in [*((name, wire, 0) for name, wire in WIRES.items()), (OTHER_SEED, {}, 1)]:
        found[name] = train(document(wire, steps, seed), 2, name)
        print(f"{name}: {found[name]['loss'][-1]:.4f}", flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
