"""An accelerator without kernels: runs one rank's real step and raises where the host would wait.

Tensors are fake: they have a shape, a type and a device (`NAME`), and no values. What needs a value
of the device on the host (`.item()`, a boolean mask, `nonzero`) raises, and so does an operator on
tensors of two devices. `NoWaiting` adds the copies that would wait. Collectives move nothing, so
one process can be any rank of any mesh. It does not see what depends on `is_cuda`, and it runs no
CUDA kernel.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from raypp.torch_private import DispatchMode, copy_to, fake_tensors, read_scalar, register_fake_device

NAME = "fake"
"""The device's type. torch knows it within `fake_rank`, and afterwards in that process."""

_KERNELS = torch.library.Library("aten", "IMPL")


class Event:
    """An event that the device has reached, unless it stood when it was recorded; the host must not
    wait for it."""

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


class Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
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

    def current_stream(self, device: Any = None) -> Stream:
        return Stream()

    def stream(self, stream: Stream) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self, device: Any = None) -> None:
        raise HostWaitsError("the host waits for the device")

    def manual_seed_all(self, seed: int) -> None: ...

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


class HostWaitsError(RuntimeError):
    """The host would wait for the device."""


class NoWaiting(DispatchMode):
    """Raises on copies between host and device that wait, and says where any operator failed.

    Attributes:
        action: What is being run; set by the user.
        reductions: The number of reduce-scatters that began in each action.
    """

    def __init__(self) -> None:
        super().__init__()
        self.action = ""
        self.reductions: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.reductions[self.action] += "reduce_scatter" in func.name()
        if func is read_scalar and args[0].device.type == "cpu":
            return 1  # such as an optimizer's step counter: nothing is read from the device
        try:
            if func is copy_to:
                self._check(args[0].device, kwargs.get("device"), kwargs.get("non_blocking"))
            if func is torch.ops.aten.copy_.default:
                asynchronous = args[2] if len(args) > 2 else kwargs.get("non_blocking")
                self._check(args[1].device, args[0].device, asynchronous)
            return func(*args, **kwargs)
        except Exception:
            # In the recomputation of a backward, autograd's thread would end the process instead of
            # raising this.
            traceback.print_stack(file=sys.stderr)
            raise

    def _check(self, source: torch.device, to: torch.device | None, asynchronous: bool | None) -> None:
        if to is not None and source.type != to.type and not asynchronous:
            raise HostWaitsError(f"a copy from {source.type} to {to.type} waits for the device")


@contextmanager
def fake_rank(rank: int, world: int) -> Iterator[torch.device]:
    """Makes this process that rank of a world whose other ranks do not exist; yields its device."""
    if not hasattr(torch, NAME):
        register_fake_device(NAME, Module())
        # One kernel, as on CUDA; torch's own for other devices computes it from several.
        _KERNELS.impl("silu_backward", lambda gradient, x: torch.empty_like(x), "PrivateUse1")
    backend = f"cpu:fake,{NAME}:fake_{NAME}"
    dist.init_process_group(backend, store=dist.HashStore(), rank=rank, world_size=world)
    try:
        yield torch.device(NAME, 0)
    finally:
        dist.destroy_process_group()


__all__ = ["NAME", "Event", "HostWaitsError", "NoWaiting", "fake_rank", "fake_tensors"]
