"""What products in fp8 cost in loss, beside bf16, on real text; and where their error is.

It trains the same model in both precisions with three seeds, in one process and with all layers in
fp8, by the numbers that a card multiplies (`raypp.stages.models.fp8`). Then it prints, of one step,
how far each layer's gradients are from those in fp32, and how far activations between layers are
from themselves in rows of int8 and of fp8. The figures do not depend on the load of the machine.
"""

from typing import Any

import torch
from torch import Tensor

from benchmarks.surroundings import begin
from benchmarks.tables import head
from benchmarks.wire import LAST, document, train
from raypp.job.load import parse_job
from raypp.ports import free_port
from raypp.rank.own_seat import local_seat
from raypp.stages.models.fp8 import rows_in_fp8
from raypp.stages.models.quantised_rows import dequantise_rows, quantise_rows
from raypp.tools.parity import relative_error, train_some_steps

PRECISIONS, SEEDS, LAYERS = ("bf16", "fp8"), (0, 1, 2), 3


def job_of(precision: str, steps: int, seed: int) -> dict[str, Any]:
    job = document({}, steps, seed)
    job["model"] |= {"num_layers": LAYERS, "hidden_size": 64, "ffn_size": 176}
    job["data"] |= {"seq_len": 64}
    job["pipeline"] |= {"microbatches": 1, "lookahead": 0}
    train = {"precision": precision, "fp8": {"bf16_layers": 0}}
    return {**job, "name": "fp8", "mesh": {"pp": 1}, "train": {**job["train"], **train}}


def losses(steps: int) -> str:
    """Trains every precision with every seed; returns a Markdown table of final losses."""
    lines = [head(f"seed | {' | '.join(f'{name}: last {LAST}, held out' for name in PRECISIONS)} | difference")]
    for seed in SEEDS:
        found = [train(job_of(name, steps, seed), 1, name) for name in PRECISIONS]
        ends = [sum(one["loss"][-LAST:]) / LAST for one in found]
        cells = [f"{end:.4f}, {one['held_out']:.4f}" for end, one in zip(ends, found, strict=True)]
        apart = f"{ends[1] - ends[0]:+.4f}, {found[1]['held_out'] - found[0]['held_out']:+.4f}"
        lines.append(f"| {seed} | {' | '.join(cells)} | {apart} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def one_step(precision: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Returns the gradients of a first step, and the activations after each layer."""
    job, kept, seen = parse_job(job_of(precision, 1, 0)), dict[str, Any](), list[Tensor]()

    def look(_step: int, runner: Any) -> None:
        for block in runner.built.modules[0].get_submodule("model.layers").children():
            block.register_forward_hook(lambda _module, _inputs, out: seen.append(out.detach().float()))

    seat = local_seat(0, 1, free_port(), job)
    train_some_steps(job, seat, 1, kept.__setitem__, before=look)
    return kept["step-1"], seen


def errors() -> str:
    """Returns the errors of one step's gradients by layer, and those of messages, in words."""
    (exact, _), *others = (one_step(name) for name in ("fp32", *PRECISIONS))
    lines = [head(f"layer | {' | '.join(PRECISIONS)}")]
    for layer in range(LAYERS):
        names = [name for name in exact if name.startswith(f"model.layers.{layer}.")]
        whole = torch.cat([exact[name].flatten() for name in names])
        each = (torch.cat([one[name].flatten().float() for name in names]) for one, _ in others)
        lines.append(f"| {layer} | {' | '.join(f'{relative_error(one, whole):.4f}' for one in each)} |")
    rows = torch.cat([one.flatten(0, -2) for one in others[0][1]])
    values, scales = rows_in_fp8(rows)
    fp8 = relative_error(values.float() * scales, rows)
    int8 = relative_error(dequantise_rows(quantise_rows(rows, "int8"), "int8", rows.shape[-1], torch.float32), rows)
    return "\n".join([*lines, f"\nactivations between layers: error {int8:.4f} in int8, {fp8:.4f} in fp8"])


def main() -> None:
    options = begin(__doc__, steps=(1600, "of each training"))
    print(errors(), flush=True)
    print(losses(options.steps))


if __name__ == "__main__":
    main()
