"""Tied embeddings: the two ends of the pipeline each hold the matrix, and share one gradient.

Both ends begin with the same bits and get the same update, so nothing but the gradient ever travels. On every mesh the
embedding's gradient and the projection's are accumulated over the microbatches apart and added once, at the end of the
step: one addition of two numbers, which no mesh can change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from raypp.parallel.shard import local_part


class TiedEmbedding:
    """This rank's part of a tied embedding; also on ranks that have none of it.

    Args:
        stages: This rank's stages by index, prepared for training.
        rank_of_stage: Pipeline rank of every stage.
        pp: Pipeline ranks; the world's ranks are pp slowest.

    Collective over the world when the ends are on two ranks.
    """

    def __init__(self, stages: Mapping[int, nn.Module], rank_of_stage: Sequence[int], pp: int) -> None:
        last = len(rank_of_stage) - 1
        self._first, self._last = stages.get(0), stages.get(last)
        self._group: dist.ProcessGroup | None = None
        ends = rank_of_stage[0], rank_of_stage[last]
        if ends[0] != ends[1]:
            self._group = _own_group(pp, ends)
        elif last == 0 and self._first is not None and not isinstance(self._first, FSDPModule):
            # FSDP accumulates a whole stage's gradients itself; there the two are added microbatch by microbatch.
            _part(self._first).separate_projection()

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Gives both ends the sum of their gradients. Between the schedule and the norm, once per step; collective over
        the ranks of both ends."""
        if self._group is not None:
            end = self._first if self._first is not None else self._last
            if end is not None:
                dist.all_reduce(_gradient(end), group=self._group)
        elif self._first is not None and self._first is self._last:
            _part(self._first).join_projection()
        elif self._first is not None and self._last is not None:
            total = _gradient(self._first)
            total.add_(_gradient(self._last))
            _gradient(self._last).copy_(total)


def _part(stage: nn.Module) -> Any:
    """A stage with the methods of `models.stage.DecoderStage`."""
    return stage


def _gradient(stage: nn.Module) -> Tensor:
    """This rank's part of the gradient of the shared matrix; zero when no microbatch gave it one."""
    parameter = stage.get_parameter("model.embed_tokens.weight")
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local_part(parameter.grad)


def _own_group(pp: int, ends: tuple[int, int]) -> dist.ProcessGroup | None:
    """A group of two for each place in the data axes; all ranks make all of them, in one order."""
    own = None
    for column in torch.arange(dist.get_world_size()).view(pp, -1).T.tolist():
        ranks = [column[end] for end in ends]
        group = dist.new_group(ranks, group_desc="tied_embedding")
        if dist.get_rank() in ranks:
            own = group
    return own
