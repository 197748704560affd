"""Expert parallel: the experts of a layer spread over ranks, tokens sent to them and back.

The ranks of a stage that share its weights (fsdp · cp, cp fastest) are seen as expert_shard × ep: ep neighbours hold
the experts among them, E / ep each in order, and what is left shards each expert's matrices by FSDP2. A stacked
parameter is one tensor with a global name and shape, `Shard(0)` along ep; sums, clipping and checkpoints need to know
no more. Every rank sends its rows to the experts they chose, whatever the count, and gets them back; none is dropped.

Every row is computed on exactly one rank, so an expert's gradient there is complete for its ep group; FSDP2 adds up
those of the groups, and those of dp_replicate.

Legend: N rows sorted by expert (a token is a row for each expert it chose), C width, R ranks of the ep group, E experts
of a layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from raypp.models.moe import MixtureOfExperts, StackedExperts
from raypp.records import Coordinates

EXPERT_AXES = ("pp", "dp_replicate", "expert_shard", "ep")


def make_expert_mesh(sizes: Coordinates, ep: int, device_type: str) -> DeviceMesh | None:
    """The same ranks in the same order, with fsdp · cp as expert_shard · ep. Collective over the world.

    Args:
        sizes: The mesh's shape.
        ep: mesh.ep; divides fsdp · cp.

    Returns:
        None when ep is 1: then experts are weights like others.
    """
    if ep == 1:
        return None
    shape = (sizes.pp, sizes.dp_replicate, sizes.fsdp * sizes.cp // ep, ep)
    return init_device_mesh(device_type, shape, mesh_dim_names=EXPERT_AXES)


def moe_blocks(module: nn.Module) -> list[MixtureOfExperts]:
    """The blocks with experts, in order."""
    return [part for part in module.modules() if isinstance(part, MixtureOfExperts)]


def spread_experts(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Leaves each rank its share of every layer's experts, and lets tokens find them.

    Args:
        stage: On meta, not yet sharded.
        mesh: From `make_expert_mesh`.
    """
    ep = mesh["ep"]
    exchange = ExpertExchange(ep.get_group())
    for block in moe_blocks(stage):
        block.exchange = exchange
        for name in block.experts.names:
            whole = getattr(block.experts, name)
            local = torch.empty(len(whole) // ep.size(), *whole.shape[1:], device="meta")
            spread = DTensor.from_local(local, ep, [Shard(0)], run_check=False)
            setattr(block.experts, name, nn.Parameter(spread))


def expert_fsdp_settings(mesh: DeviceMesh) -> dict[str, Any]:
    """What `fully_shard` of experts that are spread over ranks needs besides the job's own settings."""
    shards = mesh["expert_shard"].size()
    over: tuple[str, ...] = ("expert_shard",)
    if mesh["dp_replicate"].size() > 1:
        over = ("dp_replicate", *over)
    return {"mesh": mesh[over], "shard_placement_fn": lambda parameter: Shard(shard_dim(parameter.shape, shards))}


def shard_dim(shape: torch.Size, shards: int) -> int:
    """The dimension of a stacked parameter that FSDP2 cuts: dimension 0 is ep's, and the others it cuts evenly only.

    `planning.check` refuses sizes where neither can be cut.
    """
    return 1 if shape[1] % shards == 0 else 2


class ExpertExchange:
    """Runs experts that are spread over the ranks of a group.

    Args:
        group: The ep group; expert e is on its rank e // (E / R).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, experts: StackedExperts, rows_NC: Tensor, counts_E: Tensor) -> Tensor:
        """Sends rows to their experts and brings the results back. Collective over the group, also its backward.

        Args:
            experts: Those held here.
            rows_NC: This rank's rows, sorted by expert, `[N, C]`.
            counts_E: How many of them each of all E experts gets, int64.

        Returns:
            `[N, C]`, in the same order.
        """
        ranks = self.group.size()
        sent_RE = counts_E.view(ranks, -1)
        received_RE = torch.empty_like(sent_RE)
        dist.all_to_all_single(received_RE, sent_RE, group=self.group)
        leave, arrive = torch.stack((sent_RE.sum(1), received_RE.sum(1))).tolist()

        arrived_NC = _AllToAll.apply(rows_NC, arrive, leave, self.group)  # type: ignore[no-untyped-call]
        # They come by rank, then expert; the experts want them by expert, then rank.
        local = torch.arange(received_RE.shape[1], device=counts_E.device).repeat(ranks)
        order_N = local.repeat_interleave(received_RE.flatten()).argsort(stable=True)
        back_N = torch.empty_like(order_N)
        back_N[order_N] = torch.arange(len(order_N), device=order_N.device)
        done_NC = experts(arrived_NC[order_N], received_RE.sum(0))
        returned: Tensor = _AllToAll.apply(done_NC[back_N], leave, arrive, self.group)  # type: ignore[no-untyped-call]
        return returned


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks; the backward sends the gradients the way back."""

    @staticmethod
    def forward(ctx: Any, rows_NC: Tensor, arrive: list[int], leave: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.arrive, ctx.leave, ctx.group = arrive, leave, group
        return _all_to_all(rows_NC, arrive, leave, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradient, ctx.leave, ctx.arrive, ctx.group), None, None, None


def _all_to_all(rows_NC: Tensor, arrive: list[int], leave: list[int], group: dist.ProcessGroup) -> Tensor:
    # Both ends contiguous: gloo writes into a strided output as if it were not.
    out_NC = torch.empty((sum(arrive), *rows_NC.shape[1:]), dtype=rows_NC.dtype, device=rows_NC.device)
    dist.all_to_all_single(out_NC, rows_NC.contiguous(), arrive, leave, group=group)
    return out_NC
