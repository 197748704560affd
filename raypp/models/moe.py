"""Mixture of experts: the block with its router, and the router's losses. No token is dropped.

Each token goes to its `experts_per_token` most likely experts. Their outputs are summed, weighted
with the router's probabilities, normalised to sum to 1 (Mixtral, arXiv:2401.04088, section 2.1)
unless `norm_topk_prob` is false.

Legend: S tokens of a microbatch on this rank, E experts, K experts per token, N = S · K rows sent
to experts, C residual width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from raypp.models.experts import ClampedExperts, Exchange, StackedExperts, counted, inverse, reordered, repeated
from raypp.models.layers import DecoderLayer, GatedFeedForward
from raypp.models.products import Projection
from raypp.spec.decoder_layer import Layer
from raypp.spec.models import MoeOptions


class MixtureOfExperts(nn.Module):
    """The feed-forward block of a layer with experts.

    Args:
        options: The `model:` section.
        layer: The names of the experts' matrices; whether they are those of gpt-oss; and the inner
            width of an expert that gets every token. Its output is multiplied by a gate,
            σ(x · w), and added.

    Attributes:
        exchange: Runs experts that are spread over ranks. None: this rank holds all of them. Set by
            `parallel.expert`.
        router_sums: The sums of the router losses since they were last taken.
        microbatch_group: The ranks that share a microbatch (context parallelism), for the balance
            loss. None: only this rank.
    """

    def __init__(self, options: MoeOptions, layer: Layer) -> None:
        super().__init__()
        self.options = options
        clamped, width = layer.mlp == "clamped", options.hidden_size
        self.router_name = "router" if clamped else "gate"
        self.add_module(self.router_name, Projection(width, options.num_experts, bias=clamped))
        sizes = options.num_experts, width, options.expert_ffn_size
        self.experts = ClampedExperts(*sizes) if clamped else StackedExperts(*sizes, layer.experts)
        self.shared_expert = self.shared_expert_gate = None
        if layer.shared is not None:
            self.shared_expert = GatedFeedForward(width, layer.shared)
            self.shared_expert_gate = Projection(width, 1, bias=False)
        self.exchange: Exchange | None = None
        self.router_sums = RouterSums()
        self.microbatch_group: dist.ProcessGroup | None = None

    # Not compiled: row counts per expert and rank are Python ints, so every microbatch would
    # recompile.
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
        logits_SE = self.get_submodule(self.router_name)(x_SC)
        probabilities_SE = F.softmax(logits_SE, dim=-1, dtype=torch.promote_types(logits_SE.dtype, torch.float32))
        weights_SK, experts_SK = probabilities_SE.topk(chosen, dim=-1)
        if self.options.norm_topk_prob:
            weights_SK = weights_SK / weights_SK.sum(-1, keepdim=True)
        weights_SK = weights_SK.to(x_SC.dtype)

        counts_E = counted(experts_SK.flatten(), self.options.num_experts)
        run = None if self.exchange is None else self.exchange(counts_E)
        # What needs no counts on the host comes before `run`, which waits for them.
        order_N = experts_SK.flatten().argsort(stable=True)
        back_N = inverse(order_N)
        rows_NC = repeated(x_SC, chosen, order_N, back_N)
        sums_2 = None
        if labelled_BT is not None and torch.is_grad_enabled():
            sums_2 = router_sums(logits_SE, probabilities_SE, experts_SK, labelled_BT.flatten(), self.microbatch_group)
        rows_NC = self.experts(rows_NC, counts_E) if run is None else run(self.experts, rows_NC)
        returned_SKC = reordered(rows_NC, back_N, order_N).view(*experts_SK.shape, -1)
        out_SC = (returned_SKC * weights_SK[..., None]).sum(1)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            out_SC = out_SC + F.sigmoid(self.shared_expert_gate(x_SC)) * self.shared_expert(x_SC)

        if sums_2 is not None:
            loss = weighted(sums_2, self.options)
            if not out_SC.requires_grad:  # nothing below is trained: no backward comes here
                self.router_sums.add(sums_2)
                return out_SC.view_as(x_BTC)
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
        # Sums of ones: exact in any order.
        labelled_N = counted_S[:, None].expand(-1, chosen).flatten()
        choices_E = counted_S.new_zeros(experts).scatter_add_(0, experts_SK.flatten(), labelled_N)
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
    loss: Tensor = (options.aux_loss_weight * balance + options.z_loss_weight * z) / options.expert_layers
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
        out: Tensor = self.get_submodule(self.layer.mlp_name)(x_BTC, labelled_BT)
        return out
