"""Keeps the inputs of layers in host memory between a microbatch's forward and its backward.

`saved_tensors_hooks` around a stage's forward see the layers' inputs, recognised by their shape,
which recomputation keeps. Each is copied to host memory, but the newest few if their backward
follows at once. The program says which backward comes next, so the next ones are on their way back.
The device holds at most `ON_DEVICE` of them. torch's `save_on_cpu` also copies weights and waits.

Legend: B rows, T tokens, C hidden size.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from raypp.planning.offload import AHEAD, LEAVING
from raypp.planning.schedules.action import Action, Kind
from raypp.stages.parallel.host_copies import CopyStreams

_Key = tuple[int, int]
"""Stage and microbatch."""


@dataclass(eq=False)
class _Kept:
    """A tensor `[B, T, C]` that a backward will need: on the device, in host memory, or both.
    autograd owns it, so both copies are freed with the graph. `device`: the tensor on the device;
    None while it is in host memory only. `host`: its copy; None before the copy begins. `event`:
    the event of the copy that is under way."""

    device: Tensor | None
    host: Tensor | None = None
    event: Any = None


class ActivationOffload:
    """Moves the inputs of layers of one rank's stages. Its calls follow the rank's program."""

    def __init__(self, device: torch.device) -> None:
        self._copies, self._pinned = CopyStreams(device), device.type == "cuda"
        self._line: list[Action] = []
        self.plan()

    def load(self, line: Sequence[Action]) -> None:
        """Sets the order of the rank's forwards and backwards."""
        self._line = list(line)

    def plan(self) -> None:
        """Begins a step; drops what an aborted one left behind."""
        self._position = 0
        self._kept: dict[_Key, list[_Kept]] = {}
        self._leaving: deque[_Kept] = deque()
        self._left: list[_Kept] = []
        self._asked: list[_Kept] = []

    @contextmanager
    def forward(self, stage: int, microbatch: int, shape: tuple[int, ...]) -> Iterator[None]:
        """Surrounds the forward of a microbatch. `shape`: `[B, T, C]` of what is moved."""
        kept: list[_Kept] = []
        waiting: deque[_Kept] = deque()

        def pack(tensor: Tensor) -> Tensor | _Kept:
            """Takes a saved tensor `[...]`; returns what autograd keeps for it."""
            if tuple(tensor.shape) != shape or not tensor.is_floating_point():
                return tensor
            one = _Kept(tensor.detach())
            kept.append(one)
            waiting.append(one)
            if len(waiting) > AHEAD:
                self._leave(waiting.popleft())
            return one

        with saved_tensors_hooks(pack, self._unpack):
            yield
        self._kept[stage, microbatch] = kept
        self._position += 1
        after = self._line[self._position] if self._position < len(self._line) else None
        if after not in (Action(stage, "B", microbatch), Action(stage, "I", microbatch)):
            while waiting:
                self._leave(waiting.popleft())

    @contextmanager
    def backward(self, kind: Kind, stage: int, microbatch: int) -> Iterator[None]:
        """Surrounds a backward (B), or half of one (I, W): W needs nothing that was moved."""
        if kind == "W":
            self._position += 1
            yield
            return
        self._left, self._asked = self._expected(stage, microbatch), []
        self._position += 1
        self._fetch_ahead()
        yield
        for one in [*self._left, *self._asked[-1:]]:
            self._drop(one)
        self._left, self._asked = [], []
        del self._kept[stage, microbatch]
        self._fetch_ahead()

    def _expected(self, stage: int, microbatch: int) -> list[_Kept]:
        """Returns what a backward will need, in order: it goes from the last layer to the first."""
        return self._kept[stage, microbatch][::-1]

    def _leave(self, one: _Kept) -> None:
        """Starts the copy to host memory, and ends that of a tensor before it."""
        assert one.device is not None
        one.host = torch.empty(one.device.shape, dtype=one.device.dtype, pin_memory=self._pinned)
        one.event = self._copies.to_host([(one.host, one.device)])
        self._leaving.append(one)
        while len(self._leaving) > LEAVING:
            self._end_leaving()

    def _end_leaving(self) -> None:
        one = self._leaving.popleft()
        self._copies.wait(one.event)
        one.device, one.event = None, None

    def _unpack(self, kept: Tensor | _Kept) -> Tensor:
        if not isinstance(kept, _Kept):
            return kept
        while kept in self._leaving:
            self._end_leaving()
        self._fetch(kept)
        tensor = kept.device
        assert tensor is not None
        self._copies.wait(kept.event)
        kept.event = None
        if kept not in self._asked:
            for before in self._asked[-1:]:
                self._drop(before)
            self._asked.append(kept)
            if kept in self._left:
                del self._left[: self._left.index(kept) + 1]
            self._fetch_ahead()
        return tensor

    def _drop(self, one: _Kept) -> None:
        if one.host is not None and one not in self._leaving:
            self._copies.wait(one.event)
            one.device, one.event = None, None

    def _fetch(self, one: _Kept) -> None:
        """Starts the copy to the device, if it is not there."""
        if one.device is None:
            assert one.host is not None
            one.device = torch.empty_like(one.host, device=self._copies.device)
            one.event = self._copies.to_device([(one.device, one.host)])

    def _fetch_ahead(self) -> None:
        """Starts to bring back the next tensors that backwards will need."""
        for one in islice(self._coming(), AHEAD):
            if one.host is not None and one not in self._leaving:
                self._fetch(one)

    def _coming(self) -> Iterator[_Kept]:
        """Yields what backwards will need, in order; ends at one whose forward is still to come."""
        yield from self._left
        for action in self._line[self._position :]:
            if action.kind in "BI":
                if (action.stage, action.microbatch) not in self._kept:
                    return
                yield from self._expected(action.stage, action.microbatch)
