"""The loss: a sum over tokens, divided once by the global number of tokens.

`raypp.stages.models.stage` computes it from the final norm's output. A microbatch with few logits
goes through `token_loss_sum`, the reference. One with many goes through `loss_sum_in_chunks`: it is
cut into chunks of tokens, and no more than one chunk's logits exist at a time. The forward then
also computes the gradients: each chunk's logits are used for everything that needs them and
dropped. On CUDA a chunk's losses and the gradients of its logits are one kernel (docs/design/0062),
and a microbatch with few logits is one chunk.

Legend: B rows, T tokens, S = B · T, s tokens of a chunk, C hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from raypp.planning.loss_memory import chunk_sizes
from raypp.stages.models import fused
from raypp.stages.models.products import left_for_later
from raypp.stages.models.tensor_ranks import TensorRanks

IGNORED = -100
"""The label of a token that has none."""
_VOCABULARY_ROWS = 16_384


@dataclass(frozen=True, eq=False)
class Targets:
    """What the last stage needs in order to return a loss instead of logits. `labels_BT`: `[B, T]`,
    int64; `IGNORED` where a token has no label. `backward_next`: the backward of this microbatch is
    the stage's next computation. Then a forward in chunks also computes the gradient of the
    projection, `[V, C]`. Otherwise the backward computes it from the logits, which it computes
    again: microbatches in flight would each hold such a gradient. The bits are the same.
    `scale`: by what the backward multiplies the loss. Gradients computed before have it, too."""

    labels_BT: Tensor
    backward_next: bool = True
    scale: float = 1.0


def token_loss_sum(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Returns the summed cross-entropy of all tokens with a label, a scalar. A sum, not a mean:
    microbatches and replicas differ in tokens, and a mean of means weighs them wrongly. The
    gradients are divided by the global token count once all microbatches are accumulated.
    `labels_BT`: `[B, T]`, int64; `IGNORED` where a token has no label. It is `[]`, fp32 or the
    logits' wider dtype; 0 if no token has a label."""
    wide_SV = _wide(logits_BTV.flatten(0, 1))
    return F.cross_entropy(wide_SV, labels_BT.flatten(), ignore_index=IGNORED, reduction="sum")


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """Returns logits `[..., V]` as cap · tanh(logits / cap); unchanged if there is no cap."""
    return logits if cap is None else (logits / cap).tanh() * cap


def in_chunks(x_BTC: Tensor, weight_VC: Tensor) -> bool:
    """Whether the loss of a microbatch `[B, T, C]` is computed in chunks: in several, or where one
    kernel does it. `weight_VC`, `[V, C]`, is the projection."""
    return len(_sizes(x_BTC, weight_VC)) > 1 or for_chunks(x_BTC.device) is not losses_and_errors


def loss_sum_in_chunks(
    x_BTC: Tensor, weight_VC: Tensor, targets: Targets, cap: float | None = None, ranks: TensorRanks | None = None
) -> Tensor:
    """Returns `token_loss_sum` of the logits `x · weightᵀ`, without ever holding them all. It
    differs from the reference by rounding: sums over tokens are added chunk by chunk. `targets`:
    the labels, and when the gradient of the projection is computed. `cap`: as in `soft_capped`.
    `ranks`: those that each hold a part of the projection; the call is collective over them.
    Returns `[]`, fp32 or the wider dtype of `x_BTC`. Its backward can run once."""
    grad = torch.is_grad_enabled()
    now = grad and targets.backward_next and weight_VC.requires_grad
    x_SC, labels_S = x_BTC.detach().flatten(0, 1), targets.labels_BT.flatten()
    scale = targets.scale
    of = x_SC, weight_VC.detach(), labels_S, cap, scale, ranks
    loss, x_grad, weight_grad = _over_chunks(*of, for_x=grad, for_weight=now)
    if not grad:
        return loss
    # One node for each gradient, joined by a plain addition of 0: torch's split backward computes
    # them at different times, and torch 2.11 cannot start a backward at a node written in Python.
    zero = torch.zeros_like(loss)
    of_x: Tensor = _PrecomputedGradient.apply(x_BTC, loss, x_grad, scale)  # type: ignore[no-untyped-call]
    of_weight: Tensor
    if weight_grad is None:
        of_weight = _RecomputedGradient.apply(weight_VC, zero, x_SC, labels_S, (cap, scale, ranks))  # type: ignore[no-untyped-call]
    else:
        of_weight = _PrecomputedGradient.apply(weight_VC, zero, weight_grad, scale)  # type: ignore[no-untyped-call]
    return of_x + of_weight


class _PrecomputedGradient(torch.autograd.Function):
    """A scalar whose gradient with respect to a tensor is already computed, and scaled."""

    @staticmethod
    def forward(ctx: Any, at: Tensor, value: Tensor, gradient: Tensor, scale: float) -> Tensor:
        """Returns `value`, `[]`; `gradient` has as many numbers as `at`, `[...]`."""
        ctx.save_for_backward(gradient)
        ctx.shape, ctx.scale = at.shape, scale
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        """Returns the gradient `[...]` of `at`, given that of the value, `[]`. Runs once.
        Multiplies in place: a copy would be as large as the projection."""
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(_unscaled(upstream, ctx.scale).to(gradient.dtype)).view(ctx.shape), None, None, None


class _RecomputedGradient(torch.autograd.Function):
    """A scalar whose gradient with respect to the projection the backward computes."""

    @staticmethod
    def forward(ctx: Any, weight_VC: Tensor, value: Tensor, x_SC: Tensor, labels_S: Tensor, how: _How) -> Tensor:
        """Returns `value`, `[]`; keeps `[V, C]`, `[S, C]` and the labels `[S]` for the backward."""
        ctx.how, ctx.later, ctx.weight = how, left_for_later(), weight_VC
        ctx.save_for_backward(weight_VC, x_SC, labels_S)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        """Repeats the chunks for the gradient `[V, C]` of the projection, now or later."""
        weight_VC, x_SC, labels_S = ctx.saved_tensors
        compute = partial(_of_projection, weight_VC, x_SC, labels_S, ctx.how, upstream)
        if ctx.later is None:
            return compute(), None, None, None, None
        ctx.later.add(ctx.weight, compute)
        return None, None, None, None, None


_How = tuple[float | None, float, TensorRanks | None]
"""The cap, the scale and the ranks of `loss_sum_in_chunks`."""


def _of_projection(weight_VC: Tensor, x_SC: Tensor, labels_S: Tensor, how: _How, upstream: Tensor) -> Tensor:
    """Returns the gradient `[V, C]` of the projection, given that of the loss, `[]`."""
    _, _, gradient = _over_chunks(x_SC, weight_VC.detach(), labels_S, *how, for_x=False, for_weight=True)
    assert gradient is not None
    return gradient.mul_(_unscaled(upstream, how[1]).to(gradient.dtype))


def _unscaled(upstream: Tensor, scale: float) -> Tensor:
    """Returns the gradient `[]` of a loss whose own gradients are scaled already."""
    return upstream if scale == 1 else upstream / scale


@torch.no_grad()
def _over_chunks(
    x_SC: Tensor,
    weight_VC: Tensor,
    labels_S: Tensor,
    cap: float | None,
    scale: float,
    ranks: TensorRanks | None,
    *,
    for_x: bool,
    for_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the loss `[]` and, where wanted, the gradients `[S, C]` and `[V, C]`, scaled."""
    vocabulary = weight_VC.shape[0] if ranks is None else -(-ranks.vocabulary // ranks.size)  # the same on all
    sizes = chunk_sizes(len(x_SC), vocabulary, x_SC.device.type)
    x_grad = torch.empty_like(x_SC) if for_x else None
    summed = torch.promote_types(x_SC.dtype, torch.float32) if len(sizes) > 1 else x_SC.dtype
    weight_grad = torch.empty_like(weight_VC, dtype=summed) if for_weight else None
    compute, factor = for_chunks(x_SC.device) if ranks is None else partial(of_slice, ranks), None
    if scale != 1:  # a tensor, so that a new scale compiles nothing
        factor = torch.full((), scale, dtype=torch.float32, device=x_SC.device)
    if compute is losses_and_errors and not (for_x or for_weight):
        compute, factor = losses_and_logs, None
    losses, start = [], 0
    for x_sC, labels_s in zip(torch.split(x_SC, sizes), torch.split(labels_S, sizes), strict=True):
        scaled = () if factor is None else (factor,)
        losses_s, errors_sV = compute(F.linear(x_sC, weight_VC), labels_s, cap, *scaled)
        losses.append(losses_s.sum())
        if x_grad is not None:
            torch.mm(errors_sV, weight_VC, out=x_grad[start : start + len(x_sC)])
        if weight_grad is not None:
            _add_product(weight_grad, errors_sV, x_sC, first=start == 0)
        del errors_sV  # before the next chunk
        start += len(x_sC)
    if weight_grad is not None:
        weight_grad = weight_grad.to(weight_VC.dtype)
    return torch.stack(losses).sum(), x_grad, weight_grad


COMPILER_OPTIONS = {"deterministic": True, "split_reductions": False}
LossesAndErrors = Callable[..., tuple[Tensor, Tensor]]


@cache
def for_chunks(device: torch.device) -> LossesAndErrors:
    """Returns `losses_and_errors`, compiled if Triton runs on the device, whatever `train.compile`.
    Nothing is timed or split by how many rows there are, so the bits of a row do not depend on the
    rows beside it, nor on those of earlier chunks."""
    if fused.kernels(device) is None:
        return losses_and_errors
    return torch.compile(losses_and_errors, options={**COMPILER_OPTIONS})


def losses_and_errors(
    logits_sV: Tensor, labels_s: Tensor, cap: float | None, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the losses `[s]` of tokens, 0 without a label, and the gradients `[s, V]` of logits,
    times `scale`, `[]`. The logits are not yet capped. Compiled for CUDA it is one kernel, which
    reads them twice and writes the gradients once."""
    dtype = logits_sV.dtype
    logits_sV = soft_capped(logits_sV, cap)
    slopes_sV = None if cap is None else 1 - (_wide(logits_sV) / cap).square()
    losses_s, logs_sV = losses_and_logs(logits_sV, labels_s, None)
    del logits_sV
    ones_s1 = (labels_s != IGNORED).unsqueeze(1).to(logs_sV.dtype)
    errors_sV = logs_sV.exp_().mul_(ones_s1)
    if torch.compiler.is_compiling():  # a scatter would not be fused; without a compiler this needs memory
        errors_sV -= torch.arange(errors_sV.shape[1], device=errors_sV.device) == labels_s.unsqueeze(1)
    else:
        errors_sV.scatter_add_(1, labels_s.clamp(min=0).unsqueeze(1), -ones_s1)
    if slopes_sV is not None:
        errors_sV *= slopes_sV
    if scale is not None:
        errors_sV *= scale
    return losses_s, errors_sV.to(dtype)


def of_slice(
    ranks: TensorRanks, logits_sv: Tensor, labels_s: Tensor, cap: float | None, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns what `losses_and_errors` does, of this rank's part of the vocabulary, `[s, v]`: all
    losses, and the gradients of these logits. Collective over the ranks."""
    capped_sv = soft_capped(logits_sv, cap)
    wide_sv = _wide(capped_sv)
    most_s = ranks.largest(wide_sv.amax(-1))
    ids_s1 = (labels_s - ranks.part(ranks.vocabulary).start).unsqueeze(1)
    here_s1 = (ids_s1 >= 0) & (ids_s1 < logits_sv.shape[1])  # never without a label
    ids_s1 = ids_s1.masked_fill(~here_s1, 0)
    target_s = wide_sv.gather(1, ids_s1).sub_(most_s.unsqueeze(1)).masked_fill_(~here_s1, 0).squeeze(1)
    errors_sv = (wide_sv - most_s.unsqueeze(1)).exp_()
    total_s, target_s = ranks.summed(torch.stack((errors_sv.sum(-1), target_s)))
    labelled_s = labels_s != IGNORED
    losses_s = (total_s.log() - target_s).masked_fill(~labelled_s, 0)
    errors_sv.mul_((labelled_s / total_s).unsqueeze(1)).scatter_add_(1, ids_s1, -here_s1.to(errors_sv.dtype))
    if cap is not None:
        errors_sv *= 1 - (wide_sv / cap).square()
    if scale is not None:
        errors_sv *= scale
    return losses_s, errors_sv.to(logits_sv.dtype)


def losses_and_logs(logits_sV: Tensor, labels_s: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
    """Returns the losses `[s]` of `losses_and_errors`, and log-probabilities `[s, V]`."""
    logs_sV = _wide(soft_capped(logits_sV, cap)).log_softmax(-1)
    return F.nll_loss(logs_sV, labels_s, ignore_index=IGNORED, reduction="none"), logs_sV


def _add_product(total_VC: Tensor, errors_sV: Tensor, x_sC: Tensor, *, first: bool) -> None:
    """Adds errorsᵀ · x, of `[s, V]` and `[s, C]`, to a sum `[V, C]` in their dtype, or a wider one.
    Sets the sum if this is the first chunk."""
    if errors_sV.dtype == total_VC.dtype:
        total_VC.addmm_(errors_sV.t(), x_sC, beta=0 if first else 1)
        return
    if _adds_to_wide_sums(errors_sV.device, errors_sV.dtype):
        add: Any = torch.addmm
        add(total_VC, errors_sV.t(), x_sC, beta=0 if first else 1, out_dtype=total_VC.dtype, out=total_VC)
        return
    # Some rows at a time: the product in half precision would be half as large as the sum.
    parts = torch.split(total_VC, _VOCABULARY_ROWS), torch.split(errors_sV, _VOCABULARY_ROWS, dim=1)
    for rows_vC, errors_sv in zip(*parts, strict=True):
        product_vC = errors_sv.t() @ x_sC
        if first:
            rows_vC.copy_(product_vC)
        else:
            rows_vC.add_(product_vC)


@cache
def _adds_to_wide_sums(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether one kernel multiplies in half precision and adds to a sum in fp32: tried once. Only
    CUDA has it, and its product is not rounded before it is added."""
    if device.type != "cuda":
        return False
    ones, total = torch.ones(16, 16, dtype=dtype, device=device), torch.zeros(16, 16, device=device)
    add: Any = torch.addmm
    try:
        add(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return True


def _sizes(x: Tensor, weight_VC: Tensor) -> list[int]:
    """Returns the chunks' tokens of `x`, `[..., C]`."""
    return chunk_sizes(x.shape[:-1].numel(), weight_VC.shape[0], x.device.type)


def _wide(logits: Tensor) -> Tensor:
    """Returns logits `[..., V]` in fp32, or in their own dtype if that is wider."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
