"""Expert parallelism: the experts of a layer are spread over ranks; tokens travel to them and back.

The ranks that share a stage's weights (fsdp · cp, cp fastest) form a grid expert_shard × ep. Along
ep each rank holds E / ep experts; along expert_shard FSDP2 shards each expert's matrices. A stacked
parameter is one DTensor under a global name. Each row is computed on one rank and none is dropped,
so an expert's gradient is complete for its ep group.

Legend: N rows sorted by expert (a token gives one row per expert it chose), M rows received from
other ranks, C width, R ranks of the ep group, E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from raypp.records import Coordinates
from raypp.stages.models.experts import inverse, reordered
from raypp.stages.models.moe import MixtureOfExperts
from raypp.stages.models.recomputed import once
from raypp.stages.parallel.host_copies import CopyStreams

EXPERT_AXES = ("pp", "dp_replicate", "expert_shard", "ep", "tp")


def make_expert_mesh(sizes: Coordinates, ep: int, device_type: str, options: Any = None) -> DeviceMesh | None:
    """Builds the expert mesh: the same ranks, with fsdp · cp viewed as expert_shard · ep. The order
    of the ranks stays the same. Collective over the world. `ep`: mesh.ep; divides fsdp · cp.
    `options`: NCCL's, of the groups over which FSDP shards experts. Returns the mesh with the axes
    of `EXPERT_AXES`. None if ep is 1: experts are then ordinary weights."""
    if ep == 1:
        return None
    shape = (sizes.pp, sizes.dp_replicate, sizes.shards // ep, ep, sizes.tp)
    override: dict[int | str, Any] | None = None if options is None else {"expert_shard": options}
    return init_device_mesh(device_type, shape, mesh_dim_names=EXPERT_AXES, backend_override=override)


def moe_blocks(module: nn.Module) -> list[MixtureOfExperts]:
    """Returns the blocks with experts, in order."""
    return [part for part in module.modules() if isinstance(part, MixtureOfExperts)]


def spread_experts(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Keeps this rank's share of the experts of every layer and installs the token exchange.
    `stage`: on the meta device, not sharded yet."""
    ep = mesh["ep"]
    exchange = ExpertExchange(ep.get_group())
    for block in moe_blocks(stage):
        block.exchange = exchange
        for part in block.experts.modules():  # adapters of the stacks are in modules of their own
            for name, whole in list(part.named_parameters(recurse=False)):
                local = torch.empty(len(whole) // ep.size(), *whole.shape[1:], dtype=whole.dtype, device="meta")
                spread = DTensor.from_local(local, ep, [Shard(0)], run_check=False)
                setattr(part, name, nn.Parameter(spread, requires_grad=whole.requires_grad))


def expert_fsdp_settings(mesh: DeviceMesh, *, apart: bool = False) -> dict[str, Any]:
    """Returns the `fully_shard` settings that spread experts need in addition to the job's own."""
    shards = mesh["expert_shard"].size()
    over: tuple[str, ...] = ("expert_shard",)
    if mesh["dp_replicate"].size() > 1 and not apart:
        over = ("dp_replicate", *over)
    return {"mesh": mesh[over], "shard_placement_fn": lambda parameter: Shard(shard_dim(parameter.shape, shards))}


def shard_dim(shape: torch.Size, shards: int) -> int:
    """Returns the dim of a stacked parameter `[E, F, C]` or `[E, C, F]` that FSDP2 shards: 1 or 2.
    Dim 0 is sharded by ep. FSDP2 cuts the other dims only into equal parts. `planning.check`
    refuses sizes where neither can be cut."""
    return 1 if shape[1] % shards == 0 else 2


class ExpertExchange:
    """Runs experts that are spread over the ranks of a group. `group`: the ep group. Expert e is on
    group rank e // (E / R)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._copies: CopyStreams | None = None

    def __call__(self, counts_E: Tensor) -> Callable[[nn.Module, Tensor], Tensor]:
        """Starts to agree on how many rows travel; what is returned sends them.

        The host waits for the counts in that second call only: what is queued until then keeps the
        device busy. A recomputation takes the sizes over. `counts_E`: rows for each of the E
        experts of the layer, int64 `[E]`. Returns `(experts, rows_NC) -> results_NC`: sends this
        rank's rows, sorted by expert, to the experts that other ranks hold, and returns the results
        in the same order. Collective over the group, as is its backward.
        """
        counts = once(partial(self._exchanged, counts_E))
        return lambda experts, rows_NC: self._run(experts, rows_NC, counts.sizes())

    def _run(self, experts: nn.Module, rows_NC: Tensor, sizes: _Sizes) -> Tensor:
        arrived_NC = all_to_all(rows_NC, self.group, sizes.arrive, sizes.leave)
        # Rows arrive sorted by rank, then expert. The experts need them by expert, then rank.
        ranks, held = sizes.received_RE.shape
        local = torch.arange(held, device=rows_NC.device).repeat(ranks)
        order_M = local.repeat_interleave(sizes.received_RE.flatten(), output_size=len(arrived_NC)).argsort(stable=True)
        back_M = inverse(order_M)
        done_MC: Tensor = experts(reordered(arrived_NC, order_M, back_M), sizes.received_RE.sum(0), sizes.counts)
        done_MC = reordered(done_MC, back_M, order_M)
        return all_to_all(done_MC, self.group, sizes.leave, sizes.arrive)

    def _exchanged(self, counts_E: Tensor) -> _Counts:
        """Exchanges row counts, int64 `[E]`, and starts their copy to the host. Collective."""
        ranks = self.group.size()
        sent_RE = counts_E.view(ranks, -1)
        received_RE = torch.empty_like(sent_RE)
        dist.all_to_all_single(received_RE, sent_RE, group=self.group)
        sums = torch.cat((sent_RE.sum(1), received_RE.sum(1), received_RE.sum(0)))
        if self._copies is None or self._copies.device != sums.device:
            self._copies = CopyStreams(sums.device)
        on_host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=sums.is_cuda)
        return _Counts(received_RE, sums, on_host, self._copies.to_host([(on_host, sums)]))


class _Counts:
    """Row counts on their way to the host."""

    def __init__(self, received_RE: Tensor, sums: Tensor, on_host: Tensor, copied: Any) -> None:
        self._received_RE, self._sums, self._on_host, self._copied = received_RE, sums, on_host, copied
        self._sizes: _Sizes | None = None

    def sizes(self) -> _Sizes:
        """Waits for the counts in the first call: the layer's only wait of the host."""
        if self._sizes is None:
            if self._copied is not None:
                self._copied.synchronize()
            ranks, sums = len(self._received_RE), self._on_host.tolist()
            self._sizes = _Sizes(sums[:ranks], sums[ranks : 2 * ranks], sums[2 * ranks :], self._received_RE)
        return self._sizes


@dataclass(frozen=True)
class _Sizes:
    """How many rows travel. `received_RE`: rows from each rank for each expert held here, int64
    `[R, E / R]`, on the device."""

    leave: list[int]
    arrive: list[int]
    counts: list[int]
    received_RE: Tensor


def all_to_all(
    rows: Tensor, group: dist.ProcessGroup, arrive: list[int] | None = None, leave: list[int] | None = None
) -> Tensor:
    """Sends rows `[N, ...]` to other ranks, and returns those received, `[M, ...]`.

    The backward sends the gradients back the same way. Both are collective over the group.

    Args:
        rows: This rank's rows, in the order of the ranks that receive them.
        arrive: Rows received from each rank, M in all. None: all ranks exchange equal parts.
        leave: Rows sent to each rank, N in all.
    """
    received: Tensor = _AllToAll.apply(rows, group, arrive, leave)  # type: ignore[no-untyped-call]
    return received


class _AllToAll(torch.autograd.Function):
    """`all_to_all` with its backward."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: dist.ProcessGroup, arrive: list[int] | None, leave: list[int] | None
    ) -> Tensor:
        """Sends rows `[N, ...]` and returns those received, `[M, ...]`."""
        ctx.group, ctx.arrive, ctx.leave = group, arrive, leave
        return _sent_to_all(rows, group, arrive, leave)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Sends gradients `[M, ...]` back and returns `[N, ...]`."""
        return _sent_to_all(gradient, ctx.group, ctx.leave, ctx.arrive), None, None, None


def _sent_to_all(rows: Tensor, group: dist.ProcessGroup, arrive: list[int] | None, leave: list[int] | None) -> Tensor:
    # Input and output must be contiguous: gloo silently ignores the strides of the output.
    length = len(rows) if arrive is None else sum(arrive)
    out = torch.empty((length, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    dist.all_to_all_single(out, rows.contiguous(), arrive, leave, group=group)
    return out
