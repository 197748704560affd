"""Outer steps: replicas train apart, and every H steps agree on weights again (DiLoCo).

Between two outer steps no gradient crosses replicas. In an outer step, the weights on which they
last agreed, minus the mean of what each has made of them, are a gradient for Nesterov's momentum
(arXiv 2311.08105). Replicas count by the tokens they trained on. Fragments of the model may take
turns (arXiv 2501.18512).

All of this is computed in host memory, elementwise, in fp64 and in the order of the replicas: the
result depends on neither how a replica shards its weights nor on timing, and is the same on all
replicas. The mean of exact weights is rounded once. So replicas that computed the same keep it, bit
for bit, with lr 1 and momentum 0 (docs/design/0061).

Legend: N numbers of this rank, R replicas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

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
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class OuterState:
    """What outer steps add to the state of a stage on this rank.

    Attributes:
        replica: This rank's place among the replicas: each has an optimizer state of its own.
        replicas: Their number, R.
        momentum: By global name, sharded like the parameter, in host memory; equal on all replicas.
        agreed: The weights on which replicas last agreed, likewise.
        differs: Whether a replica's own weights differ from these when state is saved: state then
            has both.
        own: A checkpoint's weights of this replica, likewise, until `OuterSync.begin`.
    """

    replica: int
    replicas: int
    momentum: dict[str, Tensor]
    agreed: dict[str, Tensor]
    differs: bool
    own: dict[str, Tensor] = field(default_factory=dict)


def outer_state_of(stage: nn.Module) -> OuterState | None:
    """Returns a stage's state of outer steps; None if its replicas do not train apart."""
    held: OuterState | None = getattr(stage, "outer_state", None)
    return held


def agreed_weights(stage: nn.Module) -> Mapping[str, Tensor]:
    """Returns the weights `[...]` that stand for a stage's parameters of these names when state is
    saved: those on which replicas agreed, where their own differ."""
    held = outer_state_of(stage)
    return held.agreed if held is not None and held.differs else {}


def fragments_of(names: Sequence[str], fragments: int) -> dict[str, int]:
    """Returns the number of the fragment of each parameter, the same on any mesh.

    Layer i is in fragment i modulo their number: each pipeline rank has an equal part of each
    fragment, so every link is evenly used. What is in no layer goes on after the last one.
    """
    numbers = {name: int(found[1]) for name in names if (found := _LAYER.search(name))}
    after = max(numbers.values(), default=-1) + 1
    ends = sorted(name for name in names if name not in numbers)
    numbers |= {name: after + place for place, name in enumerate(ends)}
    return {name: number % fragments for name, number in numbers.items()}


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


_Piece = tuple[_Weight, int, slice]
"""A weight, its place in its fragment, and a range of its numbers."""
_Change = tuple[int, slice, Tensor, Tensor | None]
"""The place of a weight, a range of its numbers, their outer gradient in fp64 `[N]`, and what
rounding took from what this replica sent `[N]`; None: nothing."""


@dataclass
class _Fragment:
    """Weights that are exchanged together.

    Attributes:
        weights: Those of this rank.
        tokens: Tokens with a label that this replica trained on since these were last sent.
    """

    weights: list[_Weight]
    tokens: int = 0


class OuterSync:
    """Takes the outer steps of one rank.

    Args:
        stages: This rank's stages. Their momenta become part of checkpoints.
        options: `train.sync`.
        steps: `train.steps`.
        names: All trained parameters of the model.
        group: The ranks of all replicas that hold the same shards; computes on CPUs.
        changed: Called when weights have changed.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        options: SyncOptions,
        steps: int,
        names: Sequence[str],
        group: dist.ProcessGroup,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._stages, self._options, self._group, self._changed = stages, options, group, changed
        self.replica, self.replicas = group.rank(), group.size()
        self._steps, self._bits, self._begun = steps, options.bits, False
        self._fragments = [_Fragment([]) for _ in range(options.fragments)]
        self._tokens_of_all = [[0] * self.replicas for _ in range(options.fragments)]
        number = fragments_of(names, options.fragments)
        for stage in stages:
            trained = {name: weight for name, weight in stage.named_parameters() if weight.requires_grad}
            momentum, agreed = ({name: host_zeros(weight) for name, weight in trained.items()} for _ in range(2))
            state = OuterState(self.replica, self.replicas, momentum, agreed, options.fragments > 1)
            stage.outer_state = state  # type: ignore[assignment]
            residuals = {name: host_zeros(weight) for name, weight in trained.items()} if self._bits else {}
            if residuals:
                kept = Residuals(self.replica, self.replicas, residuals)
                stage.replica_residuals = kept  # type: ignore[assignment]
            for name, weight in trained.items():
                lost = None if name not in residuals else local_part(residuals[name])
                parts = local_part(momentum[name]), local_part(agreed[name])
                self._fragments[number[name]].weights.append(_Weight(weight, *parts, lost))

    @property
    def tokens(self) -> list[list[int]]:
        """Tokens of each fragment and replica since its last exchange: part of a checkpoint.

        They are as of the last outer step.
        """
        return self._tokens_of_all

    @torch.no_grad()
    def begin(self, tokens: Sequence[Sequence[int]] = ()) -> None:
        """Keeps the weights as those on which replicas agree. Idempotent.

        Call it before the first step of an attempt, once they are set.

        Args:
            tokens: Those of a checkpoint; maybe of another number of fragments or replicas.
        """
        if self._begun:
            return
        self._begun = True
        for index, fragment in enumerate(self._fragments):
            for weight in fragment.weights:
                weight.agreed.copy_(local_part(weight.parameter))
            if tokens and (known := tokens[index % len(tokens)]):
                self._tokens_of_all[index] = [known[replica % len(known)] for replica in range(self.replicas)]
                fragment.tokens = self._tokens_of_all[index][self.replica]
        for stage in self._stages:
            held = outer_state_of(stage)
            assert held is not None
            for name, parameter in stage.named_parameters():
                if name in held.own:
                    local_part(parameter).copy_(local_part(held.own[name]))
            held.own.clear()

    @contextmanager
    def agreed_in_place(self, before: Callable[[], None]) -> Iterator[None]:
        """Lets this rank compute with the weights on which replicas agreed, inside a `with` block.

        Args:
            before: Waits until the weights may change.
        """
        if self._options.fragments == 1:
            yield
            return
        before()
        weights = [weight for fragment in self._fragments for weight in fragment.weights]
        self._reshard()
        own = [local_part(weight.parameter).detach().to("cpu", copy=True) for weight in weights]
        self._write(weights, [weight.agreed for weight in weights])
        try:
            yield
        finally:
            self._write(weights, own)

    def count(self, tokens: int) -> None:
        """Counts the tokens with a label on which this replica trained in a step."""
        for fragment in self._fragments:
            fragment.tokens += tokens

    @torch.no_grad()
    def run(self, step: int, progress: Callable[[], None]) -> None:
        """Takes the outer steps that are due after a step. Collective over the replicas.

        Args:
            step: The step.
            progress: Called before each exchange.
        """
        due = range(len(self._fragments)) if step == self._steps else []
        if (number := self._options.fragment_due(step)) is not None and not due:
            due = [number]
        if not due:
            return
        progress()
        own_F = torch.tensor([fragment.tokens for fragment in self._fragments])
        counts = list(own_F.new_empty(self.replicas, len(own_F)))
        dist.all_gather(counts, own_F, group=self._group)
        self._tokens_of_all = torch.stack(counts, 1).tolist()
        for number in due:
            tokens, self._tokens_of_all[number] = self._tokens_of_all[number], [0] * self.replicas
            self._agree(self._fragments[number], tokens, progress)

    def _agree(self, fragment: _Fragment, tokens: Sequence[int], progress: Callable[[], None]) -> None:
        fragment.tokens = 0
        if not any(tokens):
            return
        self._reshard()
        own = [local_part(weight.parameter) for weight in fragment.weights]
        progress()
        for index, part, change_N, left_N in self._exchanged(fragment.weights, own, tokens, progress):
            weight = fragment.weights[index]
            agreed_N = weight.agreed.view(-1)[part]
            self._update(agreed_N, weight.momentum.view(-1)[part], change_N)
            if weight.residual is not None and left_N is not None and tokens[self.replica]:
                weight.residual.view(-1)[part].copy_(left_N)
            own[index].view(-1)[part].copy_(agreed_N)
        self._changed()

    def _exchanged(
        self, weights: Sequence[_Weight], own: Sequence[Tensor], tokens: Sequence[int], progress: Callable[[], None]
    ) -> Iterator[_Change]:
        """Exchanges weights, and yields the outer gradient of each piece. Collective.

        Changes no state, so that it may run beside the compute.

        Args:
            weights: What is exchanged.
            own: This replica's values of them, each `[...]`, on any device.
            tokens: How replicas count, `[R]`.
            progress: Called after each exchange.
        """
        changes = self._rounded_changes if self._bits else self._changes
        for pieces in _gathered([weight.agreed.numel() for weight in weights]):
            sent = [own[i].view(-1)[part].cpu() for i, part in pieces]
            yield from changes([(weights[i], i, part) for i, part in pieces], sent, tokens)
            progress()

    def _changes(self, pieces: Sequence[_Piece], own: Sequence[Tensor], tokens: Sequence[int]) -> Iterator[_Change]:
        """Yields the agreed weights minus their mean."""
        means = torch.split(self._mean(torch.cat(list(own)), tokens), [len(one) for one in own])
        for (weight, i, part), mean_N in zip(pieces, means, strict=True):
            yield i, part, weight.agreed.view(-1)[part].double() - mean_N.double(), None

    def _rounded_changes(
        self, pieces: Sequence[_Piece], own: Sequence[Tensor], tokens: Sequence[int]
    ) -> Iterator[_Change]:
        """Yields the mean of the changes that replicas send in few bits, and what rounding took.

        Each sends its own to all others. A replica without tokens does not count.
        """
        sent, left = [], []
        for (weight, _, part), own_N in zip(pieces, own, strict=True):
            assert weight.residual is not None
            message, left_N = encode(weight.agreed.view(-1)[part] - own_N, weight.residual.view(-1)[part], self._bits)
            sent.append(message)
            left.append(left_N)
        message = torch.cat(sent)
        received = list(message.new_empty(self.replicas, message.numel()))
        dist.all_gather(received, message, group=self._group)
        begin = 0
        for (_, i, part), left_N in zip(pieces, left, strict=True):
            numbers = part.stop - part.start
            end = begin + message_size(numbers, self._bits)
            values = [decoded(one[begin:end], torch.float64, self._bits).view(-1) for one in received]
            yield i, part, weighted_mean(values, tokens)[:numbers], left_N
            begin = end

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

    def _reshard(self) -> None:
        """Makes the parameters' own memory that of this rank's shards, with all updates in it."""
        for module in (m for stage in self._stages for m in stage.modules() if isinstance(m, FSDPModule)):
            module.reshard()
        weights = (weight.parameter for fragment in self._fragments for weight in fragment.weights)
        if any(weight.is_cuda and not local_part(weight).is_cuda for weight in weights):
            torch.cuda.current_stream().synchronize()  # the last update's copies to host memory have arrived

    @torch.no_grad()
    def _write(self, weights: Sequence[_Weight], values: Sequence[Tensor]) -> None:
        """Sets this rank's part of weights to values, each `[...]`."""
        self._reshard()
        for weight, value in zip(weights, values, strict=True):
            local_part(weight.parameter).copy_(value)
        self._changed()


def weighted_mean(values: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
    """Returns the mean of R tensors `[N]` by their weights, in fp64, added in their order."""
    total_N = torch.zeros(len(values[0]), dtype=torch.float64)
    for values_N, weight in zip(values, weights, strict=True):
        total_N.add_(values_N.double().mul_(weight))
    return total_N.div_(sum(weights))


def _gathered(sizes: Sequence[int]) -> Iterator[list[tuple[int, slice]]]:
    """Yields the pieces of weights that are sent together.

    Where a weight is cut depends on its size alone, so both ends of a tied one are rounded alike.
    """
    together: list[tuple[int, slice]] = []
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


def host_zeros(parameter: Tensor) -> Tensor:
    """Returns zeros `[...]`, sharded like a parameter, in host memory."""
    zeros = torch.zeros_like(parameter, requires_grad=False)
    local = torch.zeros_like(local_part(parameter), device="cpu")
    if not isinstance(zeros, DTensor):
        return local
    set_local(zeros, local)
    return zeros
