"""Outer steps: replicas train apart, and every H steps agree on weights again (DiLoCo).

In an outer step, the agreed weights minus the mean of what replicas made of them are a gradient for
Nesterov's momentum. Fragments of the model may take turns and be exchanged beside the compute. All
is elementwise, in host memory, in fp64 and in the order of the replicas: neither sharding nor
timing changes a bit, and the mean of equal weights is those weights (docs/design/0061).

Legend: N numbers of this rank, R replicas.
"""

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from raypp.job.job import SyncOptions
from raypp.stages.parallel.host_copies import await_on_host
from raypp.stages.parallel.replica_sums import Residuals, decoded, encode, message_size
from raypp.stages.parallel.shard import local_part
from raypp.torch_private import set_local

_MOST = 1 << 22
"""Most numbers that are sent at once: few round trips, and little memory beside the weights."""
_END_S = 30.0
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass
class OuterState:
    """What outer steps add to the state of a stage on this rank.

    Attributes:
        replica: This rank's place among the replicas: each has an optimizer state of its own.
        momentum: By global name, sharded like the parameter, in host memory; equal on all replicas.
        agreed: The weights on which replicas last agreed, likewise.
        differs: Whether this replica's own weights may differ from these: saved state then has
            both.
        own: A checkpoint's weights of this replica, likewise, until `OuterSync.begin`.
    """

    replica: int
    replicas: int
    momentum: dict[str, Tensor]
    agreed: dict[str, Tensor]
    differs: bool = False
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
    """Returns the number of the fragment of each parameter, the same on any mesh. Layer i is in
    fragment i modulo their number: each pipeline rank has an equal part of each fragment, so every
    link is evenly used. What is in no layer goes on after the last one."""
    numbers = {name: int(match[1]) for name in names if (match := _LAYER.search(name))}
    after = max(numbers.values(), default=-1) + 1
    ends = sorted(name for name in names if name not in numbers)
    numbers |= {name: after + place for place, name in enumerate(ends)}
    return {name: number % fragments for name, number in numbers.items()}


@dataclass(frozen=True)
class _Weight:
    """A trained weight of this rank. `parameter`: `[...]`, maybe sharded. `momentum`: this rank's
    part of its momentum, `[...]`, in host memory. `agreed`: the value on which the replicas last
    agreed, likewise. `residual`: what rounding took from what this replica sent, likewise; None: it
    is not rounded."""

    parameter: Tensor
    momentum: Tensor
    agreed: Tensor
    residual: Tensor | None


_Piece = tuple[_Weight, int, slice]
"""A weight, its place in its fragment, and a range of its numbers."""
_Change = tuple[int, slice, Tensor, Tensor | None]
"""The place of a weight, a range of its numbers, their outer gradient in fp64 `[N]`, and what
rounding took from what this replica sent `[N]`; None: nothing."""


@dataclass(frozen=True)
class _Sent:
    """An exchange that is under way. `own`: this replica's values of the fragment's weights, each
    `[...]`. `counts`: whether this replica has trained. `changes`: the results of each part of the
    exchange, as they arrive. `thread`: exchanges beside the compute; None: `changes` does it."""

    own: list[Tensor]
    counts: bool
    changes: Iterator[list[_Change]]
    thread: threading.Thread | None


@dataclass
class _Fragment:
    """Weights that are exchanged together. `weights`: those of this rank. `tokens`: tokens with a
    label that this replica trained on since these were last sent. `sent`: what was sent for the
    next outer step, from when it is until that step."""

    weights: list[_Weight]
    tokens: int = 0
    sent: _Sent | None = None


class OuterSync:
    """Takes the outer steps of one rank.

    Args:
        names: All trained parameters of the model.
        group: The ranks of all replicas that hold the same shards; computes on CPUs, and is used
            for nothing else.
        changed: Called when weights have changed.

    Attributes:
        exchanges: When the last exchanges began and ended, by `time.perf_counter`. The caller may
            take them.
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
        self.exchanges: deque[tuple[float, float]] = deque(maxlen=64)
        self._steps, self._bits, self._begun = steps, options.bits, False
        self._fragments = [_Fragment([]) for _ in range(options.fragments)]
        self._tokens_of_all = [[0] * self.replicas for _ in range(options.fragments)]
        number = fragments_of(names, options.fragments)
        for stage in stages:
            trained = {name: weight for name, weight in stage.named_parameters() if weight.requires_grad}
            momentum, agreed = ({name: host_zeros(weight) for name, weight in trained.items()} for _ in range(2))
            stage.outer_state = OuterState(self.replica, self.replicas, momentum, agreed)  # type: ignore[assignment]
            residuals = {name: host_zeros(weight) for name, weight in trained.items()} if self._bits else {}
            if residuals:
                stage.replica_residuals = Residuals(self.replica, self.replicas, residuals)  # type: ignore[assignment]
            for name, weight in trained.items():
                lost = None if name not in residuals else local_part(residuals[name])
                parts = local_part(momentum[name]), local_part(agreed[name])
                self._fragments[number[name]].weights.append(_Weight(weight, *parts, lost))

    @property
    def tokens(self) -> list[list[int]]:
        """Tokens of each fragment and replica since its last exchange: part of a state. Those of
        other replicas are as of the last outer step."""
        tokens = [list(of_fragment) for of_fragment in self._tokens_of_all]
        for of_fragment, fragment in zip(tokens, self._fragments, strict=True):
            of_fragment[self.replica] = fragment.tokens
        return tokens

    @property
    def quiet(self) -> bool:
        return all(fragment.sent is None for fragment in self._fragments)

    @property
    def own_bytes(self) -> int:
        """Bytes of this rank's part of a replica's own weights."""
        weights = (local_part(weight.parameter) for fragment in self._fragments for weight in fragment.weights)
        return sum(weight.numel() * weight.element_size() for weight in weights)

    @torch.no_grad()
    def begin(self, tokens: Sequence[Sequence[int]] = (), origins: Sequence[int] = ()) -> None:
        """Keeps the weights as those on which replicas agree. Idempotent. Call it before the first
        step of an attempt, once they are set. `tokens`: those of a state; maybe of another number
        of fragments or replicas. `origins`: for each replica that of the state which it goes on as;
        (): r as r modulo their number."""
        if self._begun:
            return
        self._begun = True
        for index, fragment in enumerate(self._fragments):
            for weight in fragment.weights:
                weight.agreed.copy_(local_part(weight.parameter))
            if tokens and (known := tokens[index % len(tokens)]):
                of = origins or range(self.replicas)
                self._tokens_of_all[index] = [known[replica % len(known)] for replica in of]
                fragment.tokens = self._tokens_of_all[index][self.replica]
        for stage, state in zip(self._stages, self._states, strict=True):
            state.differs = bool(state.own)
            for name, parameter in stage.named_parameters():
                if name in state.own:
                    local_part(parameter).copy_(local_part(state.own.pop(name)))

    @property
    def _states(self) -> list[OuterState]:
        return [state for stage in self._stages if (state := outer_state_of(stage)) is not None]

    @property
    def differs(self) -> bool:
        """Whether this replica's weights may differ from those on which replicas agreed."""
        return any(state.differs for state in self._states)

    def _note(self, differs: bool) -> None:
        for state in self._states:
            state.differs = differs

    @contextmanager
    def agreed_in_place(self, before: Callable[[], None]) -> Iterator[None]:
        """Lets this rank compute with the weights on which replicas agreed, inside a `with` block.
        Calls `before`, which waits until weights may change."""
        if not self.differs:
            yield
            return
        before()
        weights = [weight for fragment in self._fragments for weight in fragment.weights]
        self._reshard()
        local_values = [local_part(weight.parameter).detach().to("cpu", copy=True) for weight in weights]
        self._write(weights, [weight.agreed for weight in weights])
        try:
            yield
        finally:
            self._write(weights, local_values)

    def count(self, tokens: int) -> None:
        """Counts the tokens with a label on which this replica trained in a step."""
        self._note(differs=True)
        for fragment in self._fragments:
            fragment.tokens += tokens

    def acts_after(self, step: int) -> bool:
        """Whether `run` has something to do after a step."""
        return step == self._steps or bool(self._due(step) or self._due(step + self._options.overlap_steps))

    @torch.no_grad()
    def run(self, step: int, progress: Callable[[], None], beside: Sequence[int] = ()) -> list[list[int]]:
        """Takes the outer steps that are due after a step, and sends for those that are near.
        Collective over the replicas. The one after the last step counts all that is left. Calls
        `progress` around each exchange that it waits for. Returns the numbers `beside` of each
        replica, where all agree on all fragments; else nothing."""
        last, due = step == self._steps, self._due(step)
        if (last or due) and not self._options.differs:
            self._note(differs=False)
        for fragment in self._fragments if last else due:
            if not self._receive(fragment, progress) or last:
                self._send(fragment, beside=False)
                self._receive(fragment, progress)
        if self._options.overlap_steps and not last:
            for fragment in self._due(step + self._options.overlap_steps):
                self._send(fragment, beside=True)
        if last or step % self._options.every == 0:
            counts = self._of_all([*(fragment.tokens for fragment in self._fragments), *beside])
            fragments = len(self._fragments)
            self._tokens_of_all = [list(of_all) for of_all in list(zip(*counts, strict=True))[:fragments]]
            return [own[fragments:] for own in counts] if beside else []
        return []

    def _of_all(self, own_F: list[int]) -> list[list[int]]:
        """Returns the numbers that each replica gives. Collective."""
        tokens = torch.tensor(own_F)
        numbers = list(tokens.new_empty(self.replicas, len(tokens)))
        dist.all_gather(numbers, tokens, group=self._group)
        return [of_replica.tolist() for of_replica in numbers]

    def close(self, interrupt: Callable[[], object] = lambda: None) -> None:
        """Ends exchanges under way, after a call of `interrupt` if there are any; drops results."""
        sent = [fragment.sent for fragment in self._fragments if fragment.sent is not None]
        for thread in [one.thread for one in sent if one.thread is not None and one.thread.is_alive()]:
            interrupt()
            thread.join(_END_S)

    def numbers_due(self, step: int) -> int:
        """Returns of how many numbers of this rank the outer steps after a step tell others."""
        due = self._due(step)
        if step == self._steps:  # what is under way arrives, and all is sent once more
            due = [*(one for one in self._fragments if one.sent is not None), *self._fragments]
        return sum(weight.agreed.numel() for fragment in due for weight in fragment.weights)

    def _due(self, step: int) -> list[_Fragment]:
        number = self._options.fragment_due(step)
        return [] if number is None else [self._fragments[number]]

    def _send(self, fragment: _Fragment, *, beside: bool) -> None:
        """Starts the exchange of a fragment, `beside` the compute or while `_receive` waits."""
        tokens, fragment.tokens = fragment.tokens, 0
        self._reshard()
        local_values = [local_part(weight.parameter).detach() for weight in fragment.weights]
        if beside:
            local_values = [value.to("cpu", copy=True) for value in local_values]
        changes, thread = self._exchanged(fragment.weights, local_values, tokens), None
        if beside:
            changes, thread = _in_a_thread(changes)
        fragment.sent = _Sent(local_values, tokens > 0, changes, thread)

    def _receive(self, fragment: _Fragment, progress: Callable[[], None]) -> bool:
        """Takes the outer step of a fragment that was sent; returns whether it was."""
        if (sent := fragment.sent) is None:
            return False
        self._reshard()
        progress()
        for changes in sent.changes:
            progress()
            for index, part, change_N, left_N in changes:
                weight = fragment.weights[index]
                agreed_N, local_N = (value.view(-1)[part] for value in (weight.agreed, local_part(weight.parameter)))
                self._update(agreed_N, weight.momentum.view(-1)[part], change_N)
                if weight.residual is not None and left_N is not None and sent.counts:
                    weight.residual.view(-1)[part].copy_(left_N)
                if sent.thread is None:
                    local_N.copy_(agreed_N)
                else:  # what the replica has learned since goes on
                    local_N.copy_(agreed_N + (local_N.cpu() - sent.own[index].view(-1)[part]))
        fragment.sent = None
        self._changed()
        return True

    def _exchanged(self, weights: Sequence[_Weight], own: Sequence[Tensor], tokens: int) -> Iterator[list[_Change]]:
        """Exchanges weights, and yields the outer gradients of each exchange. Collective. None if
        no replica has trained since. Changes no state, so that it may run beside the compute."""
        begin = time.perf_counter()
        counts = [count for (count,) in self._of_all([tokens])]
        if not any(counts):
            return
        changes = self._rounded_changes if self._bits else self._changes
        for pieces in _gathered([weight.agreed.numel() for weight in weights]):
            sent = [own[i].view(-1)[part].cpu() for i, part in pieces]
            yield list(changes([(weights[i], i, part) for i, part in pieces], sent, counts))
        self.exchanges.append((begin, time.perf_counter()))

    def _changes(self, pieces: Sequence[_Piece], own: Sequence[Tensor], tokens: Sequence[int]) -> Iterator[_Change]:
        """Yields the agreed weights minus their mean."""
        means = torch.split(self._mean(torch.cat(list(own)), tokens), [len(one) for one in own])
        for (weight, i, part), mean_N in zip(pieces, means, strict=True):
            yield i, part, weight.agreed.view(-1)[part].double() - mean_N.double(), None

    def _rounded_changes(
        self, pieces: Sequence[_Piece], own: Sequence[Tensor], tokens: Sequence[int]
    ) -> Iterator[_Change]:
        """Yields the mean of the changes that replicas send in few bits, and what rounding took.
        Each sends its own to all others. A replica without tokens does not count."""
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
        """Returns the mean of all replicas' weights `[N]`. Each replica adds up one part of all,
        and sends it to the others: as many bytes as a ring."""
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
        await_on_host(weight.parameter for fragment in self._fragments for weight in fragment.weights)

    @torch.no_grad()
    def _write(self, weights: Sequence[_Weight], values: Sequence[Tensor]) -> None:
        """Sets this rank's part of weights to values, each `[...]`."""
        self._reshard()
        for weight, value in zip(weights, values, strict=True):
            local_part(weight.parameter).copy_(value)
        self._changed()


def _in_a_thread(items: Iterator[list[_Change]]) -> tuple[Iterator[list[_Change]], threading.Thread]:
    """Lets a thread iterate; returns an iterator of what it finds, which raises what it raised."""
    results: SimpleQueue[list[_Change] | BaseException | None] = SimpleQueue()

    def run() -> None:
        try:
            for item in items:
                results.put(item)
            results.put(None)
        except BaseException as error:  # noqa: BLE001 - raised where the results are taken
            results.put(error)

    def arrived() -> Iterator[list[_Change]]:
        while (item := results.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    thread = threading.Thread(target=run, name="raypp-outer", daemon=True)
    thread.start()
    return arrived(), thread


def weighted_mean(values: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
    """Returns the mean of R tensors `[N]` by their weights, in fp64, added in their order."""
    total_N = torch.zeros(len(values[0]), dtype=torch.float64)
    for values_N, weight in zip(values, weights, strict=True):
        total_N.add_(values_N.double().mul_(weight))
    return total_N.div_(sum(weights))


def _gathered(sizes: Sequence[int]) -> Iterator[list[tuple[int, slice]]]:
    """Yields the pieces of weights that are sent together. Where a weight is cut depends on its
    size alone, so both ends of a tied one are rounded alike."""
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
