"""Outer steps: replicas train apart, and every H steps agree on weights again (DiLoCo).

Between two outer steps no gradient crosses replicas. In an outer step, the weights on which they
last agreed, minus the mean of what each has made of them, are a gradient for Nesterov's momentum
(arXiv 2311.08105). Replicas count by the tokens they trained on.

All of this is computed in host memory, elementwise, in fp64 and in the order of the replicas: the
result depends on neither how a replica shards its weights nor on timing, and is the same on all
replicas. The mean of exact weights is rounded once. So replicas that computed the same keep it, bit
for bit, with lr 1 and momentum 0 (docs/design/0061).

Legend: N numbers of this rank, R replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from raypp.parallel.int8_sums import decoded, encode, message_size
from raypp.parallel.replica_sums import Residuals
from raypp.parallel.shard import local_part
from raypp.spec.job import SyncOptions
from raypp.torch_private import set_local

_MOST = 1 << 22
"""Most numbers that are sent at once: few round trips, and little memory beside the weights."""
_Piece = tuple[int, slice]
"""The number of a weight, and a range of its numbers."""


@dataclass(frozen=True)
class OuterState:
    """What outer steps add to the state of a stage on this rank.

    Attributes:
        replica: This rank's place among the replicas: each has an optimizer state of its own.
        replicas: Their number, R.
        momentum: By global name, sharded like the parameter, in host memory; equal on all replicas.
    """

    replica: int
    replicas: int
    momentum: dict[str, Tensor]


def outer_state_of(stage: nn.Module) -> OuterState | None:
    """Returns a stage's state of outer steps; None if its replicas do not train apart."""
    held: OuterState | None = getattr(stage, "outer_state", None)
    return held


@dataclass(frozen=True)
class _Weight:
    """A trained weight of this rank.

    Attributes:
        parameter: `[...]`, maybe sharded.
        momentum: This rank's part of its momentum, `[...]`, in host memory.
        agreed: The value on which the replicas last agreed, likewise.
        residual: What rounding took from what this replica sent, likewise; None: it is not rounded.
    """

    parameter: Tensor
    momentum: Tensor
    agreed: Tensor
    residual: Tensor | None


class OuterSync:
    """Takes the outer steps of one rank.

    Args:
        stages: This rank's stages. Their momenta become part of checkpoints.
        options: `train.sync`.
        group: The ranks of all replicas that hold the same shards; computes on CPUs.
        changed: Called when weights have changed.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        options: SyncOptions,
        group: dist.ProcessGroup,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._stages, self._options, self._group, self._changed = stages, options, group, changed
        self.replica, self.replicas = group.rank(), group.size()
        self._tokens = 0
        self._weights: list[_Weight] = []
        self._agreed, self._bits = False, options.bits
        for stage in stages:
            trained = {name: weight for name, weight in stage.named_parameters() if weight.requires_grad}
            momentum = {name: _host_zeros(weight) for name, weight in trained.items()}
            stage.outer_state = OuterState(self.replica, self.replicas, momentum)  # type: ignore[assignment]
            residuals = {name: _host_zeros(weight) for name, weight in trained.items()} if self._bits else {}
            if residuals:
                kept = Residuals(self.replica, self.replicas, residuals)
                stage.replica_residuals = kept  # type: ignore[assignment]
            for name, weight in trained.items():
                local, residual = local_part(momentum[name]), residuals.get(name)
                lost = None if residual is None else local_part(residual)
                self._weights.append(_Weight(weight, local, torch.empty_like(local), lost))

    @torch.no_grad()
    def begin(self) -> None:
        """Keeps the weights as those on which replicas agree. Idempotent.

        Call it before the first step of an attempt, once they are set.
        """
        if not self._agreed:
            self._agreed = True
            for weight in self._weights:
                weight.agreed.copy_(local_part(weight.parameter))

    def count(self, tokens: int) -> None:
        """Counts the tokens with a label on which this replica trained in a step."""
        self._tokens += tokens

    @torch.no_grad()
    def run(self, progress: Callable[[], None]) -> None:
        """Takes an outer step. Collective over the replicas.

        Args:
            progress: Called before each exchange.
        """
        progress()
        own_1, self._tokens = torch.tensor([self._tokens]), 0
        counts = list(own_1.new_empty(self.replicas, 1))
        dist.all_gather(counts, own_1, group=self._group)
        tokens = [int(count) for count in counts]
        if not any(tokens):
            return
        for module in (m for stage in self._stages for m in stage.modules() if isinstance(m, FSDPModule)):
            module.reshard()
        for pieces in _gathered([weight.agreed.numel() for weight in self._weights]):
            progress()
            changes = (self._rounded_changes if self._bits else self._changes)(pieces, tokens)
            for (i, part), change_N in zip(pieces, changes, strict=True):
                weight = self._weights[i]
                agreed = weight.agreed.view(-1)[part]
                self._update(agreed, weight.momentum.view(-1)[part], change_N)
                local_part(weight.parameter).view(-1)[part].copy_(agreed)
        self._changed()

    def _changes(self, pieces: Sequence[_Piece], tokens: Sequence[int]) -> list[Tensor]:
        """Returns the agreed weights minus their mean, fp64 `[N]` of each piece."""
        own = [local_part(self._weights[i].parameter).view(-1)[part].cpu() for i, part in pieces]
        means = torch.split(self._mean(torch.cat(own), tokens), [len(one) for one in own])
        agreed = [self._weights[i].agreed.view(-1)[part] for i, part in pieces]
        return [before.double() - mean.double() for before, mean in zip(agreed, means, strict=True)]

    def _rounded_changes(self, pieces: Sequence[_Piece], tokens: Sequence[int]) -> list[Tensor]:
        """Returns the mean of the changes that replicas send in few bits, fp64 `[N]` of each piece.

        Each sends its own to all others. A replica without tokens does not count, and keeps its
        residual.
        """
        sent = []
        for i, part in pieces:
            weight = self._weights[i]
            assert weight.residual is not None
            residual = weight.residual.view(-1)[part]
            own = weight.agreed.view(-1)[part] - local_part(weight.parameter).view(-1)[part].cpu()
            message, left = encode(own, residual, self._bits)
            if tokens[self.replica]:
                residual.copy_(left)
            sent.append(message)
        message = torch.cat(sent)
        received = list(message.new_empty(self.replicas, message.numel()))
        dist.all_gather(received, message, group=self._group)
        changes, begin = [], 0
        for _, part in pieces:
            numbers = part.stop - part.start
            end = begin + message_size(numbers, self._bits)
            values = [decoded(one[begin:end], torch.float64, self._bits).view(-1) for one in received]
            changes.append(weighted_mean(values, tokens)[:numbers])
            begin = end
        return changes

    def _update(self, agreed_N: Tensor, momentum_N: Tensor, change_N: Tensor) -> None:
        """Updates weights and momentum with an outer gradient `[N]` in fp64: SGD with Nesterov's
        momentum, as torch's."""
        coefficient, rate = self._options.momentum, self._options.lr
        momentum_N.copy_(momentum_N.double().mul_(coefficient).add_(change_N))
        step_N = momentum_N.double().mul_(coefficient).add_(change_N)
        agreed_N.copy_(agreed_N.double().sub_(step_N.mul_(rate)))

    def _mean(self, own_N: Tensor, tokens: Sequence[int]) -> Tensor:
        """Returns the mean of all replicas' weights `[N]`.

        Each replica adds up one part of all, and sends it to the others: as many bytes as a ring.
        """
        size = -(-own_N.numel() // self.replicas)
        sent = torch.cat((own_N, own_N.new_zeros(size * self.replicas - own_N.numel())))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        mean = weighted_mean(received.view(self.replicas, size).unbind(), tokens).to(own_N.dtype)
        means = list(torch.empty_like(sent).view(self.replicas, size))
        dist.all_gather(means, mean, group=self._group)
        return torch.cat(means)[: own_N.numel()]


def weighted_mean(values: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
    """Returns the mean of R tensors `[N]` by their weights, in fp64, added in their order."""
    total_N = torch.zeros(len(values[0]), dtype=torch.float64)
    for values_N, weight in zip(values, weights, strict=True):
        total_N.add_(values_N.double().mul_(weight))
    return total_N.div_(sum(weights))


def _gathered(sizes: Sequence[int]) -> Iterator[list[_Piece]]:
    """Yields the pieces of weights that are sent together.

    Where a weight is cut depends on its size alone, so both ends of a tied one are rounded alike.
    """
    together: list[_Piece] = []
    left = _MOST
    for index, size in enumerate(sizes):
        for begin in range(0, size, _MOST):
            part = slice(begin, min(begin + _MOST, size))
            if part.stop - begin > left:
                yield together
                together, left = [], _MOST
            together.append((index, part))
            left -= part.stop - begin
    if together:
        yield together


def _host_zeros(parameter: Tensor) -> Tensor:
    """Returns zeros `[...]`, sharded like a parameter, in host memory."""
    zeros = torch.zeros_like(parameter, requires_grad=False)
    local = torch.zeros_like(local_part(parameter), device="cpu")
    if not isinstance(zeros, DTensor):
        return local
    set_local(zeros, local)
    return zeros
