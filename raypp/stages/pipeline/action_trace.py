"""Records when a rank's actions begin and end, for the steps that the operator asked to trace."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from raypp.stages.parallel.replica_sums import ReplicaSums
from raypp.stages.pipeline.device_clock import DeviceClock
from raypp.stages.pipeline.planned_stage import PlannedStage
from raypp.torch_private import Computation

Do = Callable[[PlannedStage, int], None]

_NAMES = {
    Computation.FORWARD: "F",
    Computation.FULL_BACKWARD: "B",
    Computation.BACKWARD_INPUT: "I",
    Computation.BACKWARD_WEIGHT: "W",
    Computation.SEND_F: "send F",
    Computation.SEND_B: "send B",
    Computation.UNSHARD: "gather",
    Computation.REDUCE_GRAD: "sum",
}
"""What is recorded. Posting a receive and freeing weights take no time."""


class Recorded(NamedTuple):
    """One block: `Span` with the instants of a `DeviceClock`."""

    kind: str
    begin: Any
    end: Any
    stage: int = -1
    microbatch: int = -1


class ActionTrace:
    """Times every action of a `ProgramRuntime`, and what waits within it. On a GPU, the times are
    those of the stream that computes; nothing waits for it. `recorded`: the blocks, in the order of
    their ends. The caller takes and clears them."""

    def __init__(self, device: torch.device, stages: Sequence[PlannedStage]) -> None:
        self.clock = DeviceClock(device)
        self.recorded: list[Recorded] = []
        self._waited: Any = None
        self._gathers: set[int] = set()
        """Stages whose weights are being gathered."""
        self._hooks: list[Any] = []
        self._sums: list[ReplicaSums] = []
        for stage in stages:
            if (sums := stage.replica_sums) is not None:
                sums.timed = partial(self.timed, "sum", stage.stage_index)
                self._sums.append(sums)
            for module in stage.submod.modules():
                if isinstance(module, FSDPModule):
                    self._watch_gather(module, stage)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for sums in self._sums:
            sums.timed = nullcontext
        self._hooks.clear()
        self._sums.clear()

    def around(self, do: Mapping[Computation, Do]) -> dict[Computation, Do]:
        """Returns the functions of the actions, timed."""
        return {kind: self._timed(_NAMES[kind], done) if kind in _NAMES else done for kind, done in do.items()}

    def _timed(self, kind: str, do: Do) -> Do:
        now, recorded = self.clock.now, self.recorded

        def timed(stage: PlannedStage, microbatch: int) -> None:
            self._waited = None
            begin = now()
            do(stage, microbatch)
            # What an action waits for, it waits for first: its compute begins after that.
            begin = begin if self._waited is None else self._waited
            recorded.append(Recorded(kind, begin, now(), stage.stage_index, microbatch))
            if kind == "gather":
                self._gathers.add(stage.stage_index)
            elif kind == "F":
                self._gathers.discard(stage.stage_index)

        return timed

    @contextmanager
    def timed(self, kind: str, stage: int = -1, microbatch: int = -1) -> Iterator[None]:
        begin = self.clock.now()
        yield
        self.recorded.append(Recorded(kind, begin, self.clock.now(), stage, microbatch))

    def wait(self, kind: str, stage: int, microbatch: int, work: dist.Work) -> None:
        """Waits for a message, before an action's compute."""
        with self.timed(kind, stage, microbatch):
            work.wait()
        self._waited = self.recorded[-1].end

    def _watch_gather(self, module: nn.Module, stage: PlannedStage) -> None:
        """Times FSDP's hook before a module's forward, if it waits for the module's weights."""
        begun: list[Any] = []

        def before(*_: Any) -> None:
            if stage.frees_weights or stage.stage_index in self._gathers:
                begun.append(self.clock.now())

        def after(*_: Any) -> None:
            if begun:
                self.recorded.append(Recorded("wait gather", begun.pop(), self.clock.now(), stage.stage_index))

        # Prepended later than FSDP's own hook, so it runs earlier.
        self._hooks.append(module.register_forward_pre_hook(before, prepend=True))
        self._hooks.append(module.register_forward_pre_hook(after))
