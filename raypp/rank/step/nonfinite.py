"""Handles a step whose loss or gradients are NaN or infinite, and finds where they began. Scales
the loss in fp16: else small gradients would be rounded to 0 in backwards."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raypp.errors import RayppError
from raypp.failure_kinds import FailureKind
from raypp.job.job import Job
from raypp.rank.assemble import AssembledRank
from raypp.rank.optimizers.reduce import GlobalSums
from raypp.rank.step.stragglers import SpikeWatch
from raypp.records import Event, Seat
from raypp.stages.parallel.shard import local_part
from raypp.stages.pipeline.runtime import ProgramRuntime
from raypp.state.checkpoint.commit import ScaleState

_MOST_IN_A_ROW = 3
"""Consecutive skipped steps that end the run: the weights themselves are then probably bad."""
LEAST, MOST = 1.0, 2.0**32
"""Between them is a loss scale; if the least still overflows, something else is wrong."""
GROWTH = 2.0
_MESSAGE_BYTES = 512
_NAMES_SHOWN = 3


class NonFiniteError(RayppError):
    """A step's loss or gradients are not finite. Raised on every rank; no weight was changed."""

    failure_kind = FailureKind.NONFINITE


class SpikeError(RayppError):
    """A step's loss is far above those before. Raised on every rank; no weight was changed."""

    failure_kind = FailureKind.SPIKE


class BrokenWeightsError(RayppError):
    """Weights are NaN or infinite. Raised on every rank; only an earlier checkpoint helps."""

    failure_kind = FailureKind.CORRUPT


@dataclass(frozen=True)
class Origin:
    """The first non-finite number that one rank saw. `tensor`: `output` of a module in a forward,
    or `gradient` of its output in a backward. `module`: name of the module within the stage."""

    tensor: str
    rank: int
    label: str
    stage: int
    microbatch: int
    module: str


class FiniteGuard:
    """Decides what to do about a step that is not finite, by `recovery.on_nonfinite`."""

    def __init__(self, rank: AssembledRank) -> None:
        self._job, self._seat, self._stages, self._runtime = rank.job, rank.seat, rank.built.modules, rank.built.runtime
        self._names, self._group = rank.reducer.names, rank.reducer.group
        self._in_a_row = self._spikes_in_a_row = 0
        self._on_spike = rank.job.recovery.on_spike
        self.spikes = SpikeWatch(rank.job.recovery.spike_factor if self._on_spike != "continue" else None)

    def is_spike(self, step: int, loss: float, tell: Callable[[Event], None]) -> bool:
        """Whether the update of a step is left out for its loss, by `recovery.on_spike`; the same
        on all ranks. Raises SpikeError: the run is to stop, or too many steps in a row were."""
        if self._on_spike == "continue":
            return False
        usual = self.spikes.seen(loss, but_spikes=True)
        self._spikes_in_a_row = 0 if usual is None else self._spikes_in_a_row + 1
        if usual is None:
            return False
        words = f"step {step}: {SpikeWatch.words(loss, usual)}"
        if self._on_spike == "stop":
            raise SpikeError(f"{words} (recovery.on_spike: stop)")
        if self._spikes_in_a_row >= _MOST_IN_A_ROW:
            raise SpikeError(f"{words}; {self._spikes_in_a_row} steps in a row, so skipping does not help")
        message = f"{words}; the weights are unchanged"
        tell(Event("step_skipped", message, attempt=self._seat.attempt, step=step))
        return True

    def is_finite(self, sums: GlobalSums) -> bool:
        """Whether a step's sums are finite, the same on all ranks. If so, resets the skip count."""
        if math.isfinite(sums.loss) and math.isfinite(sums.grad_norm):
            self._in_a_row = 0
            return True
        return False

    def handle(self, step: int, sums: GlobalSums, again: Callable[[], None], tell: Callable[[Event], None]) -> None:
        """Handles a step that is not finite; returns to skip it. Collective over the ranks of the
        step's sums. Raises BrokenWeightsError: weights are not finite, so no later step can be;
        NonFiniteError: by `recovery.on_nonfinite`, or too many in a row were skipped."""
        self._in_a_row += 1
        if self._weights_are_broken():
            cause = "weights are not finite: an earlier update broke them"
            raise BrokenWeightsError(f"step {step}: {self._symptoms(sums)}, because {cause}")
        words = f"step {step}: {self._symptoms(sums)}; {self._describe_origin(again)}"
        policy = self._job.recovery.on_nonfinite
        if policy != "skip":
            raise NonFiniteError(f"{words} (recovery.on_nonfinite: {policy})")
        if self._in_a_row >= _MOST_IN_A_ROW:
            raise NonFiniteError(f"{words}; {self._in_a_row} steps in a row were not finite, so skipping does not help")
        message = f"{words}; the weights are unchanged"
        tell(Event("step_skipped", message, attempt=self._seat.attempt, step=step))

    def lower_scale(
        self, step: int, sums: GlobalSums, scale: LossScale, again: Callable[[], None], tell: Callable[[Event], None]
    ) -> None:
        """Lowers the loss scale after a step whose gradients overflowed. Raises NonFiniteError: it
        is the least already. Then collective over the ranks of the step's sums."""
        before = scale.state.scale
        if not scale.lower():
            words = f"step {step}: {self._symptoms(sums)}, although the loss scale is the least, {before:g}"
            fix = "use train.precision bf16 or fp32, or a smaller train.optimizer.lr"
            raise NonFiniteError(f"{words}; {self._describe_origin(again)}", fix)
        message = f"step {step}: gradients overflowed fp16 with loss scale {before:g}, now {scale.state.scale:g}"
        tell(Event("loss_scale", f"{message}; the weights are unchanged", attempt=self._seat.attempt, step=step))

    def _weights_are_broken(self) -> bool:
        """Whether some rank holds a weight that is not finite. Collective."""
        broken_weight = any(not _finite(local_part(weight)) for stage in self._stages for weight in stage.parameters())
        broken = torch.tensor([int(broken_weight)])
        dist.all_reduce(broken, op=dist.ReduceOp.MAX, group=self._group)
        return bool(broken)

    def _symptoms(self, sums: GlobalSums) -> str:
        faults = []
        if not math.isfinite(sums.loss):
            faults.append(f"the loss is {sums.loss}")
        broken = [name for name, one in zip(self._names, sums.squares.tolist(), strict=True) if not math.isfinite(one)]
        if broken:
            shown = ", ".join(broken[:_NAMES_SHOWN])
            more = f" and {len(broken) - _NAMES_SHOWN} more" if len(broken) > _NAMES_SHOWN else ""
            faults.append(f"the gradients of {shown}{more} are not finite")
        return " and ".join(faults) or "the gradient norm is not finite"

    def _describe_origin(self, again: Callable[[], None]) -> str:
        if self._job.train.compiles:
            return "its origin cannot be found in compiled blocks (train.compile)"
        with _watched(self._stages, self._runtime, self._seat) as seen:
            again()
        origin = first_of(_gathered(seen[0] if seen else None, self._group))
        if origin is None:
            return "it did not recur when the step was repeated: a fault of a device, its memory or a link"
        return (
            f"first in the {origin.tensor} of {origin.module or 'the stage'}, microbatch {origin.microbatch} of stage "
            f"{origin.stage} on rank {origin.rank} ({origin.label})"
        )


def first_of(origins: Sequence[Origin]) -> Origin | None:
    """Picks the origin from the ranks' observations. The earliest stage's forward output, or the
    latest stage's gradient if no output is affected."""
    forwards = [origin for origin in origins if origin.tensor == "output"]
    if forwards:
        return min(forwards, key=lambda origin: (origin.stage, origin.microbatch, origin.rank))
    return max(origins, key=lambda origin: (origin.stage, -origin.microbatch, -origin.rank), default=None)


@contextmanager
def _watched(stages: Sequence[nn.Module], runtime: ProgramRuntime, seat: Seat) -> Iterator[list[Origin]]:
    """Records the first non-finite output of a module, or gradient of an output, in `stages`."""
    seen: list[Origin] = []

    def note(tensor: str, name: str) -> None:
        action = runtime.now
        kind = next((letter for letter in "FBIW" if letter in action), "F")
        stage, _, microbatch = action.partition(kind)
        if not seen and stage.isdigit() and microbatch.isdigit():
            seen.append(Origin(tensor, seat.rank, seat.label, int(stage), int(microbatch), name[-120:]))

    def back(name: str) -> Callable[[Tensor], None]:
        """Returns a hook for the gradient `[...]` of a module's output."""
        return lambda gradient: None if _finite(gradient) else note("gradient", name)

    def look(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            for tensor in (output,) if isinstance(output, Tensor) else ():
                if "F" in runtime.now and not _finite(tensor):
                    note("output", name)
                if tensor.requires_grad:
                    tensor.register_hook(back(name))  # type: ignore[no-untyped-call]

        return hook

    with ExitStack() as stack:
        for module in stages:
            for name, inner in module.named_modules():
                handle = inner.register_forward_hook(look(name))
                stack.callback(handle.remove)
        yield seen


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _gathered(own: Origin | None, group: dist.ProcessGroup | None) -> list[Origin]:
    """Gathers what ranks saw as JSON in uint8 `[512]`: nothing is unpickled. Collective."""
    text = json.dumps(asdict(own)).encode() if own is not None else b""
    message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    message[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else message[:0]
    messages = [torch.empty_like(message) for _ in range(dist.get_world_size(group))]
    dist.all_gather(messages, message, group=group)
    texts = (bytes(one.tolist()).rstrip(b"\0") for one in messages)
    return [Origin(**json.loads(text)) for text in texts if text]


class LossScale:
    """The scale of a run's loss: that of the mean loss of a full microbatch, as in other trainers,
    where a microbatch is the whole step. A power of two, so gradients are unscaled without
    rounding. All ranks change it alike: whether a gradient overflowed is in the sums that they read
    anyway. `adapts`: whether it changes; not in other precisions, nor if the job wants it fixed.
    `state`: the scale, the steps since it changed, and all steps that overflowed."""

    def __init__(self, job: Job) -> None:
        options = job.train.loss_scale
        self._used, self._interval = job.train.dtypes.scales_loss, options.growth_interval
        self.adapts = self._used and self._interval is not None
        self._tokens = 1 << (job.train.micro_batch_size * job.data.seq_len - 1).bit_length()
        self.state = ScaleState(options.init)

    @property
    def factor(self) -> float:
        """By what the sum of a microbatch's token losses is multiplied: a power of two."""
        return self.state.scale / self._tokens if self._used else 1.0

    def restore(self, state: ScaleState | None) -> None:
        """Goes on with the scale of a checkpoint; None: it has none."""
        if state is not None and self._used:
            self.state = state if self.adapts else ScaleState(self.state.scale)

    def overflowed(self, sums: GlobalSums) -> bool:
        """Whether a smaller scale may help: gradients overflowed, and the loss itself is finite."""
        return self.adapts and math.isfinite(sums.loss) and not math.isfinite(sums.grad_norm)

    def lower(self) -> bool:
        """Halves the scale after an overflow; False if it is the least."""
        if self.state.scale <= LEAST:
            return False
        self.state = ScaleState(self.state.scale / GROWTH, 0, self.state.overflows + 1)
        return True

    def good(self) -> None:
        """Counts a step without overflow."""
        if self.adapts and self._interval is not None:
            scale, steps = self.state.scale, self.state.steps + 1
            if steps >= self._interval:
                scale, steps = min(scale * GROWTH, MOST), 0
            self.state = ScaleState(scale, steps, self.state.overflows)

    def numbers(self) -> list[int]:
        """Returns the state as whole numbers, for other replicas that train apart."""
        return [int(self.state.scale), self.state.steps, self.state.overflows] if self.adapts else []

    def agree(self, of_all: Sequence[Sequence[int]]) -> None:
        """Takes the least scale of replicas, and the most overflows. `of_all`: their `numbers`."""
        if self.adapts and of_all:
            scales, steps, overflows = zip(*of_all, strict=True)
            self.state = ScaleState(float(min(scales)), min(steps), max(overflows))

    def report(self, scale: float) -> dict[str, float]:
        """Returns what the report of a step says: its scale, and the overflows so far."""
        return {"loss_scale": scale, "overflows": float(self.state.overflows)} if self._used else {}
