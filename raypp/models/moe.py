"""Mixture of experts: a router, experts stacked into one tensor per matrix, no dropped tokens.

Each token goes to its `experts_per_token` most likely experts. Their outputs are summed, weighted
with the router's probabilities, normalised to sum to 1 (Mixtral, arXiv:2401.04088, section 2.1).
Rows are sorted by expert with permutations only, so no sum depends on thread timing.

Legend: S tokens of a microbatch on this rank, E experts, K experts per token, N = S · K rows sent
to experts, n rows of one expert, C residual width, F inner width of an expert. With experts spread
over ranks, a rank holds part of the E experts and N is the number of rows it received.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from raypp.models.layers import DecoderLayer
from raypp.spec.models import MoeOptions

Names = tuple[str, str, str]
Exchange = Callable[["StackedExperts", Tensor, Tensor], Tensor]
"""`(experts, rows_NC, counts_E) -> rows_NC`: runs rows on the ranks that hold their experts.

The rows `[N, C]` are sorted by expert. The results have the same shape and order.
"""

_GROUPED_ALIGNMENT = 8
"""The grouped kernel needs widths that are multiples of 16 bytes: 8 in bf16."""


class StackedExperts(nn.Module):
    """E gated feed-forward blocks. One parameter stacks the same matrix of all blocks.

    Args:
        count: E.
        width: C.
        inner: F.
        names: The family's names for the gate `[E, F, C]`, up `[E, F, C]` and down `[E, C, F]`
            matrices.
    """

    def __init__(self, count: int, width: int, inner: int, names: Names) -> None:
        super().__init__()
        self.names = names
        for name, shape in zip(names, ((inner, width), (inner, width), (width, inner)), strict=True):
            self.register_parameter(name, nn.Parameter(torch.empty(count, *shape)))

    def forward(self, rows_NC: Tensor, counts_E: Tensor) -> Tensor:
        """Runs every expert on its rows.

        Args:
            rows_NC: Rows sorted by expert, `[N, C]`.
            counts_E: Rows for each expert held here, int64 `[E]`. Any may be zero, even all.

        Returns:
            The results `[N, C]`, in the same order.
        """
        gate, up, down = (_held(getattr(self, name)) for name in self.names)
        way = grouped if _can_group(rows_NC, gate) else one_by_one
        return way(rows_NC, counts_E, gate, up, down)


def one_by_one(rows_NC: Tensor, counts_E: Tensor, gate_EFC: Tensor, up_EFC: Tensor, down_ECF: Tensor) -> Tensor:
    """Runs one expert after the other, without those that have no rows.

    Args:
        rows_NC: Rows sorted by expert, `[N, C]`.
        counts_E: Rows for each expert, int64 `[E]`.
        gate_EFC: `[E, F, C]`.
        up_EFC: `[E, F, C]`.
        down_ECF: `[E, C, F]`.

    Returns:
        The results `[N, C]`.
    """
    # Use unbind: its backward fills the gradient of the stack once. Each index would fill a whole
    # one.
    parts = torch.split(rows_NC, counts_E.tolist())
    experts = zip(parts, gate_EFC.unbind(), up_EFC.unbind(), down_ECF.unbind(), strict=True)
    out = [
        F.linear(F.silu(F.linear(part_nC, gate_FC)) * F.linear(part_nC, up_FC), down_CF)
        for index, (part_nC, gate_FC, up_FC, down_CF) in enumerate(experts)
        # A rank without rows runs one expert on zero rows: its backward must take part in the
        # collectives of the other ranks.
        if len(part_nC) or (index == 0 and not len(rows_NC))
    ]
    return torch.cat(out)


def grouped(rows_NC: Tensor, counts_E: Tensor, gate_EFC: Tensor, up_EFC: Tensor, down_ECF: Tensor) -> Tensor:
    """Runs all experts with one kernel per matrix, without synchronising with the CPU.

    Arguments and result are those of `one_by_one`, in bf16: rows `[N, C]` to results `[N, C]`.
    """
    ends = counts_E.cumsum(0).to(torch.int32)
    inner = F.silu(F.grouped_mm(rows_NC, gate_EFC.mT, offs=ends)) * F.grouped_mm(rows_NC, up_EFC.mT, offs=ends)
    return F.grouped_mm(inner, down_ECF.mT, offs=ends)


def _held(parameter: Tensor) -> Tensor:
    """Returns the experts that this rank holds: `[E, F, C]` or `[E, C, F]`."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _can_group(rows_NC: Tensor, gate_EFC: Tensor) -> bool:
    """Returns whether the grouped kernel can run rows `[N, C]` and matrices `[E, F, C]`.

    It needs CUDA, bf16, at least one row, and aligned widths.
    """
    return (
        rows_NC.is_cuda
        and rows_NC.dtype == gate_EFC.dtype == torch.bfloat16
        and len(rows_NC) > 0
        and all(width % _GROUPED_ALIGNMENT == 0 for width in gate_EFC.shape[1:])
    )


class MixtureOfExperts(nn.Module):
    """The feed-forward block of a layer with experts.

    Attributes:
        exchange: Runs experts that are spread over ranks. None: this rank holds all of them. Set by
            `parallel.expert`.
        router_sums: The sums of the router losses since they were last taken.
        microbatch_group: The ranks that share a microbatch (context parallelism), for the balance
            loss. None: only this rank.
    """

    def __init__(self, options: MoeOptions, names: Names) -> None:
        super().__init__()
        self.options = options
        self.gate = nn.Linear(options.hidden_size, options.num_experts, bias=False)
        self.experts = StackedExperts(options.num_experts, options.hidden_size, options.expert_ffn_size, names)
        self.exchange: Exchange | None = None
        self.router_sums = RouterSums()
        self.microbatch_group: dist.ProcessGroup | None = None

    # Not compiled: row counts per expert are Python ints, so every microbatch would recompile.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x_BTC: Tensor, labelled_BT: Tensor | None = None) -> Tensor:
        """Routes every token, including padding, and sums the outputs of its experts.

        Collective over the ep group if `exchange` is set, and over `microbatch_group` for losses.

        Args:
            x_BTC: Input `[B, T, C]`.
            labelled_BT: Tokens with a label, bool `[B, T]`. The router losses cover these tokens.
                None: no losses.

        Returns:
            The output `[B, T, C]`.
        """
        chosen = self.options.experts_per_token
        x_SC = x_BTC.reshape(-1, x_BTC.shape[-1])
        logits_SE = self.gate(x_SC)
        probabilities_SE = F.softmax(logits_SE, dim=-1, dtype=torch.promote_types(logits_SE.dtype, torch.float32))
        weights_SK, experts_SK = probabilities_SE.topk(chosen, dim=-1)
        weights_SK = (weights_SK / weights_SK.sum(-1, keepdim=True)).to(x_SC.dtype)

        order_N = experts_SK.flatten().argsort(stable=True)
        back_N = torch.empty_like(order_N)
        back_N[order_N] = torch.arange(len(order_N), device=order_N.device)
        counts_E = torch.bincount(experts_SK.flatten(), minlength=self.options.num_experts)
        rows_NC = x_SC[:, None].expand(-1, chosen, -1).reshape(-1, x_SC.shape[-1])[order_N]
        if self.exchange is None:
            rows_NC = self.experts(rows_NC, counts_E)
        else:
            rows_NC = self.exchange(self.experts, rows_NC, counts_E)
        out_SC = (rows_NC[back_N].view(*experts_SK.shape, -1) * weights_SK[..., None]).sum(1)

        if labelled_BT is not None and torch.is_grad_enabled():
            sums_2 = router_sums(logits_SE, probabilities_SE, experts_SK, labelled_BT.flatten(), self.microbatch_group)
            loss = weighted(sums_2, self.options)
            out_SC = _AddLoss.apply(out_SC, loss, sums_2.detach(), self.router_sums)  # type: ignore[no-untyped-call]
        return out_SC.view_as(x_BTC)


def router_sums(
    logits_SE: Tensor,
    probabilities_SE: Tensor,
    experts_SK: Tensor,
    labelled_S: Tensor,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Computes the router losses of one layer for a microbatch, times the tokens with a label.

    Balance loss (Switch Transformer, arXiv:2101.03961, section 2.2, for K choices): E · Σ_e f_e ·
    P_e over the tokens with a label, where f_e is the number of choices of expert e per token and
    P_e its mean probability. Z-loss (ST-MoE, arXiv:2202.08906, section 2.2): the mean of
    logsumexp(logits)².

    Args:
        logits_SE: Router logits `[S, E]`.
        probabilities_SE: Their softmax `[S, E]`, in fp32, or in the logits' dtype if wider.
        experts_SK: The chosen experts, int64 `[S, K]`.
        labelled_S: Tokens with a label, bool `[S]`.
        group: The ranks that share the microbatch; the call is collective over them. None: only
            this rank.

    Returns:
        This rank's part of the balance loss and the z-loss, `[2]`, in the dtype of the
        probabilities.
    """
    experts, chosen = probabilities_SE.shape[1], experts_SK.shape[1]
    wide = probabilities_SE.dtype
    counted_S = labelled_S.to(wide)
    with torch.no_grad():
        choices_E = torch.bincount(
            experts_SK.flatten(), weights=counted_S.repeat_interleave(chosen), minlength=experts
        ).to(wide)
        sums = torch.cat((choices_E, counted_S.sum()[None]))
        if group is not None:
            dist.all_reduce(sums, group=group)
        choices_E, tokens = sums[:-1], sums[-1].clamp(min=1)
    balance = experts * (choices_E * (probabilities_SE * counted_S[:, None]).sum(0)).sum() / tokens
    z = (logits_SE.to(wide).logsumexp(-1).square() * counted_S).sum()
    return torch.stack((balance, z))


def weighted(sums_2: Tensor, options: MoeOptions) -> Tensor:
    """Returns what the `router_sums` `[2]` of one layer add to the loss, a scalar.

    The loss is also a sum over tokens. It is divided by the global token count after all
    microbatches, so the losses of a step are token-weighted means over microbatches, regardless of
    the ranks they ran on.
    """
    balance, z = sums_2
    loss: Tensor = (options.aux_loss_weight * balance + options.z_loss_weight * z) / options.num_layers
    return loss


class RouterSums:
    """Accumulates the `router_sums` of one layer over microbatches, without a device sync."""

    def __init__(self) -> None:
        self._total_2: Tensor | None = None

    def add(self, sums_2: Tensor) -> None:
        """Adds the sums of a microbatch, `[2]`."""
        self._total_2 = sums_2.double() if self._total_2 is None else self._total_2 + sums_2

    def take(self) -> Tensor | None:
        """Returns and clears the total: balance loss and z-loss, fp64 `[2]`; None without any."""
        total_2, self._total_2 = self._total_2, None
        return total_2


class _AddLoss(torch.autograd.Function):
    """Adds a loss within a layer.

    Its gradient enters in the backward of this stage, so the stage with the main loss does not need
    to know of it. The backward also accumulates the sums: activation checkpointing may run a
    forward twice, but never a backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, sums_2: Tensor, router_sums: RouterSums) -> Tensor:
        """Returns `x` `[S, C]` unchanged; `loss` is a scalar, `sums_2` is `[2]`."""
        ctx.one, ctx.sums_2, ctx.router_sums = torch.ones_like(loss), sums_2, router_sums
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Returns the gradient `[S, C]` unchanged, and 1 for the loss."""
        ctx.router_sums.add(ctx.sums_2)
        return gradient, ctx.one, None, None


class MoeDecoderLayer(DecoderLayer):
    """A decoder layer whose feed-forward block has experts."""

    def feed_forward(self, x_BTC: Tensor, labelled_BT: Tensor | None) -> Tensor:
        """Runs the experts: `[B, T, C]` to `[B, T, C]`; tokens with a label, bool `[B, T]`."""
        out: Tensor = self.get_submodule(self.mlp_name)(x_BTC, labelled_BT)
        return out
