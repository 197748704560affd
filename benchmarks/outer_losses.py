"""Losses of replicas that train apart, over many outer steps: against exact sums.

It trains a small Llama with two replicas and three seeds: with exact sums, and apart with 20 and
100 steps between two outer steps (750 and 150 of them). All trainings run in one process, on
stacked weights, because so many steps of real ranks take days. Rows, first weights and learning
rates are raypp's; `--check` trains 60 steps with raypp's own ranks, too, and prints the largest
difference.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.surroundings import begin
from benchmarks.tables import head
from benchmarks.wire import document, train
from raypp.job.job import Job
from raypp.job.load import parse_job
from raypp.planning.decide import decide
from raypp.ports import free_port
from raypp.rank.assemble import assemble
from raypp.rank.data.loader import Microbatch, open_loader
from raypp.rank.own_seat import local_seat

LENGTH, WIDTH, LAYERS, HEADS, INNER, VOCABULARY, ROWS, REPLICAS = 64, 32, 2, 2, 88, 320, 2, 2
HEAD_WIDTH, EPSILON = WIDTH // HEADS, 1e-5
FREQUENCIES = 10000.0 ** -(torch.arange(0, HEAD_WIDTH, 2) / HEAD_WIDTH)
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
Batch = tuple[Tensor, ...]
"""Tokens, labels, positions and numbers of documents, `[…, rows, LENGTH]` each."""


def syncs(steps: int) -> dict[str, dict[str, Any]]:
    """Returns `train.sync` of each training; `from`: the step after which replicas part."""
    found: dict[str, dict[str, Any]] = {"exact": {"from": steps, "every_steps": 1, "lr": 1.0, "momentum": 0.0}}
    for every in (20, 100):
        for lr, momentum in ((0.7, 0.9), (0.7, 0.5), (1.0, 0.0)):
            sync = {"from": 0, "every_steps": every, "lr": lr, "momentum": momentum}
            found[f"{every} steps, lr {lr:g}, momentum {momentum:g}"] = sync
        found[f"{every} steps, the same, exact for the first half"] = sync | {"from": steps // 2}
    return found


def job_of(seed: int, steps: int, schedule: str, *, replicas: int = REPLICAS, rows: int = ROWS, **sync: Any) -> Any:
    job = document({}, steps, seed)
    job["model"] |= {"num_layers": LAYERS, "hidden_size": WIDTH, "num_heads": HEADS}
    job["model"] |= {"num_kv_heads": 1, "ffn_size": INNER}
    job["data"] |= {"seq_len": LENGTH, "eval": {"fraction": 0.02}}
    job |= {"mesh": {"dp_replicate": replicas}, "pipeline": {"microbatches": 1}}
    job["train"] |= {"micro_batch_size": rows, "clip_norm": 1.0, "sync": sync or {"kind": "exact"}}
    job["train"]["optimizer"] = {"kind": "adamw", "lr": 4e-3, "weight_decay": 0.1, "betas": [0.9, 0.95]}
    job["train"]["lr_schedule"] = {"kind": schedule, "warmup_steps": 100}
    return job


def first_weights(job: Job) -> dict[str, Tensor]:
    with assemble(decide(job), local_seat(0, 1, free_port(), job), hang_timeout_s=60) as rank:
        return {name: one.detach().clone() for stage in rank.built.modules for name, one in stage.named_parameters()}


def padded(microbatch: Microbatch) -> Batch:
    tokens, labels, positions, documents = (torch.full((len(microbatch.rows), LENGTH), by) for by in (0, -100, 0, -1))
    for index, row in enumerate(microbatch.rows):
        size = len(row.tokens)
        tokens[index, :size], labels[index, :size] = torch.from_numpy(row.tokens), torch.from_numpy(row.labels)
        positions[index, :size] = torch.cat([torch.arange(length) for length in row.documents])
        documents[index, :size] = torch.arange(len(row.documents)).repeat_interleave(torch.tensor(row.documents))
    return tokens, labels, positions.float(), documents


class Models:
    """Llamas of one shape, U of them, with the weights `[U, N]` of each in a row."""

    def __init__(self, weights: Sequence[dict[str, Tensor]]) -> None:
        self._shapes = {name: value.shape for name, value in weights[0].items()}
        self._sizes = [shape.numel() for shape in self._shapes.values()]
        self.weights_UN = torch.stack([torch.cat([value.flatten() for value in one.values()]) for one in weights])
        matrix = [float(len(shape) > 1) for shape in self._shapes.values()]
        self._decay_N = torch.tensor(matrix).repeat_interleave(torch.tensor(self._sizes))
        self._first_UN, self._second_UN = torch.zeros_like(self.weights_UN), torch.zeros_like(self.weights_UN)

    def losses(self, weights_UN: Tensor, batch: Batch) -> Tensor:
        """Returns the sum of the losses of each model's rows `[U]`; batch: `[U, rows, LENGTH]`."""
        tokens, labels, positions, documents = batch
        models, rows, _ = tokens.shape
        parts = zip(self._shapes.items(), weights_UN.split(self._sizes, 1), strict=True)
        weight = {name: part.view(models, *shape) for (name, shape), part in parts}

        def norm(x: Tensor, name: str) -> Tensor:
            return F.rms_norm(x, (WIDTH,), eps=EPSILON) * weight[name][:, None]

        def product(x: Tensor, name: str) -> Tensor:
            return torch.bmm(x, weight[name].transpose(1, 2))

        def heads(x: Tensor) -> Tensor:
            return x.view(models, rows, LENGTH, -1, HEAD_WIDTH).transpose(2, 3)

        angles = (positions[..., None] * FREQUENCIES).view(models, rows, 1, LENGTH, -1)
        cos, sin = angles.cos(), angles.sin()

        def rotated(x: Tensor) -> Tensor:
            left, right = x.chunk(2, -1)
            return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

        hidden = (documents[..., None] != documents[..., None, :]).logical_or(~CAUSAL)[:, :, None]
        own = tokens + VOCABULARY * torch.arange(models)[:, None, None]
        x = F.embedding(own.view(models, -1), weight["model.embed_tokens.weight"].flatten(0, 1))
        for layer in (f"model.layers.{index}." for index in range(LAYERS)):
            normed = norm(x, f"{layer}input_layernorm.weight")
            q, k, v = (heads(product(normed, f"{layer}self_attn.{name}_proj.weight")) for name in "qkv")
            scores = rotated(q) @ rotated(k).transpose(3, 4) * HEAD_WIDTH**-0.5
            mixed = (scores.masked_fill(hidden, -1e30).softmax(-1) @ v).transpose(2, 3).reshape(models, -1, WIDTH)
            x = x + product(mixed, f"{layer}self_attn.o_proj.weight")
            normed = norm(x, f"{layer}post_attention_layernorm.weight")
            gate, up = (product(normed, f"{layer}mlp.{name}_proj.weight") for name in ("gate", "up"))
            x = x + product(F.silu(gate) * up, f"{layer}mlp.down_proj.weight")
        logits = product(norm(x, "model.norm.weight"), "lm_head.weight")
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(models, -1).sum(1)

    def update(self, gradient_UN: Tensor, rate: float, step: int) -> None:
        """Clips each model's gradient to a norm of 1, and takes a step of AdamW."""
        gradient_UN = gradient_UN * (1 / (gradient_UN.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0)
        self._first_UN.lerp_(gradient_UN, 0.1)
        self._second_UN.mul_(0.95).addcmul_(gradient_UN, gradient_UN, value=0.05)
        spread_UN = (self._second_UN.sqrt() / math.sqrt(1 - 0.95**step)).add_(1e-8)
        self.weights_UN.mul_(1 - rate * 0.1 * self._decay_N)
        self.weights_UN.addcdiv_(self._first_UN, spread_UN, value=-rate / (1 - 0.9**step))


def run(seeds: Sequence[int], steps: int, schedule: str) -> tuple[list[Tensor], dict[str, list[float]]]:
    """Returns each step's losses `[seeds, trainings]`, and held-out losses by training and seed."""
    kinds = syncs(steps)
    jobs = {seed: parse_job(job_of(seed, steps, schedule)) for seed in seeds}
    alone = {seed: parse_job(job_of(seed, steps, schedule, replicas=1, rows=16)) for seed in seeds}
    loaders = {
        (seed, replica): open_loader(jobs[seed], replica, REPLICAS) for seed in seeds for replica in range(REPLICAS)
    }
    first = {seed: first_weights(alone[seed]) for seed in seeds}
    models = Models([first[seed] for seed in seeds for _ in kinds for _ in range(REPLICAS)])
    shape = (len(seeds), len(kinds), REPLICAS, -1)
    weights = models.weights_UN.view(shape)
    agreed, momentum = weights[:, :, 0].clone(), torch.zeros_like(weights[:, :, 0])
    tokens, losses = torch.zeros(shape[:3], dtype=torch.float64), []
    for step in range(1, steps + 1):
        read = {key: padded(loader.next_step()[0]) for key, loader in loaders.items()}
        of_units = [read[seed, replica] for seed in seeds for _ in kinds for replica in range(REPLICAS)]
        batch = tuple(torch.stack(part) for part in zip(*of_units, strict=True))
        variable = models.weights_UN.requires_grad_()
        sums = models.losses(variable, batch)
        gradient = torch.autograd.grad(sums.sum(), variable)[0].view(shape)
        models.weights_UN.requires_grad_(False)
        count = (batch[1] != -100).sum((1, 2)).view(shape[:3])
        losses.append(sums.detach().view(shape[:3]).sum(2) / count.sum(2))
        together = torch.tensor([step <= sync["from"] for sync in kinds.values()])
        total = count.sum(2, keepdim=True)[..., None]
        summed = (gradient.sum(2, keepdim=True) / total).expand_as(gradient)
        gradient = torch.where(together[:, None, None], summed, gradient / count[..., None])
        models.update(gradient.reshape_as(models.weights_UN), jobs[seeds[0]].train.learning_rate(step), step)
        tokens += count
        for index, sync in enumerate(kinds.values()):
            if together[index]:
                agreed[:, index], tokens[:, index] = weights[:, index, 0], 0
            elif step % sync["every_steps"] == 0 or step == steps:
                share = tokens[:, index] / tokens[:, index].sum(1, keepdim=True)
                mean = (weights[:, index].double() * share[..., None]).sum(1).float()
                change = agreed[:, index].double() - mean.double()
                momentum[:, index] = momentum[:, index].double() * sync["momentum"] + change
                moved = momentum[:, index].double() * sync["momentum"] + change
                agreed[:, index] = agreed[:, index].double() - sync["lr"] * moved
                weights[:, index], tokens[:, index] = agreed[:, index, None], 0
    for loader in loaders.values():
        loader.close()
    held_out: dict[str, list[float]] = {name: [] for name in kinds}
    for index, seed in enumerate(seeds):
        loader, total, number = open_loader(alone[seed], 0, 1), torch.zeros(len(kinds)), 0
        for batch in (padded(microbatch) for step_of in loader.held_out() for microbatch in step_of):
            total += models.losses(agreed[index], tuple(part.expand(len(kinds), *part.shape) for part in batch))
            number += int((batch[1] != -100).sum())
        for name, loss in zip(kinds, (total / number).tolist(), strict=True):
            held_out[name].append(loss)
    return losses, held_out


def check(schedule: str) -> None:
    """Compares 60 steps with those of raypp's ranks."""
    steps = 60
    losses, held_out = run([0], steps, schedule)
    for index, (name, sync) in enumerate(syncs(steps).items()):
        if sync["from"] in (0, steps):
            options = {key: sync[key] for key in ("every_steps", "lr", "momentum")}
            outer = {} if sync["from"] else {"kind": "outer", **options}
            found = train(job_of(0, steps, schedule, **outer), REPLICAS, name)
            most = max(abs(float(mine[0, index]) - loss) for mine, loss in zip(losses, found["loss"], strict=True))
            apart = abs(held_out[name][0] - found["held_out"])
            print(f"{name}: at most {most:.1e} in a step's loss, {apart:.1e} held out", flush=True)


def main() -> None:
    options = begin(
        __doc__,
        steps=(15_000, "of each training"),
        schedule=("cosine", "learning rates", ("cosine", "constant")),
        seeds=([0, 1, 2], "of the trainings"),
        check=(False, "compare 60 steps with raypp's ranks instead"),
    )
    torch.set_num_threads(1)
    if options.check:
        check(options.schedule)
        return
    _, held_out = run(options.seeds, options.steps, options.schedule)
    print(head("two replicas | held-out loss by seed | difference"))
    for name, losses in held_out.items():
        differences = [loss / exact - 1 for loss, exact in zip(losses, held_out["exact"], strict=True)]
        mean, shown = statistics.mean(differences), ", ".join(f"{loss:.4f}" for loss in losses)
        print(f"| {name} | {shown} | {mean:+.1%} ({min(differences):+.1%} to {max(differences):+.1%}) |")


if __name__ == "__main__":
    main()
