"""Keeps an optimizer's state in host memory, and brings it to the device for the update.

The state of any optimizer and, where the device computes in half precision from fp32 weights, those
weights too, are on the device only while their block of parameters is updated: one block arrives,
one is updated, one leaves. A parameter larger than these together comes alone. The optimizer itself
is unchanged and computes on the device, so all bits are those of a run without offload. Design
record 0035 says why it does not compute on the host.

Legend: [...] shape of this rank's part of a parameter.
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from raypp.planning import offload
from raypp.planning.offload import BLOCKS_ON_DEVICE, blocks_of
from raypp.stages.parallel.host_copies import CopyStreams, HostMemory
from raypp.stages.parallel.shard import local_part
from raypp.torch_private import fsdp_shards, gather_from, set_local

_Place = tuple[nn.Parameter, str]
"""A parameter and the key of its state; "" is the parameter itself."""


class _Moving(NamedTuple):
    """Copies under way, their event, and tensors that must not be freed before."""

    event: Any
    alive: list[Tensor]


class OffloadedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is in host memory between two updates.

    It shares groups and state with the optimizer it wraps. Between updates `state` holds tensors in
    host memory; what has one element, such as a step counter, stays where the optimizer put it.

    With `masters`, the parameters' own memory is in host memory, too: `settle` copies them there
    and leaves the device a narrow copy that FSDP gathers from. `masters`: the dtype in which FSDP
    gathers the weights, which are kept in host memory themselves. None: they are not.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        stages: Sequence[nn.Module],
        device: torch.device,
        *,
        masters: torch.dtype | None,
    ) -> None:
        super().__init__(inner.param_groups, {})
        inner.param_groups, self.state = self.param_groups, inner.state
        self._inner, self._stages, self._masters = inner, stages, masters
        self._copies, self._memory = CopyStreams(device), HostMemory(device)
        self._host: dict[_Place, Tensor] = {}
        self._gathered: dict[nn.Parameter, Tensor] = {}
        self._settled = False

    @property
    def weights(self) -> Any:
        """The wrapped optimizer's `Bf16Weights`; None if it has none."""
        return getattr(self._inner, "weights", None)

    def close(self) -> None:
        """Releases page locks. Call it when no more step will run."""
        self._memory.close()

    @torch.no_grad()
    def settle(self) -> None:
        """Moves weights (with `masters`) and state to host memory. Idempotent. Call it before the
        first step, once the weights are set: later values would not reach the device."""
        if self._settled:
            return
        self._settled = True
        if self._masters is not None:
            own = {id(parameter) for parameter in self._parameters()}
            for module in (m for stage in self._stages for m in stage.modules() if isinstance(m, FSDPModule)):
                module.reshard()
                for shard, parameter, flat in fsdp_shards(module):
                    if id(parameter) in own:
                        self._gathered[parameter] = flat.to(self._masters)
                        gather_from(shard, self._gathered[parameter])
        for parameter in self._parameters():
            self._wait(self._store([parameter]))

    @torch.no_grad()
    def weights_changed(self) -> None:
        """Brings weights that were written in host memory, after `settle`, to the device."""
        for parameter, gathered in self._gathered.items():
            local = local_part(parameter)
            gathered[: local.numel()].copy_(local.reshape(-1))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient, block by block. What the device computes
        afterwards waits until all copies to host memory have arrived."""
        self.settle()
        gradients = {parameter: parameter.grad for parameter in self._parameters()}
        updated = [parameter for parameter, gradient in gradients.items() if gradient is not None]
        for parameter in updated:
            parameter.grad = None
        elements = [_elements(parameter) for parameter in updated]
        blocks = [(sum(elements[i] for i in block), [updated[i] for i in block]) for block in blocks_of(elements)]
        try:
            arriving: _Moving | None = None
            leaving, size_leaving = None, 0
            for (size, block), (size_next, following) in zip_longest(blocks, blocks[1:], fillvalue=(0, [])):
                here, arriving = arriving or self._fetch(block), None
                if size_leaving + size + size_next <= BLOCKS_ON_DEVICE * offload.BLOCK:
                    arriving = self._fetch(following)
                self._wait(here)
                for parameter in block:
                    parameter.grad = gradients[parameter]
                self._inner.step()
                for parameter in block:
                    parameter.grad = None
                self._wait(leaving)  # only now may its device memory be used again
                leaving, size_leaving = self._store(block), size
                if arriving is None:
                    self._wait(leaving)
                    leaving, size_leaving = None, 0
            self._wait(leaving)
        finally:
            for parameter in updated:
                parameter.grad = gradients[parameter]

    def to_host(self, value: Tensor) -> Tensor:
        """Moves a state tensor `[...]` to host memory; `settle` page-locks it. For loading a
        checkpoint: the device never needs to hold all of the state."""
        return _placed(value, local_part(value).cpu())

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self.param_groups:
            yield from group["params"]

    def _wait(self, moving: _Moving | None) -> None:
        """Orders the device's next work after copies, and frees what they needed."""
        if moving is not None:
            self._copies.wait(moving.event)
            moving.alive.clear()

    def _places(self, parameters: Sequence[nn.Parameter]) -> Iterator[tuple[_Place, Tensor]]:
        """Yields what is offloaded of parameters, each tensor `[...]` where it is now."""
        for parameter in parameters:
            if parameter in self._gathered:
                yield (parameter, ""), parameter
            for key, value in self.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.numel() > 1:
                    yield (parameter, key), value

    def _put(self, place: _Place, value: Tensor, tensor: Tensor) -> None:
        """Replaces the memory of a value `[...]` by that of a tensor of the same shape."""
        parameter, key = place
        if not key:
            set_local(parameter, tensor)
        else:
            self.state[parameter][key] = _placed(value, tensor)

    def _fetch(self, block: Sequence[nn.Parameter]) -> _Moving:
        pairs = []
        for place, value in list(self._places(block)):
            pairs.append((torch.empty_like(self._host[place], device=self._copies.device), self._host[place]))
            self._put(place, value, pairs[-1][0])
        return _Moving(self._copies.to_device(pairs), [])

    def _store(self, block: Sequence[nn.Parameter]) -> _Moving:
        """Starts to bring a block to host memory; its weights are gathered from copies."""
        moved = [(place, value, local_part(value)) for place, value in self._places(block)]
        new = [(place, tensor) for place, _, tensor in moved if place not in self._host]
        for (place, _), host in zip(new, self._memory.like([tensor for _, tensor in new]), strict=True):
            self._host[place] = host
        for (parameter, key), _, local in moved:
            if not key:
                self._gathered[parameter][: local.numel()].copy_(local.reshape(-1))
        event = self._copies.to_host([(self._host[place], tensor) for place, _, tensor in moved])
        for place, value, _ in moved:
            self._put(place, value, self._host[place])
        return _Moving(event, [tensor for _, _, tensor in moved])


def _placed(value: Tensor, tensor: Tensor) -> Tensor:
    """Returns the value `[...]` with the memory of a tensor of the same shape."""
    if isinstance(value, DTensor):
        set_local(value, tensor)
        return value
    return tensor


def _elements(parameter: Tensor) -> int:
    """Returns the elements of a parameter `[...]` on the rank that has most of it. Ranks that share
    it must form the same blocks: updates may be collective."""
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    return -(-parameter.numel() // parameter.device_mesh.size())
