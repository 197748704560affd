"""How much device memory a rank needs, by what it is for. An estimate: allocators and kernels add their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from raypp.kinds import OPTIMIZERS
from raypp.planning.sizes import sizes_of
from raypp.planning.weights import activation_bytes
from raypp.spec.job import Job

_FP32 = 4


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank, by tensor class.

    Attributes:
        weights: Parameters in fp32; this rank's share under fsdp · cp.
        gradients: In fp32; this rank's share.
        optimizer: State of the optimizer, in fp32; this rank's share.
        gathered: Under fsdp, cp or bf16: the weights as computed with, and the gradients until they are reduced.
        activations: What the forwards in flight keep for their backwards, and the messages between stages.
        logits: Logits, softmax and their gradients, on the last stage.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))

    def as_dict(self) -> dict[str, int]:
        return {**dataclasses.asdict(self), "total": self.total}


def rank_memory(job: Job, stages: Sequence[int], cut: Sequence[int], in_flight: Sequence[int]) -> RankMemory:
    """Memory of a pipeline rank.

    Args:
        job: The job.
        stages: Stages the rank holds.
        cut: Layers of every stage of the pipeline.
        in_flight: Most microbatches in flight of every stage of the pipeline.
    """
    last = len(cut) - 1
    parameters = sum(stage_parameters(job, stage, cut) for stage in stages)
    share = -(-parameters // (job.mesh.fsdp * job.mesh.cp))
    experts = sum(sizes_of(job.model).stage_experts(_layers(stage, cut)) for stage in stages)
    elsewhere = experts - experts // job.mesh.ep  # tokens go to these, they are never gathered
    tokens = microbatch_tokens(job)
    activations = sum(in_flight[s] * tokens * stage_activation_bytes(job, s, cut) for s in stages)
    if job.train.activation_checkpointing == "full" and any(cut[stage] for stage in stages):
        activations += tokens * layer_activation_numbers(job) * activation_bytes(job)  # the layer being recomputed
    return RankMemory(
        weights=_FP32 * share,
        gradients=_FP32 * share,
        optimizer=_FP32 * share * OPTIMIZERS.get(job.train.optimizer.kind).states,
        gathered=_gathered(job, parameters - elsewhere, max((cut[s] for s in stages), default=0)),
        activations=activations,
        logits=tokens * logit_bytes(job, in_flight[last]) if last in stages else 0,
    )


def stage_parameters(job: Job, stage: int, cut: Sequence[int]) -> int:
    """Parameters of a stage. Tied embeddings are held by both ends."""
    last = stage == len(cut) - 1
    return sizes_of(job.model).stage_parameters(_layers(stage, cut), first=stage == 0, last=last)


def _layers(stage: int, cut: Sequence[int]) -> range:
    start = sum(cut[:stage])
    return range(start, start + cut[stage])


def microbatch_tokens(job: Job) -> int:
    """Tokens of a microbatch on one rank, when every row is as long as data.seq_len."""
    return job.train.micro_batch_size * -(-job.data.seq_len // job.mesh.cp)


def layer_activation_numbers(job: Job) -> int:
    """Numbers a layer keeps for its backward, per token.

    Counted like Korthikanti et al. (arXiv:2205.05198, section 4), for this decoder: the inputs of both norms and of
    the matrices behind them (4 C), q, k, v before and after the rotary encoding, the attention's output, and gate, up,
    silu(gate) and the product of the feed-forward block. Attention scores are recomputed by the fused kernels. With
    experts each token's row is kept once more per expert it goes to, as is what it brings back.
    """
    model = job.model
    queries, keys = model.num_heads * model.dim_per_head, model.kv_heads * model.dim_per_head
    largest = max(sizes_of(model).layers, key=lambda layer: layer.inner)
    inner, rows = largest.inner, 2 * largest.sent * model.hidden_size
    if job.train.activation_checkpointing == "selective":
        # The block's input and the results of its matrix products and of attention; the rest is computed again.
        return 3 * model.hidden_size + 2 * queries + 2 * keys + 2 * inner + rows
    return 4 * model.hidden_size + 3 * queries + 3 * keys + 4 * inner + rows


def stage_activation_bytes(job: Job, stage: int, cut: Sequence[int]) -> int:
    """Bytes a stage keeps per token of a microbatch in flight; the input it received is part of them."""
    kept = job.model.hidden_size if job.train.activation_checkpointing == "full" else layer_activation_numbers(job)
    numbers = cut[stage] * kept
    if stage == len(cut) - 1:
        numbers += 2 * job.model.hidden_size  # input of the last norm and of the projection
    return numbers * activation_bytes(job)


def logit_bytes(job: Job, in_flight: int) -> int:
    """Bytes of the loss per token: the log-softmax of each microbatch in flight (fp32), and one logits and gradient."""
    working = 2 * _FP32 + (2 if job.train.precision == "bf16" else 0)
    return job.model.vocab_size * (_FP32 * in_flight + working)


def _gathered(job: Job, parameters: int, layers: int) -> int:
    """Unsharded weights in the compute type, and gradients in fp32 until they are reduced at the end of the step."""
    replicated = job.mesh.fsdp * job.mesh.cp == 1
    if replicated and job.mesh.dp_replicate == 1 and job.train.precision == "fp32":
        return 0
    weights = parameters * activation_bytes(job)
    if replicated and job.train.precision == "fp32":
        weights = 0  # computed with as they are
    elif job.mesh.reshard_after_forward and layers:
        weights = 2 * weights // (layers + 1)  # the one at work and the one being fetched
    return weights + parameters * _FP32
