"""Copies between a device and host memory, beside what the device computes.

Two streams copy, one in each direction. The host never waits: the computing stream waits for a
copy's event. Device memory is allocated under that stream, so a copy into new memory begins once
earlier work has been done. On a CPU the same calls copy at once.
"""

import contextlib
import logging
import mmap
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from raypp.stages.parallel.shard import local_part

log = logging.getLogger(__name__)

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Targets and sources of equal shape `[...]` and dtype."""

_ALIGNMENT = 64


class CopyStreams:
    """The two copy streams of a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._down, self._up = (None if self._module is None else self._module.Stream() for _ in range(2))

    def to_host(self, pairs: Pairs) -> Any:
        """Starts copies to host memory, after what is queued now. Returns their event. The sources
        must stay alive, and the targets unread, until `wait` has taken the event."""
        return self._copy(pairs, self._down)

    def to_device(self, pairs: Pairs) -> Any:
        """Starts copies to the device, after what is queued now. Returns their event."""
        return self._copy(pairs, self._up)

    def wait(self, event: Any) -> None:
        """Makes what the device computes from now on wait for copies; None waits for nothing."""
        if event is not None and self._module is not None:
            self._module.current_stream(self.device).wait_event(event)

    def _copy(self, pairs: Pairs, stream: Any) -> Any:
        if self._module is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        stream.wait_stream(self._module.current_stream(self.device))
        with self._module.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return stream.record_event()


def await_on_host(parameters: Iterable[Tensor]) -> None:
    """Lets the host wait until the last update's copies to host memory have arrived. Call it before
    the host reads or writes the local parts of parameters `[...]`, which may be there."""
    device = next((one.device for one in parameters if local_part(one).device != one.device), None)
    if device is not None:
        torch.get_device_module(device).current_stream(device).synchronize()


def lock_pages(data: Tensor) -> bool:
    """Page-locks host memory `[size]` for quicker copies of CUDA; returns whether it could."""
    error = torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.nbytes, 0)  # type: ignore[no-untyped-call]
    if int(error) == 0:
        return True
    log.warning("cannot page-lock %d bytes (CUDA error %d): copies take longer", data.nbytes, int(error))
    # CUDA keeps this thread's error until it is asked for: the next kernel would raise it.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return False


def unlock_pages(address: int) -> None:
    """Reverts `lock_pages` of memory that begins at an address."""
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


class HostMemory:
    """Host memory for tensors that stay there as long as the run; page-locked where CUDA is.
    torch's own page-locked memory is rounded up to a power of two, up to twice what is needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._registered: list[int] = []

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Allocates uninitialised tensors of the same shapes `[...]` and dtypes, side by side."""
        ends, end = [], 0
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            ends.append((end, end + size))
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        data = self.allocate(max(1, end))
        return [data[a:b].view(tensor.dtype).view(tensor.shape) for (a, b), tensor in zip(ends, tensors, strict=True)]

    def allocate(self, size: int) -> Tensor:
        """Allocates an uninitialised uint8 tensor `[size]`."""
        if self._device.type != "cuda":
            return torch.empty(size, dtype=torch.uint8)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        data = torch.frombuffer(memory, dtype=torch.uint8)
        if lock_pages(data):
            self._registered.append(data.data_ptr())
        return data

    def close(self) -> None:
        """Unlocks the pages. The tensors stay usable."""
        for address in self._registered:
            unlock_pages(address)
        self._registered.clear()
