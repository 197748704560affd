"""Device memory that a rank needs, by purpose. An estimate: allocators and kernels need more."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from raypp.kinds import OPTIMIZERS
from raypp.planning.end_weights import activation_bytes
from raypp.planning.loss_chunks import chunk_sizes
from raypp.planning.sizes import sizes_of
from raypp.spec.families import family_of
from raypp.spec.job import Job

_FP32 = 4


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank, by tensor class.

    Attributes:
        weights: Parameters in fp32; this rank's share under fsdp · cp.
        gradients: In fp32; this rank's share.
        optimizer: State of the optimizer, in fp32; this rank's share.
        gathered: Under fsdp, cp or bf16: the weights in the compute dtype, and gradients until they
            are reduced.
        activations: What forwards in flight keep for their backwards, and the messages between
            stages.
        logits: Logits, softmax and their gradients, on the last stage. If the loss is computed in
            chunks: those of a chunk, and the gradients that the forward computes.
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
    """Returns the memory of a pipeline rank.

    Args:
        job: The job.
        stages: Stages that the rank holds.
        cut: Layers of every stage of the pipeline.
        in_flight: Largest number of microbatches in flight of every stage of the pipeline.
    """
    last = len(cut) - 1
    parameters = sum(stage_parameters(job, stage, cut) for stage in stages)
    share = -(-parameters // (job.mesh.fsdp * job.mesh.cp))
    experts = sum(sizes_of(job.model).stage_experts(_layers(stage, cut)) for stage in stages)
    elsewhere = experts - experts // job.mesh.ep  # never gathered: tokens go to these experts instead
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
        logits=loss_bytes(job, in_flight[last]) if last in stages else 0,
    )


def stage_parameters(job: Job, stage: int, cut: Sequence[int]) -> int:
    """Returns the parameters of a stage. Both ends hold tied embeddings."""
    last = stage == len(cut) - 1
    return sizes_of(job.model).stage_parameters(_layers(stage, cut), first=stage == 0, last=last)


def _layers(stage: int, cut: Sequence[int]) -> range:
    start = sum(cut[:stage])
    return range(start, start + cut[stage])


def microbatch_tokens(job: Job) -> int:
    """Returns the tokens of a microbatch on one rank if every row is data.seq_len long."""
    return job.train.micro_batch_size * -(-job.data.seq_len // job.mesh.cp)


def layer_activation_numbers(job: Job) -> int:
    """Returns how many values a layer keeps for its backward, per token.

    Counts like Korthikanti et al. (arXiv:2205.05198, section 4), for this decoder: the inputs of
    both norms and of the matrices after them (4 C), q, k, v before and after the rotary encoding,
    the attention's output, and gate, up, silu(gate) and the product of the feed-forward block.
    Fused kernels recompute attention scores. With experts, each token's row is kept once more per
    expert that it goes to, and so is that expert's output.
    """
    model = job.model
    queries, keys = model.num_heads * model.dim_per_head, model.kv_heads * model.dim_per_head
    largest = max(sizes_of(model).layers, key=lambda layer: layer.inner)
    inner, rows = largest.inner, 2 * largest.sent * model.hidden_size
    if job.train.activation_checkpointing == "selective":
        # The block's input and the results of its matrix products and of attention. The rest is
        # recomputed.
        return 3 * model.hidden_size + 2 * queries + 2 * keys + 2 * inner + rows
    return 4 * model.hidden_size + 3 * queries + 3 * keys + 4 * inner + rows


def stage_activation_bytes(job: Job, stage: int, cut: Sequence[int]) -> int:
    """Returns the bytes that a stage keeps per token of a microbatch in flight, with its input."""
    kept = job.model.hidden_size if job.train.activation_checkpointing == "full" else layer_activation_numbers(job)
    numbers = cut[stage] * kept
    if stage == len(cut) - 1:
        numbers += 2 * job.model.hidden_size  # inputs of the final norm and of the projection
    return numbers * activation_bytes(job)


def loss_bytes(job: Job, in_flight: int) -> int:
    """Returns the bytes of the loss.

    From whole logits, these are the log-softmax (fp32) of each microbatch in flight, and the logits
    and gradients of one. In chunks, these are the logits and the log-softmax of a chunk (fp32), the
    gradient of the projection (fp32, and a copy in the compute dtype), and that of its input for
    each microbatch in flight. A device that is chosen later (`auto`) counts as a GPU.
    """
    tokens, model = microbatch_tokens(job), job.model
    chunks = chunk_sizes(tokens, model.vocab_size, "cpu" if job.resources.device == "cpu" else "cuda")
    copy = 2 if job.train.precision == "bf16" else 0
    if len(chunks) == 1 or family_of(model) is None:
        return tokens * model.vocab_size * (_FP32 * in_flight + 2 * _FP32 + copy)
    projection = model.vocab_size * model.hidden_size * (_FP32 + copy)
    return (
        2 * _FP32 * chunks[0] * model.vocab_size
        + projection
        + in_flight * tokens * model.hidden_size * (activation_bytes(job))
    )


def _gathered(job: Job, parameters: int, layers: int) -> int:
    """Returns the bytes of unsharded weights and of gradients until the step's reduction.

    Weights are in the compute dtype, gradients in fp32.
    """
    replicated = job.mesh.fsdp * job.mesh.cp == 1
    if replicated and job.mesh.dp_replicate == 1 and job.train.precision == "fp32":
        return 0
    weights = parameters * activation_bytes(job)
    if replicated and job.train.precision == "fp32":
        weights = 0  # used as they are
    elif job.mesh.reshard_after_forward and layers:
        weights = 2 * weights // (layers + 1)  # the layer in use and the one being fetched
    return weights + parameters * _FP32
