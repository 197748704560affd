"""Runs programs on stages of torch's pipelining.

Schedules order the compute (`raypp.planning.schedules`), torch's passes add gathers and reductions,
and `schedules.posting` adds messages. Unlike torch's loop, `ProgramRuntime` takes shapes from the
step's plan, posts receives as early as the backend allows, releases a send once it is known to have
arrived, and sets a mark at every action.

Legend: B rows of a microbatch, T_i tokens of microbatch i on this rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from raypp.planning.schedules.action import Action, Kind, Program, stages_with_backward
from raypp.planning.schedules.communication import Line, Message, MessageKind, Send
from raypp.planning.schedules.posting import Posting, posting_on, with_messages
from raypp.planning.schedules.waiting import arrivals
from raypp.stages.models.loss import Targets
from raypp.stages.models.stage import computes_loss
from raypp.stages.parallel.compute_copies import computing, fill_wide_gradients
from raypp.stages.pipeline.device_clock import ActionClock
from raypp.stages.pipeline.planned_stage import PlannedStage
from raypp.stages.pipeline.wire import sum_start
from raypp.torch_private import (
    Computation,
    LoweredAction,
    add_reduce_grad,
    add_to_sums,
    add_unshard_reshard,
    end_backward,
    put_sums,
    take_sums,
)

if TYPE_CHECKING:
    from raypp.stages.pipeline.action_trace import ActionTrace
    from raypp.stages.pipeline.activation_offload import ActivationOffload

LossFn = Callable[[Tensor, Tensor], Tensor]
Mark = Callable[[str], None]

_KINDS = {
    "F": Computation.FORWARD,
    "B": Computation.FULL_BACKWARD,
    "I": Computation.BACKWARD_INPUT,
    "W": Computation.BACKWARD_WEIGHT,
}
_COMPUTES = frozenset(_KINDS.values())
_MESSAGES = {
    (True, "F"): Computation.SEND_F,
    (True, "B"): Computation.SEND_B,
    (False, "F"): Computation.RECV_F,
    (False, "B"): Computation.RECV_B,
}
"""By whether the message is sent, and by its kind."""


def lower(
    program: Mapping[int, Sequence[Action]], rank_of_stage: Sequence[int], microbatches: int, posting: Posting
) -> dict[int, list[LoweredAction]]:
    """Adds communication to a compute-only program, for all ranks; the same result on each."""
    lines = with_messages(program, rank_of_stage, posting)
    lowered = {}
    for rank, line in lines.items():
        compute: list[LoweredAction | None] = [
            LoweredAction(a.stage, _KINDS[a.kind], a.microbatch) for a in line if isinstance(a, Action)
        ]
        unsharded: list[LoweredAction | None] = list(add_unshard_reshard(compute))
        with_weights = [action for action in add_reduce_grad(unsharded, microbatches) if action is not None]
        lowered[rank] = _joined(line, with_weights)
    return lowered


def _joined(line: Line, with_weights: Sequence[LoweredAction]) -> list[LoweredAction]:
    """Merges a rank's messages into its actions. An action that torch's passes added stays before
    the action it preceded; one that followed an action now follows that action's send."""
    rest = iter(with_weights)
    lowered: list[LoweredAction] = []
    for item in line:
        if isinstance(item, Action):
            for action in rest:
                lowered.append(action)
                if action.computation_type in _COMPUTES:
                    break
        else:
            kind, stage, microbatch = item.message
            sends = isinstance(item, Send)
            lowered.append(LoweredAction(stage if sends else item.message.to_stage, _MESSAGES[sends, kind], microbatch))
    return [*lowered, *rest]


def _backward_next(program: Program, stage: int) -> bool:
    """Whether each forward of a stage is followed by its whole backward before the stage's next."""
    (own,) = [line for line in program.values() if any(action.stage == stage for action in line)]
    actions = [(action.kind, action.microbatch) for action in own if action.stage == stage]
    forwards, backwards = actions[::2], actions[1::2]
    return forwards == [("F", m) for _, m in forwards] and backwards == [("B", m) for _, m in forwards]


def _sharded(stage: PlannedStage) -> list[FSDPModule]:
    """Returns the parts of a stage that FSDP gathers; empty if the stage is a plain module."""
    return [module for module in stage.submod.modules() if isinstance(module, FSDPModule)]


class ProgramRuntime:
    """Runs one program on this rank's stages, step after step.

    Args:
        program: Compute-only program of every pipeline rank.
        loss_fn: Maps logits `[B, T_i, V]` and labels `[B, T_i]` to a scalar, if the last stage
            does not compute its loss itself (`DecoderStage.computes_loss`). None: no losses.
        backward: False for a forward-only program, which runs under `no_grad`; the weights are
            resharded after it.
        offload: Moves what layers keep for their backwards to host memory. None: nothing moves.

    Attributes:
        loss_scale: By what backwards multiply the loss; those that `run` returns are not scaled.
    """

    def __init__(
        self,
        stages: list[PlannedStage],
        program: Mapping[int, Sequence[Action]],
        rank_of_stage: Sequence[int],
        microbatches: int,
        loss_fn: LossFn | None,
        mark: Mark | None = None,
        *,
        backward: bool = True,
        offload: ActivationOffload | None = None,
    ) -> None:
        self.offload = offload
        self.rank = stages[0].group_rank
        self._microbatches, self.loss_fn, self.loss_scale = microbatches, loss_fn, 1.0
        self._has_backward = backward and loss_fn is not None
        self.planned = {stage.stage_index: stage for stage in stages}
        self.mark = mark
        self.now = ""
        self.clock: ActionClock | None = None
        self.trace: ActionTrace | None = None
        self.rank_of_stage = list(rank_of_stage)
        self._device = stages[0].device
        self.posting = posting_on(self._device.type)
        self.load(program)
        self._reducing: list[PlannedStage] = []
        self._held: list[PlannedStage] = []
        self._aside: dict[tuple[int, int], list[Any]] = {}
        self._sends: dict[Message, dist.Work] = {}
        self._receives: dict[Message, dist.Work] = {}
        self._do: dict[Computation, Callable[[PlannedStage, int], None]] = {
            Computation.FORWARD: self._forward,
            Computation.FULL_BACKWARD: partial(self._backward, "B"),
            Computation.BACKWARD_INPUT: partial(self._backward, "I"),
            Computation.BACKWARD_WEIGHT: self._weight_backward,
            Computation.SEND_F: partial(self._send, "F"),
            Computation.SEND_B: partial(self._send, "B"),
            Computation.RECV_F: partial(self._receive, "F"),
            Computation.RECV_B: partial(self._receive, "B"),
            Computation.UNSHARD: self._unshard,
            Computation.RESHARD: self._reshard,
            Computation.REDUCE_GRAD: self._reduce,
        }

    def load(self, program: Program) -> None:
        """Replaces the program for the same stages and microbatches. Call it between two steps,
        with the same program on all ranks."""
        lowered = lower(program, self.rank_of_stage, self._microbatches, self.posting)
        self.actions = lowered[self.rank]
        self._names = [str(action) for action in self.actions]
        if self.offload is not None:
            self.offload.load(program[self.rank])
        self._arrivals = {
            LoweredAction(a.stage, _KINDS[a.kind], a.microbatch): messages
            for a, messages in arrivals(program)[self.rank].items()
        }
        last = {action.stage: action for action in program[self.rank] if action.kind != "F"}
        self._last = {(stage, action.kind, action.microbatch) for stage, action in last.items()}
        self._backward_next = _backward_next(program, len(self.rank_of_stage) - 1)
        self._backwards = stages_with_backward(program) if self._has_backward else set()
        late = [stage for stage in self.planned.values() if stage.replicated and stage.sums_beside]
        self._sum_start = sum_start(self.actions, [one.stage_index for one in late if not one.reduces_each])
        self._split = {(action.stage, action.microbatch) for action in program[self.rank] if action.kind == "I"}

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank sent to other stages in the last step."""
        return sum(stage.sent_bytes for stage in self.planned.values())

    def _timed(self, kind: Kind, stage: PlannedStage, *, message: bool = False) -> AbstractContextManager[None]:
        return nullcontext() if self.clock is None else self.clock.timed(kind, stage.stage_index, message=message)

    def run(
        self,
        rows: int,
        seq_lens: Sequence[int],
        inputs: Sequence[Tensor],
        kwargs: Sequence[dict[str, Any]],
        targets: Sequence[Tensor],
        step: int = 0,
    ) -> list[Tensor]:
        """Runs one step. Collective over the pipeline: all its ranks must pass the same plan.

        Args:
            rows: B, rows of a microbatch.
            seq_lens: T_i, the agreed length of each microbatch on this rank, in tokens.
            inputs: Token ids, int64 `[B, T_i]`, of each microbatch; used on the first stage.
            kwargs: Keyword arguments of every stage's forward, one dict per microbatch.
            targets: Labels, int64 `[B, T_i]`, of each microbatch; used on the last stage.

        Returns:
            The loss `[]` of each microbatch, in order, on the rank with the last stage; else an
            empty list.
        """
        if len(seq_lens) != self._microbatches:
            raise ValueError(f"{len(seq_lens)} microbatches for a program of {self._microbatches}")
        for stage in self.planned.values():
            split = {microbatch for at, microbatch in self._split if at == stage.stage_index}
            stage.plan(rows, seq_lens, backward=self._has_backward, step=step, split=split)
        if self.offload is not None:
            self.offload.plan()
        self._inputs, self._kwargs, self._targets = inputs, kwargs, targets
        self._losses: dict[int, Tensor] = {}
        self._reducing.clear()
        self._held.clear()
        self._aside.clear()
        self._all_sent = False
        self._begun = self._instant()
        modules = [stage.submod for stage in self.planned.values()]
        with computing(modules):
            if self._has_backward:
                fill_wide_gradients(modules)
            self._run()
        return [self._losses[index] for index in sorted(self._losses)]

    def _run(self) -> None:
        do = self._do if self.trace is None else self.trace.around(self._do)
        for position, (action, name) in enumerate(zip(self.actions, self._names, strict=True)):
            self.now = name
            if self.mark is not None:
                self.mark(name)
            microbatch = -1 if action.microbatch_index is None else action.microbatch_index
            if action.computation_type in _COMPUTES:
                self._begun = self._instant()
            do[action.computation_type](self.planned[action.stage_index], microbatch)
            for message in self._arrivals.get(action, ()):
                self._sends.pop(message).wait()
            if position == self._sum_start.last_send and not self._sum_start.waits:
                self._all_sent = True
                self._start_held_sums()
        if self._sends and self.mark is not None:
            self.mark("sends")
        with self._traced("wait sends"):
            for work in self._sends.values():
                work.wait()
        self._sends.clear()
        self._start_held_sums()
        self._wait_for_sums()
        if not self._has_backward:
            for stage in self.planned.values():
                self._reshard(stage, -1)

    def _instant(self) -> Any:
        """Returns an event of the device after all that is queued so far; None on a CPU."""
        if self._device.type == "cpu":
            return None
        return torch.get_device_module(self._device).current_stream().record_event()

    def _start_held_sums(self) -> None:
        """Starts the sums that waited for the rank's last message (`pipeline.wire`)."""
        for stage in self._held:
            stage.perform_reduce_grad(1)
        self._held.clear()

    def _wait_for_sums(self) -> None:
        sums = [stage.replica_sums for stage in self.planned.values() if stage.replica_sums is not None]
        if self.mark is not None and (self._reducing or any(one.under_way for one in sums)):
            self.mark("sums")
        with self._traced("wait sums"):
            for stage in self._reducing:
                stage.perform_reduce_grad(1)
            for one in sums:
                one.wait()

    def _traced(self, kind: str) -> AbstractContextManager[None]:
        return nullcontext() if self.trace is None else self.trace.timed(kind)

    def _moved(self, stage: PlannedStage, microbatch: int) -> AbstractContextManager[None]:
        if self.offload is None:
            return nullcontext()
        return self.offload.forward(stage.stage_index, microbatch, stage.shapes[microbatch])

    def _moved_back(self, kind: Kind, stage: PlannedStage, microbatch: int) -> AbstractContextManager[None]:
        if self.offload is None:
            return nullcontext()
        return self.offload.backward(kind, stage.stage_index, microbatch)

    def _await(self, message: Message) -> None:
        """Waits for a message, and marks the wait: hangs are diagnosed from these marks."""
        if self.mark is not None:
            self.mark(f"{self.now} waits")
        work = self._receives.pop(message)
        if self.trace is None:
            work.wait()
        else:
            self.trace.wait(f"wait {message.kind}", message.to_stage, message.microbatch, work)
        if self.mark is not None:
            self.mark(self.now)

    # Compute.

    def _forward(self, stage: PlannedStage, microbatch: int) -> None:
        arrived = not stage.is_first and stage.stage_index - 1 not in self.planned
        if arrived:
            self._await(Message("F", stage.stage_index - 1, microbatch))
        arguments = (self._inputs[microbatch],) if stage.is_first else ()
        kwargs, loss_fn = self._kwargs[microbatch], self.loss_fn if stage.is_last else None
        own_loss = loss_fn is not None and computes_loss(stage.submod)
        if own_loss:
            kwargs = {**kwargs, "targets": Targets(self._targets[microbatch], self._backward_next, self.loss_scale)}
        with self._timed("F", stage), self._moved(stage, microbatch):
            if arrived:
                stage.unpack("F", microbatch)
            output = stage.forward_one_chunk(microbatch, arguments, kwargs, save_forward_output=False)
            if loss_fn is not None:
                self._losses[microbatch] = output if own_loss else loss_fn(output, self._targets[microbatch])
        if stage.stage_index + 1 in self.planned:
            self.planned[stage.stage_index + 1].set_local_fwd_input(output, microbatch)
        if stage.stage_index not in self._backwards and (stage.is_last or stage.stage_index + 1 in self.planned):
            del stage.fwd_cache[microbatch]

    def _backward(self, kind: Kind, stage: PlannedStage, microbatch: int) -> None:
        arrived = not stage.is_last and stage.stage_index + 1 not in self.planned
        if arrived:
            self._await(Message("B", stage.stage_index + 1, microbatch))
        loss = self._losses[microbatch] if stage.is_last else None
        if loss is not None and self.loss_scale != 1:
            loss = loss * self.loss_scale
        if kind == "B" and isinstance(stage.submod, FSDPModule):
            root = stage.fwd_cache[microbatch][0][0] if loss is None else loss
            completes = (stage.stage_index, "B", microbatch) in self._last
            beside = completes and stage.sums_beside and stage.stage_index not in self._sum_start.held
            if stage.reduces_each or beside:
                reduce_within_backward(stage.submod, root, last=completes, frees=completes or stage.frees_weights)
                self._ends_with_step(stage, completes)
            elif stage.frees_weights:
                free_within_backward(stage.submod, root)
        with self._timed(kind, stage), self._moved_back(kind, stage, microbatch):
            if arrived:
                stage.unpack("B", microbatch)
            stage.backward_one_chunk(microbatch, loss=loss, full_backward=kind == "B", last_backward=False)
            if kind == "I" and stage.reduces_each:  # those of norms are summed with the others, in W
                taken = [one for module in _sharded(stage) for one in take_sums(module)]
                self._aside[stage.stage_index, microbatch] = taken
            if kind == "I" and stage.frees_weights:
                self._reshard(stage, microbatch)
        if loss is not None:
            self._losses[microbatch] = self._losses[microbatch].detach()  # releases the graph
        if stage.is_first or not stage.below_trains:
            stage.bwd_cache.pop(microbatch, None)
        elif stage.stage_index - 1 in self.planned:
            gradients = stage.get_local_bwd_output(microbatch)  # type: ignore[no-untyped-call]
            self.planned[stage.stage_index - 1].set_local_bwd_input(gradients, microbatch)

    def _weight_backward(self, stage: PlannedStage, microbatch: int) -> None:
        with self._timed("W", stage), self._moved_back("W", stage, microbatch):
            if stage.is_last and isinstance(stage.submod, FSDPModule):
                stage.submod.unshard()  # the loss computes logits again; other weights are not needed
            stage.backward_weight_one_chunk(microbatch, last_backward=False)
            if stage.reduces_each and isinstance(stage.submod, FSDPModule):
                put_sums(self._aside.pop((stage.stage_index, microbatch)))
                completes = (stage.stage_index, "W", microbatch) in self._last
                reduce_now(stage.submod, last=completes)
                self._ends_with_step(stage, completes)
            else:
                for module in _sharded(stage):
                    add_to_sums(module)
            if stage.frees_weights:
                self._reshard(stage, microbatch)

    def _ends_with_step(self, stage: PlannedStage, completes: bool) -> None:
        """Leaves the end of a stage's reduction on a GPU to the end of the step: earlier, what this
        rank still computes would wait for it."""
        if completes and stage.device.type != "cpu":
            self._reducing.append(stage)

    # Messages. A send never blocks compute; its work keeps the tensor alive until it has arrived.

    def _send(self, kind: MessageKind, stage: PlannedStage, microbatch: int) -> None:
        index = stage.stage_index
        with self._timed("I" if kind == "B" and (index, microbatch) in self._split else kind, stage, message=True):
            self._sends[Message(kind, index, microbatch)] = stage.send(kind, microbatch)
        if kind == "F" and index not in self._backwards:
            del stage.fwd_cache[microbatch]

    def _receive(self, kind: MessageKind, stage: PlannedStage, microbatch: int) -> None:
        source = stage.stage_index + (-1 if kind == "F" else 1)
        self._receives[Message(kind, source, microbatch)] = stage.receive(kind, microbatch, self._begun)

    # Weights.

    def _unshard(self, stage: PlannedStage, microbatch: int) -> None:
        if stage.frees_weights and isinstance(stage.submod, FSDPModule):
            # Each block gathers its weights when it is reached, and frees them after its use. All
            # of them at once could be more than the device holds.
            stage.submod.unshard(async_op=True)
            return
        for module in _sharded(stage):
            # Its first forward waits for it in FSDP's own hook, block by block: the rest of the
            # stage is still being gathered while its first blocks compute.
            module.unshard(async_op=True)

    def _reshard(self, stage: PlannedStage, microbatch: int) -> None:
        for module in _sharded(stage):
            module.reshard()

    def _reduce(self, stage: PlannedStage, microbatch: int) -> None:
        if stage.stage_index in self._sum_start.held and not self._all_sent:
            self._held.append(stage)
        elif stage not in self._reducing:
            stage.perform_reduce_grad(1)


# When FSDP sums the gradients of a stage, and frees its gathered weights, within a backward.


def reduce_within_backward(stage: FSDPModule, root: Tensor, *, last: bool = True, frees: bool = True) -> None:
    """Makes the backward from `root` start the sum of each block once its gradients are done.

    Sums that cannot start within this backward start after it, as usual. After the last backward of
    a step the caller must end the reduction (`PipelineStage.perform_reduce_grad`): only that makes
    the device's compute wait for the sums, so on a GPU they overlap with all that is computed in
    between.

    Args:
        root: The stage's output `[B, T, C]`, or the scalar loss: where the backward starts.
        last: Whether it is the stage's last backward in the step. Before that, FSDP adds up what is
            summed over shards, and sums over replicas are left to the last one.
        frees: Whether each block frees its gathered weights after its use.
    """

    # Set the flags in the backward: torch's pipelining has just cleared them.
    root.register_hook(lambda _: _reduce_from_here(stage, last=last, frees=frees))  # type: ignore[no-untyped-call]


def _reduce_from_here(stage: FSDPModule, *, last: bool, frees: bool) -> None:
    stage.set_reshard_after_backward(frees)
    stage.set_requires_gradient_sync(True)
    stage.set_requires_all_reduce(last)


def reduce_now(stage: FSDPModule, *, last: bool) -> None:
    """Sums the gradients that lie at a stage's gathered weights, after a backward of weights alone.
    `last`: as for `reduce_within_backward`."""
    _reduce_from_here(stage, last=last, frees=False)
    for module in reversed(list(stage.modules())):  # type: ignore[attr-defined]
        if isinstance(module, FSDPModule):
            add_to_sums(module)  # those of norms may be from the other half of the backward
            end_backward(module)


def free_within_backward(stage: FSDPModule, root: Tensor) -> None:
    """Makes the backward from `root` free the gathered weights of each block after its use."""
    root.register_hook(lambda _: stage.set_reshard_after_backward(True))  # type: ignore[no-untyped-call]
