"""Finds accesses of memory that nothing orders among the streams of the fake accelerator.

While `StreamOrder` is active, every operator is an access of a stream to storages, and a collective
is one of its communicator's stream, which begins after the current stream and which `Work.wait`
makes the current stream wait for, as NCCL's do. Streams, events, and which access is ordered after
which, are those of torch's sanitizer of CUDA streams. Three rules, of which that sanitizer has the
first:

- An access is ordered after the last write of the same storage, and a write after all reads since.
- Memory is given again to the stream that it was allocated under. By then, that stream is ordered
  after all accesses, or a stream that was recorded on it (`Tensor.record_stream`) had been when the
  memory was freed. Which allocation gets the memory is not known: the next one of that stream may.
- The host touches a storage of its own only when it has waited for the copies to or from it.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.torch_private import order_of_streams, schema_of
from raypp.stages.parallel.shard import local_part
from raypp.stages.pipeline.planned_stage import _stream as posting_stream
from raypp.tools import fake_device
from raypp.torch_private import DispatchMode, read_scalar


@dataclass
class _Memory:
    """A storage.

    Attributes:
        home: The stream that it was allocated under; None for host memory.
        write: Stream, number and operator of the last write.
        reads: The same of the reads since.
        last: The number of each stream's last access.
        recorded: Streams that `record_stream` named.
    """

    reference: Any
    home: int | None
    write: tuple[int, int, str] | None = None
    reads: list[tuple[int, int, str]] = field(default_factory=list)
    last: dict[int, tuple[int, str]] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)


class StreamOrder(DispatchMode):
    """Notes every access of the device's streams and of the host to memory.

    Attributes:
        action: What is being run; set by the user.
        found: A line for each access that is not ordered after another.
        used: The streams on which something ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self.action, self.found, self._number = "", [], 0
        self.order = order_of_streams()
        self.current = 0
        self._streams = self._events = 0
        self._memories: dict[int, _Memory] = {}  # by the storage's id
        self._freed: dict[int, list[dict[int, tuple[int, str]]]] = defaultdict(list)
        self._of_groups: dict[Any, int] = {}
        self.used: set[int] = set()

    # Streams and events.

    def new_stream(self) -> int:
        self._streams += 1
        self.order.create_stream(self._streams)
        return self._streams

    def new_event(self) -> int:
        self._events += 1
        self.order.create_event(self._events)
        return self._events

    def end_of(self, stream: int) -> int:
        event = self.new_event()
        self.order.record_state(event, stream)
        return event

    def wait(self, stream: int, event: int) -> None:
        self.order.stream_wait_for_event(stream, event)

    @contextmanager
    def under(self, stream: int) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def of_group(self, key: Any) -> int:
        if key not in self._of_groups:
            self._of_groups[key] = self.new_stream()
        return self._of_groups[key]

    # Accesses.

    def _after(self, stream: int, other: int, number: int) -> bool:
        return bool(self.order.is_ordered_after(stream, number, other))

    def _tell(self, what: str) -> None:
        line = f"{self.action}: {what}"
        if line not in self.found:
            self.found.append(line)

    def _memory(self, tensor: Tensor, *, made: bool = False) -> _Memory | None:
        """Returns the record of a tensor's storage; makes it if the device allocated it."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._memories:
            on_device = tensor.device.type == fake_device.NAME
            if not on_device and not made:
                return None
            self._memories[key] = _Memory(
                weakref.ref(storage, lambda _: self._freed_by(self._memories.pop(key))),
                self.current if on_device else None,
            )
        return self._memories[key]

    def _freed_by(self, memory: _Memory) -> None:
        """Keeps what still uses freed memory that its home may give to the next."""
        if memory.home is not None:
            waited = [memory.home, *memory.recorded]
            left = {
                stream: last
                for stream, last in memory.last.items()
                if not any(self._after(one, stream, last[0]) for one in waited)
            }
            self._freed[memory.home].append(left)

    def _allocated(self, name: str) -> None:
        """Checks what an allocation under the current stream may get."""
        for freed in self._freed.pop(self.current, []):
            for stream, (number, user) in freed.items():
                if not self._after(self.current, stream, number):
                    what = f"may get memory that {user} on stream {stream} still uses"
                    self._tell(f"{name} on stream {self.current} {what}")

    def resized(self, storage: Any, before: int, after: int) -> None:
        """Notes that the current stream frees a storage's memory, or allocates some for it."""
        memory = self._memories.get(id(storage))
        if memory is None or memory.home is None:
            return
        if after == 0 < before:
            self._freed_by(memory)
            self._memories[id(storage)] = _Memory(memory.reference, memory.home)
        elif after > before:
            memory.home = self.current
            self._allocated("resize_")

    def _access(self, memory: _Memory, name: str, *, write: bool) -> None:
        before = [*memory.reads] if write else []
        if memory.write is not None:
            before.append(memory.write)
        for stream, number, other in before:
            if not self._after(self.current, stream, number):
                verb = "writes" if write else "reads"
                self._tell(f"{name} on stream {self.current} {verb} what {other} on stream {stream} uses")
        now = (self.current, self._number, name)
        memory.last[self.current] = (self._number, name)
        if write:
            memory.write, memory.reads = now, []
        else:
            memory.reads.append(now)

    def launch(self, name: str, read: list[Tensor], written: list[Tensor]) -> None:
        self._number += 1
        self.used.add(self.current)
        self.order.update_seq_num(self.current, self._number)
        places = {id(one.untyped_storage()): one for one in written}
        for key, one in places.items():
            if key not in self._memories and one.device.type == fake_device.NAME:
                self._allocated(name)
        for one in {id(one.untyped_storage()): one for one in read}.values():
            if id(one.untyped_storage()) not in places and (memory := self._memory(one, made=True)) is not None:
                self._access(memory, name, write=False)
        for one in places.values():
            if (memory := self._memory(one, made=True)) is not None:
                self._access(memory, name, write=True)

    def _host(self, name: str, read: list[Tensor], written: list[Tensor]) -> None:
        for one in (*read, *written):
            memory = self._memory(one)
            if memory is None:
                continue
            write = any(one is other for other in written)
            before = [memory.write] if memory.write is not None else []
            for stream, number, other in [*before, *(memory.reads if write else [])]:
                if number > self.order.host_sync_state.get(stream, -1):
                    self._tell(f"{name} on the host uses what {other} on stream {stream} uses")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is read_scalar and args[0].device.type == "cpu":
            return 1
        if func is torch.ops.aten.record_stream.default:
            memory = self._memory(args[0])
            assert memory is not None
            memory.recorded.add(args[1].stream_id)
            return None
        found = func(*args, **kwargs)
        read, written = _accesses(func, args, kwargs, found)
        if read or written:
            on_device = any(one.device.type == fake_device.NAME for one in (*read, *written))
            (self.launch if on_device else self._host)(func.name(), read, written)
        return found


def _plain(values: Any) -> list[Tensor]:
    """Returns the tensors in lists, tuples and dicts, of DTensors the local ones."""
    if isinstance(values, Tensor):
        return [local_part(values) if isinstance(values, DTensor) else values]
    parts = values.values() if isinstance(values, dict) else values if isinstance(values, list | tuple) else ()
    return [tensor for part in parts for tensor in _plain(part)]


def _accesses(func: Any, args: Any, kwargs: Any, found: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Returns what an operator reads, and what it writes or makes."""
    schema = schema_of(func)
    if func.namespace == "prim":  # such as the question of a device
        return [], []
    if schema.name.startswith("c10d::"):
        every = [_plain(value) for value in args[:2]]
        if schema.name.startswith("c10d::send"):
            return every[0], []
        return every[1], every[0]
    named = {one.name: one for one in schema.arguments}
    given = [*zip(schema.arguments, args, strict=False), *((named[key], value) for key, value in kwargs.items())]
    read, written = [], []
    for argument, value in given:
        if argument.alias_info is None:
            read += _plain(value)
        elif argument.alias_info.is_write:
            written += _plain(value)
    results = found if isinstance(found, tuple | list) else [found]
    for returned, value in zip(schema.returns, results, strict=False):
        if returned.alias_info is None:
            written += _plain(value)
    if any(word in schema.name for word in ("empty", "_like", "::new_")):
        read = []
    return read, written


class _Work(dist.Work):
    """A collective of one stream. `wait` makes the current stream wait for its end."""

    def __init__(self, order: StreamOrder, stream: int, tensors: Any) -> None:
        super().__init__()
        self._order, self._event, self._tensors = order, order.end_of(stream), tensors

    def wait(self, timeout: Any = None) -> bool:
        self._order.wait(self._order.current, self._event)
        self._tensors = None
        return True

    def is_completed(self) -> bool:
        return False


def _on_its_stream(name: str, method: Callable[..., Any], order: StreamOrder) -> Callable[..., Any]:
    @wraps(method)
    def run(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        tensors = _plain((args, kwargs))
        if not any(one.device.type == fake_device.NAME for one in tensors):
            return method(self, *args, **kwargs)
        pair = tuple(sorted((self.rank(), args[1]))) if name in ("send", "recv") else ()
        stream = order.of_group((self.group_name, pair))
        order.wait(stream, order.end_of(order.current))
        with order.under(stream):
            method(self, *args, **kwargs)
        return _Work(order, stream, tensors)

    return run


@contextmanager
def ordered_streams() -> Iterator[StreamOrder]:
    """Gives the fake accelerator streams and events that are told apart; yields their order. Enter
    it before `fake_runner`, and the order itself where operators shall be noted."""
    order = StreamOrder()
    with pytest.MonkeyPatch.context() as patch:
        _tell_apart(order, patch)
        posting_stream.cache_clear()
        yield order
    posting_stream.cache_clear()


def _tell_apart(order: StreamOrder, patch: pytest.MonkeyPatch) -> None:

    class Event(fake_device.Event):
        def __init__(self, *_: Any, **__: Any) -> None:
            self.number = order.new_event()

        def record(self, stream: Any = None) -> None:
            super().record()
            order.order.record_state(self.number, order.current if stream is None else stream.stream_id)

        def wait(self, stream: Any = None) -> None:
            order.wait(order.current if stream is None else stream.stream_id, self.number)

    class Stream(fake_device.Stream):
        def __new__(cls, *_: Any, number: int | None = None, **__: Any) -> Stream:
            number = order.new_stream() if number is None else number
            return torch.Stream.__new__(cls, stream_id=number, device_index=0, device_type=20)

        def wait_event(self, event: Any) -> None:
            order.wait(self.stream_id, event.number)

        def wait_stream(self, stream: Any) -> None:
            order.wait(self.stream_id, order.end_of(stream.stream_id))

        def record_event(self, event: Any = None) -> Any:
            event = event or Event()
            event.record(self)
            return event

        def synchronize(self) -> None:
            order.order.all_streams_wait_for_stream(self.stream_id)

    module = fake_device.Module
    patch.setattr(module, "Event", Event)
    patch.setattr(module, "Stream", Stream)
    patch.setattr(module, "current_stream", lambda self, device=None: Stream(number=order.current))
    patch.setattr(module, "stream", lambda self, stream: order.under(stream.stream_id))
    for name, method in list(vars(dist.ProcessGroup).items()):
        if callable(method) and not name.startswith("__"):
            patch.setattr(dist.ProcessGroup, name, _on_its_stream(name, method, order))
    resize = torch.UntypedStorage.resize_

    def resized(storage: Any, size: int) -> Any:
        before = storage.nbytes()
        done = resize(storage, size)
        order.resized(storage, before, size)
        return done

    patch.setattr(torch.UntypedStorage, "resize_", resized)
