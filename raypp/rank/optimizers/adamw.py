"""AdamW: torch's fused implementation; a few rows at a time for bf16 weights and 8-bit moments.

torch's fused AdamW computes in the dtype of the weights and rounds them to nearest. By rows, some
are computed in fp32, and weights and moments are rounded when they are put back, so the fp32 copies
are small. That uses only operations that IEEE 754 defines to the bit, one at a time, so a value
does not depend on its place among the rows, nor on the mesh. On CUDA one kernel computes a whole
parameter with the same bits (`models.triton_kernels`).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from raypp.errors import JobError, Problem
from raypp.job.job import OptimizerOptions
from raypp.job.precision import PRECISIONS
from raypp.kinds import OptimizerKind
from raypp.rank.optimizers.bf16_weights import Bf16Weights, as_rows
from raypp.rank.optimizers.optimizer import decay_groups
from raypp.rank.optimizers.quantised_moments import BLOCK, blocks_of, dequantise, quantise, tables
from raypp.stages.models import fused
from raypp.stages.parallel.shard import local_part, local_rows, zeros_beside
from raypp.state.checkpoint.state import SCALE

KIND = OptimizerKind("adamw", "Adam with decoupled weight decay", position=1, states_in_8bit=True, bf16_weights=True)

_Parts = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
_VALUES_AT_A_TIME = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Values of one turn. On CPUs they stay in the cache; on a GPU a turn takes about 0.2 GB."""


def build(named: list[tuple[str, nn.Parameter]], options: OptimizerOptions, precision: str) -> torch.optim.Optimizer:
    return adamw_over(decay_groups(named, options), options, precision, Bf16Weights(named))


def adamw_over(
    groups: list[dict[str, Any]], options: OptimizerOptions, precision: str, weights: Bf16Weights
) -> torch.optim.Optimizer:
    """Builds AdamW over parameter groups that carry their own `weight_decay`."""
    settings: dict[str, Any] = {"lr": options.lr, "betas": options.betas, "eps": options.eps}
    if PRECISIONS[precision].narrow_weights or options.state == "8bit":
        return AdamWByRows(groups, weights, **settings, quantised=options.state == "8bit")
    return FusedAdamW(groups, **settings, fused=True)


class FusedAdamW(torch.optim.AdamW):
    """torch's fused AdamW of the parts that this rank holds. Over the sharded tensors themselves,
    torch needs 10 ms of the host for 291 of them before its kernel begins, while the device is
    idle: it looks up how to shard each operator's results."""

    _prepared: list[_Parts] | None = None

    def prepare_fused(self) -> None:
        """Looks up the tensors of the next step, while the device is busy. Not in the first step,
        which may leave no moments. Its gradients must be there. `zero_grad` forgets them."""
        groups = [self._trained(group) for group in self.param_groups]
        if all(self.state.get(weight) for weights in groups for weight in weights):
            self._prepared = [self._parts(weights) for weights in groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients."""
        self._prepared = None
        super().zero_grad(set_to_none)

    def _trained(self, group: dict[str, Any]) -> list[Tensor]:
        return [parameter for parameter in group["params"] if parameter.grad is not None]

    def _parts(self, weights: list[Tensor]) -> _Parts:
        """Returns this rank's parts `[...]` of weights, gradients, moments, and the counts `[]`."""
        states = [self.state[weight] for weight in weights]
        for weight, state in zip(weights, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        return (
            [local_part(weight) for weight in weights],
            [local_part(weight.grad) for weight in weights if weight.grad is not None],
            [local_part(state["exp_avg"]) for state in states],
            [local_part(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        prepared = self._prepared or [self._parts(self._trained(group)) for group in self.param_groups]
        self._prepared = None
        for group, parts in zip(self.param_groups, prepared, strict=True):
            adamw(
                *parts,
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


class AdamWByRows(torch.optim.Optimizer):
    """AdamW with decoupled weight decay. The state of a parameter is `step` and its two moments.

    With 8-bit moments, those of matrices are `exp_avg` and `exp_avg_sq` (codes, uint8; the latter
    of the root of the moment) and `exp_avg_scale` and `exp_avg_sq_scale` (fp32, one per block).
    Vectors' moments are always fp32: they are few. `quantised`: whether moments are 8-bit.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        weights: Bf16Weights,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        quantised: bool,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self.weights, self.quantised = weights, quantised

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self._new_state(parameter))
        state["step"] += 1
        count, (beta1, beta2) = int(state["step"]), group["betas"]
        rate = group["lr"] / (1 - beta1**count)
        root = (1 - beta2**count) ** 0.5
        local = local_part(parameter)
        if not local.numel():
            return
        kernels = fused.kernels(local.device)
        if kernels is not None:
            place, key = self.weights.rounding(parameter)
            small = "exp_avg" + SCALE in state
            moments, scales = (
                tuple(as_rows(local_part(state[name + kind])) for name in ("exp_avg", "exp_avg_sq"))
                for kind in (("", SCALE) if small else ("", ""))
            )
            kernels.adamw(
                as_rows(local_part(parameter.detach())),
                as_rows(local_part(parameter.grad).contiguous()),  # type: ignore[arg-type]
                moments,
                scales if small else None,
                tables(local.device) if small else (),
                None if place is None else (place.rows_R, place.width, place.start, key),
                (self.weights.factor, beta1, 1 - beta1, beta2, 1 - beta2, 1 / root, group["eps"], rate,
                 1 - group["lr"] * group["weight_decay"]),
            )  # fmt: skip
            return
        columns = local.shape[-1]
        rows = max(1, _VALUES_AT_A_TIME.get(local.device.type, 1 << 22) // columns)
        for first in range(0, local.numel() // columns, rows):
            turn = slice(first, first + rows)
            gradient = self.weights.gradient(parameter, turn)
            average = _read(state, "exp_avg", turn).mul_(beta1).add_(gradient * (1 - beta1))
            square = _read(state, "exp_avg_sq", turn).mul_(beta2).add_((gradient * gradient).mul_(1 - beta2))
            _write(state, "exp_avg", turn, average)
            _write(state, "exp_avg_sq", turn, square)
            change = average.div_(square.sqrt_().mul_(1 / root).add_(group["eps"])).mul_(rate)
            values = self.weights.values(parameter, turn).mul_(1 - group["lr"] * group["weight_decay"])
            self.weights.write(parameter, values.sub_(change), turn)

    def _new_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Returns `step` `[]`, moments of the parameter's shape `[..., L]`, and their scales. There
        are scales `[..., N]` only if the moments are in 8 bits, one for each of N blocks."""
        small = self.quantised and parameter.ndim > 1
        dtype = torch.uint8 if small else torch.promote_types(parameter.dtype, torch.float32)
        state = {"step": torch.zeros(())}
        state |= {key: torch.zeros_like(parameter, dtype=dtype) for key in ("exp_avg", "exp_avg_sq")}
        if small:
            _check_blocks(parameter)
            blocks = blocks_of(parameter.shape[-1])
            for key in ("exp_avg", "exp_avg_sq"):
                state[key + SCALE] = zeros_beside(parameter, blocks, torch.float32)
        return state


def _read(state: dict[str, Tensor], key: str, rows: slice) -> Tensor:
    """Returns a copy of some rows of a moment, at least fp32 `[R, L]`."""
    kept = as_rows(local_part(state[key]))[rows]
    if key + SCALE not in state:
        return kept.clone()
    signed = key == "exp_avg"
    moments = dequantise(kept, as_rows(local_part(state[key + SCALE]))[rows], signed=signed)
    return moments if signed else moments.mul_(moments)


def _write(state: dict[str, Tensor], key: str, rows: slice, values: Tensor) -> None:
    """Keeps some rows `[R, L]` of a moment."""
    kept = as_rows(local_part(state[key]))[rows]
    if key + SCALE not in state:
        kept.copy_(values)
        return
    signed = key == "exp_avg"
    codes, scales = quantise(values if signed else values.sqrt(), signed=signed)
    kept.copy_(codes)
    as_rows(local_part(state[key + SCALE]))[rows].copy_(scales)


def _check_blocks(parameter: nn.Parameter) -> None:
    """Raises a JobError if this rank's columns cut a block; `planning.check` says so earlier."""
    place, columns = local_rows(parameter), local_part(parameter).shape[-1]
    if columns != place.width and (place.start % BLOCK or columns % BLOCK):
        what = (
            f"8bit needs whole blocks of {BLOCK} columns on each rank, but rows of {place.width} are cut at {columns}"
        )
        raise JobError(Problem("train.optimizer.state", what, "use state: fp32, or another mesh.ep"))
