"""Mixture of experts: the block with its router, and the router's losses. No token is dropped.

Each token goes to the `experts_per_token` experts with the largest scores. Their outputs are
summed, weighted with the scores, normalised to sum to 1 (Mixtral, arXiv:2401.04088, section 2.1)
unless `norm_topk_prob` is false. A router may have a bias that takes part in the choice alone, and
that follows the load of the experts (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).

Legend: S tokens of a microbatch on this rank, E experts, K experts per token, N = S · K rows sent
to experts, C residual width.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from raypp.job.decoder_layer import Layer, Router
from raypp.job.models import DecoderOptions, MoeOptions, RouterOptions
from raypp.stages.models.experts import (
    ClampedExperts,
    Exchange,
    ExpertStacks,
    JoinedExperts,
    StackedExperts,
    combined,
    counted,
    inverse,
    repeated,
)
from raypp.stages.models.layers import DecoderLayer, GatedFeedForward
from raypp.stages.models.products import Projection, linear


class MixtureOfExperts(nn.Module):
    """The feed-forward block of a layer with experts.

    Args:
        layer: The names of the experts' matrices; whether they are those of gpt-oss; how they are
            scored; and the inner width of an expert that gets every token. Its output is added,
            multiplied by a gate, σ(x · w), if it has one.

    Attributes:
        exchange: Runs experts that are spread over ranks. None: this rank holds all of them. Set by
            `parallel.expert`.
        router_sums: The sums of the router losses since they were last taken.
        microbatch_group: The ranks that share a microbatch (context parallelism), for the balance
            loss. None: only this rank.
    """

    def __init__(self, options: MoeOptions, layer: Layer) -> None:
        super().__init__()
        self.options, self.scores_by = options, layer.router
        clamped, width = layer.mlp == "clamped", options.hidden_size
        self.router_name = "router" if clamped else "gate"
        self.add_module(self.router_name, Projection(width, options.num_experts, bias=clamped))
        sizes = options.num_experts, width, options.expert_ffn_size
        self.experts: ExpertStacks
        if layer.mlp == "joined":
            self.experts = JoinedExperts(*sizes)
        else:
            self.experts = ClampedExperts(*sizes) if clamped else StackedExperts(*sizes, layer.matrices)
        self.shared_name = self.shared_expert_gate = None
        if layer.shared is not None:
            self.shared_name = layer.shared_name
            self.add_module(self.shared_name, GatedFeedForward(width, layer.shared))
            if layer.shared_gate:
                self.shared_expert_gate = Projection(width, 1, bias=False)
        if layer.router.bias is not None:
            (inside, _, name), shape = layer.router.bias[0].rpartition("."), layer.router.bias[1]
            if inside and not hasattr(self, inside):
                self.add_module(inside, nn.Module())
            self.get_submodule(inside).register_buffer(name, torch.empty(shape))
        self.exchange: Exchange | None = None
        self.router_sums = RouterSums()
        self.microbatch_group: dist.ProcessGroup | None = None

    # Not compiled: row counts per expert and rank are Python ints, so every microbatch would
    # recompile.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x_BTC: Tensor, labelled_BT: Tensor | None = None) -> Tensor:
        """Routes every token, including padding, and sums the outputs of its experts. Collective
        over the ep group if `exchange` is set, and over `microbatch_group` for losses.
        `labelled_BT`: tokens with a label, bool `[B, T]`. The router losses cover these tokens.
        None: no losses. Returns the output `[B, T, C]`."""
        chosen = self.options.experts_per_token
        x_SC = x_BTC.reshape(-1, x_BTC.shape[-1])
        logits_SE, scores_SE = self._scores(x_SC)
        experts_SK = chosen_experts(scores_SE.detach(), self.options, self.correction)
        weights_SK = self._weights(scores_SE.gather(1, experts_SK), experts_SK).to(x_SC.dtype)
        x_SC = self._taken(x_SC)

        counts_E = counted(experts_SK.flatten(), self.options.num_experts)
        run = None if self.exchange is None else self.exchange(counts_E)
        # What needs no counts on the host comes before `run`, which waits for them.
        order_N = experts_SK.flatten().argsort(stable=True)
        back_N = inverse(order_N)
        rows_NC = repeated(x_SC, chosen, order_N, back_N)
        sums_2 = None
        if labelled_BT is not None and torch.is_grad_enabled():
            shares_SE = scores_SE / scores_SE.sum(-1, keepdim=True) if self.scores_by.sigmoid else scores_SE
            sums_2 = router_sums(logits_SE, shares_SE, experts_SK, labelled_BT.flatten(), self.microbatch_group)
        rows_NC = self.experts(rows_NC, counts_E) if run is None else run(self.experts, rows_NC)
        out_SC = combined(rows_NC, weights_SK, order_N, back_N)
        if self.shared_name is not None:
            shared_SC = self.get_submodule(self.shared_name)(x_SC)
            gate = self.shared_expert_gate
            out_SC = out_SC + (shared_SC if gate is None else F.sigmoid(gate(x_SC)) * shared_SC)

        if sums_2 is not None and labelled_BT is not None:
            loss, sums = weighted(sums_2, self.options), sums_2.detach()
            if bias_rate(self.options):
                loads_E = labelled_choices(experts_SK, labelled_BT.flatten().to(sums.dtype), self.options.num_experts)
                sums = torch.cat((sums, loads_E))
            if not out_SC.requires_grad:  # nothing below is trained: no backward comes here
                self.router_sums.add(sums)
                return out_SC.view_as(x_BTC)
            out_SC = _AddLoss.apply(out_SC, loss, sums, self.router_sums)  # type: ignore[no-untyped-call]
        return out_SC.view_as(x_BTC)

    @property
    def correction(self) -> Tensor | None:
        """What is added to the scores for the choice, `[E]` or `[1, E]`; None: nothing."""
        return None if self.scores_by.bias is None else self.get_buffer(self.scores_by.bias[0])

    def _scores(self, x_SC: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the router's logits and scores of tokens `[S, C]`, `[S, E]` each."""
        gate, wide = self.get_submodule(self.router_name), torch.promote_types(x_SC.dtype, torch.float32)
        if self.scores_by == Router():
            logits_SE = gate(x_SC)
        else:  # rounded logits would choose other experts
            logits_SE = linear(x_SC.to(wide), gate.get_parameter("weight").to(wide))
        if self.scores_by.sigmoid:
            return logits_SE, logits_SE.sigmoid()
        return logits_SE, F.softmax(logits_SE, dim=-1, dtype=wide)

    def _taken(self, x_SC: Tensor) -> Tensor:
        """Returns what experts take of the tokens that the router scores, `[S, C]`."""
        return x_SC

    def _weights(self, scores_SK: Tensor, experts_SK: Tensor) -> Tensor:
        """Returns the weights of the chosen experts, `[S, K]`, given their scores."""
        if self.options.norm_topk_prob:
            sums_S1, least, added = scores_SK.sum(-1, keepdim=True), self.scores_by.least, self.scores_by.added
            scores_SK = scores_SK / (sums_S1 + added if least is None else sums_S1.clamp(min=least))
        scale = getattr(self.options, "routed_scale", 1.0)
        return scores_SK if scale == 1 else scores_SK * scale


def chosen_experts(scores_SE: Tensor, options: MoeOptions, correction: Tensor | None = None) -> Tensor:
    """Returns the experts that tokens choose, int64 `[S, K]`, by their scores `[S, E]`. With
    groups, a token's experts are of those groups whose two largest scores have the largest sums
    (arXiv:2412.19437, section 2.1.2)."""
    if correction is not None:
        scores_SE = scores_SE + correction.view(-1)
    if isinstance(options, RouterOptions) and options.chosen_groups < options.expert_groups:
        groups = scores_SE.view(len(scores_SE), options.expert_groups, -1)
        best = groups.topk(2, dim=-1).values.sum(-1).topk(options.chosen_groups, dim=-1).indices
        left_out = torch.ones(groups.shape[:2], dtype=torch.bool, device=groups.device).scatter_(1, best, False)
        scores_SE = groups.masked_fill(left_out[..., None], float("-inf")).flatten(1)
    return scores_SE.topk(options.experts_per_token, dim=-1).indices


def bias_rate(options: DecoderOptions) -> float:
    """Returns the step of correction biases; 0: they stay, or there are none."""
    return options.router_bias_rate if isinstance(options, RouterOptions) else 0.0


@torch.no_grad()
def labelled_choices(experts_SK: Tensor, labelled_S: Tensor, experts: int) -> Tensor:
    """Counts the choices of each expert by tokens with a label (1 in `[S]`, else 0): `[E]`. Sums of
    ones: exact in any order."""
    labelled_N = labelled_S[:, None].expand(-1, experts_SK.shape[1]).flatten()
    return labelled_S.new_zeros(experts).scatter_add_(0, experts_SK.flatten(), labelled_N)


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
    logsumexp(logits)². `group`: the ranks that share the microbatch; the call is collective over
    them. None: only this rank. Returns this rank's part of the balance loss and the z-loss, `[2]`,
    in the dtype of the probabilities.
    """
    experts = probabilities_SE.shape[1]
    wide = probabilities_SE.dtype
    counted_S = labelled_S.to(wide)
    with torch.no_grad():
        choices_E = labelled_choices(experts_SK, counted_S, experts)
        sums = torch.cat((choices_E, counted_S.sum()[None]))
        if group is not None:
            dist.all_reduce(sums, group=group)
        choices_E, tokens = sums[:-1], sums[-1].clamp(min=1)
    balance = experts * (choices_E * (probabilities_SE * counted_S[:, None]).sum(0)).sum() / tokens
    z = (logits_SE.to(wide).logsumexp(-1).square() * counted_S).sum()
    return torch.stack((balance, z))


def weighted(sums_2: Tensor, options: MoeOptions) -> Tensor:
    """Returns what the `router_sums` `[2]` of one layer add to the loss, a scalar. The loss is also
    a sum over tokens. It is divided by the global token count after all microbatches, so the losses
    of a step are token-weighted means over microbatches, regardless of the ranks they ran on."""
    balance, z = sums_2
    loss: Tensor = (options.aux_loss_weight * balance + options.z_loss_weight * z) / options.expert_layers
    return loss


class RouterSums:
    """Accumulates the `router_sums` of one layer over microbatches, without a device sync. Where
    the correction bias moves, the choices of each expert follow them: `[2 + E]`, not `[2]`.
    `loss_scale`: the gradient of the losses, as a stage's backward has them."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self.loss_scale = 1.0

    def add(self, sums: Tensor) -> None:
        """Adds the sums of a microbatch."""
        self._total = sums.double() if self._total is None else self._total + sums

    def take(self) -> Tensor | None:
        """Returns and clears the total, in fp64; None without any."""
        total, self._total = self._total, None
        return total


class _AddLoss(torch.autograd.Function):
    """Adds a loss within a layer. Its gradient enters in the backward of this stage, so the stage
    with the main loss does not need to know of it. The backward also accumulates the sums:
    activation checkpointing may run a forward twice, but never a backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, sums: Tensor, router_sums: RouterSums) -> Tensor:
        """Returns `x` `[S, C]` unchanged; `loss` is a scalar, `sums` is `[N]`."""
        ctx.one, ctx.sums, ctx.router_sums = torch.full_like(loss, router_sums.loss_scale), sums, router_sums
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Returns the gradient `[S, C]` unchanged, and the scale for the loss."""
        ctx.router_sums.add(ctx.sums)
        return gradient, ctx.one, None, None


class MoeDecoderLayer(DecoderLayer):
    """A decoder layer whose feed-forward block has experts."""

    def feed(self, x_BTC: Tensor, labelled_BT: Tensor | None) -> Tensor:
        """Runs the experts: `[B, T, C]` to `[B, T, C]`; tokens with a label, bool `[B, T]`."""
        out: Tensor = self.get_submodule(self.layer.mlp_name)(x_BTC, labelled_BT)
        return out
