"""The stream under which receives are posted on CUDA.

When a receive is posted, NCCL's stream first waits for the current stream. Posted under the stream
that computes, the receive would begin only after all compute queued so far, although its message
may have been sent long before. So receives are posted under a stream on which nothing ever runs:
they begin as soon as their communicator is free.

The buffer must then be allocated under that stream, too. Memory that the compute stream has freed
may still be read by kernels in its queue, for which such a receive does not wait. The compute
stream waits for the receive (`Work.wait`) and is recorded on the buffer, so the allocator gives its
memory to a later receive only after the kernels that read it.

Nothing of this happens on CPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def posting_receives(device: torch.device) -> AbstractContextManager[object]:
    """Returns the context in which to allocate the buffers of receives and to post them."""
    return torch.cuda.stream(_stream(device)) if device.type == "cuda" else nullcontext()


def computes_on(buffer: Tensor) -> Tensor:
    """Records the current stream on a received buffer `[...]`. Call it after `Work.wait`."""
    if buffer.is_cuda:
        buffer.record_stream(torch.cuda.current_stream(buffer.device))
    return buffer
