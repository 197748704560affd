"""Plays a rank's real step at full size without memory, and finds the peak of its tensors. Tensors
are fake (`fake_device`), so one process plays any rank of any mesh. Kernels that a CPU lacks are
replaced by what they allocate; blocks are not compiled."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from raypp.control.calls import Tell
from raypp.errors import JobError, Problem
from raypp.job.job import Job
from raypp.job.load import job_document, parse_job
from raypp.planning.check import check_plan
from raypp.planning.decide import settle
from raypp.planning.decision import Facts
from raypp.rank.step.step import ReadStep
from raypp.records import Requests
from raypp.stages.models import experts, loss
from raypp.stages.models.attention import AttentionKernel
from raypp.stages.parallel.compute_copies import copies_of
from raypp.stages.pipeline.agreement import StepPlan
from raypp.tools.fake_device import NAME, fake_runner, run_fake_step
from raypp.torch_private import DispatchMode, read_scalar


def step_peak(job: Job, rank: int, mark: Callable[[str], None] = lambda action: None) -> tuple[int, str]:
    """Plays a step of one rank on a GPU, and its update, with the optimizer's state there. Changes
    torch and raypp in this process, which must compute nothing else. Returns the most bytes of
    tensors on the device, and the action of that moment. Raises JobError: the job has a problem, or
    such a step cannot be played."""
    document = job_document(job) | {"data": {"kind": "synthetic", "seq_len": job.data.seq_len}}
    job = settle(parse_job(document), Facts("cuda"))
    if problems := [*check_plan(job), *_not_playable(job)]:
        raise JobError(problems)
    changed: tuple[Any, ...] = nn.Module, experts, loss
    changed[0].to_empty = _allocate
    changed[1].can_group = lambda rows, stack: True
    changed[2].for_chunks = lambda device: _losses_and_errors
    memory = Memory()

    def marked(action: str) -> None:
        memory.action = action
        mark(action)

    kernel = AttentionKernel("flash", lambda q, k, v, *_: Flash.apply(q, k, v), FlashOfBlocks())  # type: ignore[no-untyped-call]
    with fake_runner(job, rank, marked, kernel) as (runner, microbatches):
        lengths = (job.data.seq_len,) * len(microbatches)
        read = ReadStep(microbatches, StepPlan(lengths, 100, Requests()))
        parameters = [parameter for module in runner.built.modules for parameter in module.parameters()]
        for module in runner.built.modules:
            copies = copies_of(module)
            for parameter in (*module.parameters(), *(() if copies is None else copies.of.values())):
                memory.track(parameter.data)
        with memory:
            batches = runner.batches(read, 1)
            _prepare_state(runner.optimizer, parameters)
            memory.peak = memory.now
            run_fake_step(runner, read, batches, lambda: marked("update"))
    return memory.peak, memory.at


def _not_playable(job: Job) -> Iterator[Problem]:
    """Finds what keeps a step from being played."""
    if job.mesh.ep > 1:
        what = "experts over ranks read on the host how many rows each gets, and a played step has no values"
        yield Problem("mesh.ep", what, "use raypp plan without --exact")
    if ":" in job.model.kind:
        what = "own layers may run kernels that a played step does not know"
        yield Problem("model.kind", what, "use raypp plan without --exact")
    if job.train.compiles:
        what = "what a compiled block keeps is up to the compiler, and a played step compiles nothing"
        yield Problem("train.compile", what, "add --set train.compile=auto to play blocks that are not compiled")


class Memory(DispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes of storages on the device, by operator. `action`: set it to what is run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.action, self.now, self.peak, self.at = "", 0, 0, ""
        self._sizes: dict[int, int] = {}
        self._storages: dict[int, Any] = {}
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> Memory:
        def resize(storage: Any, size: int) -> Any:
            resized = self._resize(storage, size)
            if id(storage) in self._sizes:
                self._set(id(storage), size)
            return resized

        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment,method-assign]
        return cast(Memory, super().__enter__())  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _set(self, key: int, size: int) -> None:
        self.now += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self._reached(self.now)

    def _reached(self, size: int) -> None:
        if size > self.peak:
            self.peak, self.at = size, self.action

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
        del self._storages[key]

    def track(self, tensor: Tensor) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        key = id(storage)
        if local.device.type == NAME and key not in self._sizes:
            self._storages[key] = weakref.ref(storage, lambda _: self._gone(key))
            self._set(key, storage.nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is read_scalar and args[0].device.type == "cpu":
            return 1
        results = func(*args, **(kwargs or {}))
        for one in results if isinstance(results, tuple | list) else [results]:
            if isinstance(one, Tensor):
                self.track(one)
        if func.name().startswith("raypp::quantised"):  # a product that dequantises its matrices
            x, stored, width = args[0], args[1], args[-2]
            self._reached(self.now + x.element_size() * math.prod(stored.shape[:-1]) * width)
        return results


class Flash(torch.autograd.Function):
    """Allocates what flash attention does."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, sums = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(one) for one in ctx.saved_tensors[:3])


class FlashOfBlocks:
    """Allocates what the kernel of ring attention does."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), torch.empty(q.shape[1], len(q), dtype=torch.float32, device=q.device)

    def backward(self, grad: Tensor, *tensors: Any) -> Any:
        return tuple(torch.empty_like(one) for one in tensors[:3])


def _losses_and_errors(logits: Tensor, labels: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
    """Allocates what the kernel of the loss does."""
    return torch.empty(len(labels), dtype=torch.float32, device=logits.device), torch.empty_like(logits)


def _allocate(stage: nn.Module, *, device: Any, recurse: bool = True, to_empty: Any = nn.Module.to_empty) -> nn.Module:
    """As `to_empty`, which cannot swap fake parameters: those without FSDP are replaced."""
    plain = []
    for module in stage.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not isinstance(parameter, DTensor):
                new = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
                plain.append((module, name, new))
                module.register_parameter(name, None)
    to_empty(stage, device=device)
    for module, name, new in plain:
        module.register_parameter(name, new)
    return stage


def _prepare_state(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    """Lets the optimizer allocate its state, as a first step would."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)
    optimizer.step()
    for parameter in trained:
        parameter.grad = None


def answer(request: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Answers `{"job", "rank"}` by `{"peak", "at"}`: see `step_peak`. Reports each action."""

    def mark(action: str) -> None:
        tell({"progress": {"action": action}})

    peak, at = step_peak(parse_job(request["job"]), request["rank"], mark)
    return {"peak": peak, "at": at}
