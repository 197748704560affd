"""An accelerator without kernels: runs one rank's real step and raises where the host would wait.
Tensors have a shape, a type and a device (`NAME`), but no values: what needs one on the host
raises, and so does an operator on tensors of two devices. Collectives move nothing, so one process
can be any rank of any mesh. What depends on `is_cuda` is not seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from raypp.job.job import Job
from raypp.planning.decide import decide
from raypp.rank.assemble import AssembledRank, optimizer_of
from raypp.rank.build import build_stages
from raypp.rank.data.loader import open_loader
from raypp.rank.data.packing import Row
from raypp.rank.optimizers.reduce import GlobalSums, GradientReducer
from raypp.rank.own_seat import local_seat
from raypp.rank.step.collate import StageBatch
from raypp.rank.step.step import ReadStep, StepRunner, Stopwatch
from raypp.stages.models.attention import AttentionKernel
from raypp.stages.models.stage import parameter_names
from raypp.stages.parallel.attention_choice import choose_attention
from raypp.stages.parallel.rank_groups import make_groups
from raypp.torch_private import fake_tensors, register_fake_device

NAME = "fake"
"""The device's type. torch knows it within `fake_rank`, and afterwards in that process."""

_PRIVATE_USE_1 = 20
"""torch's number for devices of its users, of which `NAME` is one."""

_KERNELS = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


class Event:
    """An event that the device has reached unless it stood then; the host must not wait for it."""

    stands = False
    """The device goes no further."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None:
        self._reached = not self.stands

    def query(self) -> bool:
        return self._reached

    def elapsed_time(self, other: Event) -> float:
        return 1.0

    def synchronize(self) -> None:
        raise HostWaitsError("the host waits for an event")


class Stream(torch.Stream):
    def __new__(cls, *_: Any, **__: Any) -> Stream:
        return super().__new__(cls, stream_id=0, device_index=0, device_type=_PRIVATE_USE_1)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_event(self, event: Event) -> None: ...  # type: ignore[override]

    def wait_stream(self, stream: Stream) -> None: ...  # type: ignore[override]

    def record_event(self, event: Event | None = None) -> Event:  # type: ignore[override]
        return Event()

    def synchronize(self) -> None:
        raise HostWaitsError("the host waits for a stream")


class Module:
    """What torch and FSDP ask of a device's module, such as `torch.cuda`."""

    Event, Stream = Event, Stream

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None: ...

    def device(self, device: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def current_stream(self, device: Any = None) -> Any:
        return Stream()

    def stream(self, stream: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self, device: Any = None) -> None:
        raise HostWaitsError("the host waits for the device")

    def manual_seed_all(self, seed: int) -> None: ...

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class HostWaitsError(RuntimeError):
    """The host would wait for the device."""


@contextmanager
def fake_rank(rank: int, world: int) -> Iterator[torch.device]:
    """Makes this process that rank of a world whose other ranks do not exist; yields its device."""
    if not hasattr(torch, NAME):
        register_fake_device(NAME, Module())
        # One kernel each, as on CUDA; elsewhere torch takes several. Fake tensors do not call it.
        for name in ("silu_backward", "_fused_rms_norm", "_fused_rms_norm_backward"):
            _KERNELS.impl(name, lambda *_: None, "PrivateUse1")  # type: ignore[no-untyped-call]
        _KERNELS.impl("record_stream", lambda memory, stream: None, "Meta")  # type: ignore[no-untyped-call]
    backend = f"cpu:fake,{NAME}:fake_{NAME}"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    try:
        yield torch.device(NAME, 0)
    finally:
        dist.destroy_process_group()


class _ReachedTheSums(Exception):
    """The host is about to wait for the step's sums: the one wait that a step has."""


class _StopsAtTheSums(GradientReducer):
    """Fake sums have no values, so a step ends where the host reads them."""

    def read(self, sums: Tensor) -> GlobalSums:
        assert sums.device.type == NAME, "the sums left the device"
        raise _ReachedTheSums


@contextmanager
def fake_runner(
    job: Job, rank: int, mark: Callable[[str], None], kernel: AttentionKernel | None = None
) -> Iterator[tuple[StepRunner, list[tuple[Row, ...]]]]:
    """Assembles a rank on fake tensors, which its body also makes; yields it with a step's rows."""
    with fake_rank(rank, job.mesh.world) as device, ExitStack() as stack:
        seat = local_seat(rank, job.mesh.world, 0, job, device=NAME)
        groups = make_groups(seat.mesh_sizes, NAME, job.mesh.ep, apart=job.outer is not None)
        loader = open_loader(job, seat.replica, job.mesh.replicas)
        microbatches = [tuple(microbatch.rows) for microbatch in loader.next_step()]
        loader.close()
        with fake_tensors():
            decision = decide(job)
            built = build_stages(job, decision.pipeline, groups, device, mark, draw=False)
            optimizer = optimizer_of(job, built, device, stack)
            reducer = _StopsAtTheSums(built.modules, parameter_names(job.model))
            kernel = kernel or choose_attention(job, device).kernel
            # No store is needed: nothing meets anybody.
            store = cast(Any, None)
            yield (
                StepRunner(
                    AssembledRank(decision, seat, device, store, groups, built, optimizer, reducer, loader, kernel)
                ),
                microbatches,
            )


def run_fake_step(
    runner: StepRunner, read: ReadStep, batches: list[StageBatch], before_update: Callable[[], None] = lambda: None
) -> None:
    """Runs a step of these microbatches and, as if its sums were finite, its update."""

    def given(read: ReadStep, step: int | None = None) -> list[StageBatch]:
        return batches

    runner.batches = given  # type: ignore[method-assign]
    with suppress(_ReachedTheSums):
        runner.run(1, read, Stopwatch(runner.device))
        raise AssertionError("the step did not read its sums")
    before_update()
    runner.update(1, runner.reducer.gradients(), 2.0, 100, 1e-3)
