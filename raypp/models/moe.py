"""Mixture of experts: a router, experts stacked into one tensor per matrix, no token dropped.

Every token goes to its `experts_per_token` most likely experts; their outputs are added up with the router's
probabilities, made to sum to 1 (Mixtral, arXiv:2401.04088, section 2.1). Rows are sorted by expert by permutations
only, so that no sum depends on the order in which threads come by.

Legend: S tokens of a microbatch on this rank, E experts, K experts per token, N = S · K rows sent to experts,
C residual width, F inner width of an expert.
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
"""`(experts, rows_NC, counts_E) -> rows_NC`: sends rows, sorted by expert, to the ranks that hold the experts."""

_GROUPED_ALIGNMENT = 8
"""Widths the grouped kernel takes in bf16 are multiples of 16 bytes."""


class StackedExperts(nn.Module):
    """E gated feed-forward blocks, each matrix of all of them in one parameter.

    Args:
        count: E.
        width: C.
        inner: F.
        names: What the family calls the gate `[E, F, C]`, up `[E, F, C]` and down `[E, C, F]` matrices.
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
            counts_E: How many rows each of the experts held here gets, int64; zeros are fine, also all of them.

        Returns:
            `[N, C]`, in the same order.
        """
        gate, up, down = (_held(getattr(self, name)) for name in self.names)
        way = grouped if _can_group(rows_NC, gate) else one_by_one
        return way(rows_NC, counts_E, gate, up, down)


def one_by_one(rows_NC: Tensor, counts_E: Tensor, gate_EFC: Tensor, up_EFC: Tensor, down_ECF: Tensor) -> Tensor:
    """Expert after expert, those without a row left out."""
    # unbind, not indexing: its backward fills the stack's gradient once, where each index would fill a whole one.
    parts = torch.split(rows_NC, counts_E.tolist())
    experts = zip(parts, gate_EFC.unbind(), up_EFC.unbind(), down_ECF.unbind(), strict=True)
    out = [
        F.linear(F.silu(F.linear(part_nC, gate_FC)) * F.linear(part_nC, up_FC), down_CF)
        for index, (part_nC, gate_FC, up_FC, down_CF) in enumerate(experts)
        # A rank without any row still runs one expert on none: its backward must meet that of the other ranks.
        if len(part_nC) or (index == 0 and not len(rows_NC))
    ]
    return torch.cat(out)


def grouped(rows_NC: Tensor, counts_E: Tensor, gate_EFC: Tensor, up_EFC: Tensor, down_ECF: Tensor) -> Tensor:
    """All experts by one kernel per matrix, without a word to the CPU."""
    ends = counts_E.cumsum(0).to(torch.int32)
    inner = F.silu(F.grouped_mm(rows_NC, gate_EFC.mT, offs=ends)) * F.grouped_mm(rows_NC, up_EFC.mT, offs=ends)
    return F.grouped_mm(inner, down_ECF.mT, offs=ends)


def _held(parameter: Tensor) -> Tensor:
    """The experts held here of a parameter that may be spread over ranks."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _can_group(rows_NC: Tensor, gate_EFC: Tensor) -> bool:
    """Whether one grouped kernel does all experts: on CUDA, in bf16, with widths it takes."""
    return (
        rows_NC.is_cuda
        and rows_NC.dtype == gate_EFC.dtype == torch.bfloat16
        and len(rows_NC) > 0
        and all(width % _GROUPED_ALIGNMENT == 0 for width in gate_EFC.shape[1:])
    )


class MixtureOfExperts(nn.Module):
    """The feed-forward block of a layer with experts.

    Attributes:
        exchange: Runs experts that are spread over ranks; None: all are here. Set by `parallel.expert`.
        router_sums: What the router's losses were since they were last taken.
        microbatch_group: The ranks that share a microbatch (context parallel), for the balance loss; None: this one.
    """

    def __init__(self, options: MoeOptions, names: Names) -> None:
        super().__init__()
        self.options = options
        self.gate = nn.Linear(options.hidden_size, options.num_experts, bias=False)
        self.experts = StackedExperts(options.num_experts, options.hidden_size, options.expert_ffn_size, names)
        self.exchange: Exchange | None = None
        self.router_sums = RouterSums()
        self.microbatch_group: dist.ProcessGroup | None = None

    # Not compiled: how many rows an expert gets is a plain number, and every microbatch would be compiled anew.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x_BTC: Tensor, labelled_BT: Tensor | None = None) -> Tensor:
        """Routes every token, padding too.

        Args:
            x_BTC: Input, `[B, T, C]`.
            labelled_BT: Tokens with a label, bool `[B, T]`: those that the router's losses are over. None: no losses.
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
    """One layer's balance loss and z-loss of a microbatch, each times its tokens with a label: `[2]`, in the dtype of
    the probabilities.

    Balance (Switch Transformer, arXiv:2101.03961, section 2.2, for K choices): E · Σ_e f_e · P_e over those tokens, f_e
    the choices of expert e per token, P_e its mean probability. Z-loss (ST-MoE, arXiv:2202.08906, section 2.2): the
    mean of logsumexp(logits)².

    Args:
        logits_SE: Router logits.
        probabilities_SE: Their softmax, in fp32 or the logits' own wider dtype.
        experts_SK: The experts chosen.
        labelled_S: Tokens with a label, bool.
        group: The ranks that share the microbatch; collective over them. Each returns its tokens' part of the sum.
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
    """What one layer's `router_sums` add to the loss.

    That is a sum over tokens, too, divided by the global count after all microbatches: so the step's losses are
    token-weighted means over microbatches, whatever ranks they ran on.
    """
    balance, z = sums_2
    loss: Tensor = (options.aux_loss_weight * balance + options.z_loss_weight * z) / options.num_layers
    return loss


class RouterSums:
    """Adds up one layer's `router_sums`, microbatch by microbatch, without waiting for the device."""

    def __init__(self) -> None:
        self._total_2: Tensor | None = None

    def add(self, sums_2: Tensor) -> None:
        self._total_2 = sums_2.double() if self._total_2 is None else self._total_2 + sums_2

    def take(self) -> Tensor:
        """The total since the last call, fp64 `[2]` on the CPU: balance, z."""
        total_2, self._total_2 = self._total_2, None
        return torch.zeros(2, dtype=torch.float64) if total_2 is None else total_2.cpu()


class _AddLoss(torch.autograd.Function):
    """Adds a loss to the one being trained, where it arises: its gradient joins in this stage's own backward, so the
    stage with the main loss need not know of it. Its sums are noted there, too: a forward may be run a second time to
    recompute activations, a backward never is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, sums_2: Tensor, noted: RouterSums) -> Tensor:
        ctx.one, ctx.sums_2, ctx.noted = torch.ones_like(loss), sums_2, noted
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        ctx.noted.add(ctx.sums_2)
        return gradient, ctx.one, None, None


class MoeDecoderLayer(DecoderLayer):
    """A decoder layer whose feed-forward block has experts."""

    def feed_forward(self, x_BTC: Tensor, labelled_BT: Tensor | None) -> Tensor:
        out: Tensor = self.get_submodule(self.mlp_name)(x_BTC, labelled_BT)
        return out
