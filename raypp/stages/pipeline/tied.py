"""Tied embeddings: both ends of the pipeline hold the matrix and use the sum of its gradients.

Both ends start with the same bits and apply the same update, so only the gradient is communicated.
On every mesh, the gradients of the embedding and of the projection are accumulated over the
microbatches separately and added once, at the end of the step. This is one addition of two numbers,
which no mesh can change.

Legend: V vocabulary, C hidden size.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from raypp.stages.parallel.shard import local_part, zero_gradient


class TiedEmbedding:
    """This rank's part of a tied embedding; exists also on ranks that hold neither end. Creating it
    is collective over the world if the two ends are on different ranks."""

    def __init__(self, stages: Mapping[int, nn.Module], rank_of_stage: Sequence[int], pp: int) -> None:
        last = len(rank_of_stage) - 1
        # Of `models.stage.DecoderStage`.
        self._first: Any = stages.get(0)
        self._last: Any = stages.get(last)
        self._group: dist.ProcessGroup | None = None
        ends = rank_of_stage[0], rank_of_stage[last]
        if ends[0] != ends[1]:
            per_stage = dist.get_world_size() // pp
            both = [[end * per_stage + column for end in ends] for column in range(per_stage)]
            self._group, _ = dist.new_subgroups_by_enumeration(both, group_desc="tied_embedding")  # type: ignore[no-untyped-call]
        elif last == 0 and self._first is not None and not isinstance(self._first, FSDPModule):
            # FSDP accumulates a whole stage's gradients; there both are added in every microbatch.
            self._first.separate_projection()  # type: ignore[operator]

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sets both ends' gradients, this rank's shards of `[V, C]`, to their sum. Called once per
        step, between the schedule and the gradient norm. Collective over the ranks of both ends."""
        if self._group is not None:
            end = self._first if self._first is not None else self._last
            if end is not None:
                dist.all_reduce(_gradient(end), group=self._group)
        elif self._first is not None and self._first is self._last:
            self._first.join_projection()
        elif self._first is not None and self._last is not None:
            total = _gradient(self._first)
            total.add_(_gradient(self._last))
            _gradient(self._last).copy_(total)


def _gradient(stage: nn.Module) -> Tensor:
    """Returns this rank's shard of the gradient of the `[V, C]` matrix; zeros if it has none."""
    parameter = stage.get_parameter("model.embed_tokens.weight")
    if parameter.grad is None:
        parameter.grad = zero_gradient(parameter)
    return local_part(parameter.grad)
