"""Tensor parallelism with sequence parallelism (mesh.tp; arXiv:1909.08053, arXiv:2205.05198).

A matrix that writes into the residual stream is cut by its columns, the others of attention and of
feed-forward blocks by rows, as are the embedding and the projection: `split_tensors` follows what
the family declares. Each is one DTensor under its global name, so checkpoints, optimizers and norms
need to know nothing of tp. What every rank holds whole (norms, experts, routers, adapters' halves,
matrices of several parts, keys of fewer heads than ranks, odd vocabularies) gets gradients of its
own tokens, or heads, on each: `sum_replicated` adds them up once a step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from raypp.job.family import Weight
from raypp.job.job import Job
from raypp.job.known_families import FAMILIES
from raypp.job.layer_rules import DeltaRule
from raypp.job.tensor_parts import computed_by_all, cut_dim, keeps_parts, rows_of_few_heads
from raypp.stages.models.layers import RMSNorm
from raypp.stages.models.lora import extend
from raypp.stages.models.products import Lookup, Projection
from raypp.stages.models.recomputed import product
from raypp.stages.models.stage import DecoderStage
from raypp.stages.models.tensor_ranks import MatrixCut, TensorRanks, weight_here
from raypp.stages.parallel.shard import local_part, zero_gradient

TP = "tp"
_ALONE = 1 << 20
"""Gradients of more numbers are summed by themselves, others together."""


def split_tensors(stage: nn.Module, job: Job, mesh: DeviceMesh) -> TensorRanks:
    """Keeps this rank's part of a stage's matrices, and makes its blocks compute with the others'.
    `stage`: of a family, on the meta device, with its adapters, neither sharded nor compiled.
    `mesh`: has the axis tp. `planning.check` refuses what cannot be split."""
    assert isinstance(stage, DecoderStage)
    tp, options = mesh[TP], job.model
    family, parts = FAMILIES[options.kind], keeps_parts(job)
    ranks = stage.tensor = TensorRanks(tp.get_group(), options.vocab_size)
    for name, layer in stage.model.layers.named_children():
        index, mixer = int(name), layer.get_submodule(str(layer.mixer_name))
        rule, head = options.state_rule(index), options.of_layer(index).dim_per_head
        weights = [one for one in family.weights(options, index) if computed_by_all(options, index, one)]
        back = {weight.name.rpartition(".")[0] for weight in weights if weight.residual}
        for weight in weights:
            inside, _, name = weight.name.rpartition(".")
            module, dim = layer.get_submodule(inside), cut_dim(options, index, weight, tp.size())
            repeated = rows_of_few_heads(options, index, weight, tp.size())
            if name == "weight" and hasattr(module, "cut"):
                module.cut = _cut(weight, ranks, repeated, head)  # type: ignore[assignment]
            if inside in back:
                _keep_columns(module, name, tp, dim, ranks)
                _extend(module, _IntoResidual, ranks)
            elif weight.joins:
                _keep_rows(module, name, tp, dim, _rows(weight.joins, ranks, repeated, head))
                if weight.part == "norm" and isinstance(module, RMSNorm):
                    _extend(module, _NormOverRanks, ranks)
        for inside in {weight.name.partition(".")[0] for weight in weights}:
            block: Any = layer.get_submodule(inside)
            _extend(block, _Gathering, ranks)
            for part in block.modules():
                if isinstance(part, Projection):
                    part.takes_tokens_of = tp.size()
            trains = any(parameter.requires_grad for parameter in block.parameters())
            block.gathers_again = parts and trains and job.train.activation_checkpointing == "none"
        if isinstance(rule, DeltaRule):
            heads = {name: getattr(rule, name) // tp.size() for name in ("key_heads", "value_heads")}
            mixer.rule = replace(rule, **heads)  # type: ignore[assignment]
    for end in (stage.model.embed_tokens, stage.lm_head):
        if end is not None:
            dim = None if options.vocab_size % tp.size() else 0
            _keep_rows(end, "weight", tp, dim, [ranks.part(options.vocab_size)])
    if stage.model.embed_tokens is not None:
        _extend(stage.model.embed_tokens, _RowsOfRank, ranks)
    return ranks


def _rows(joined: Sequence[int], ranks: TensorRanks, repeated: int, unit: int) -> list[range]:
    """Returns this rank's rows of every part of a parameter. `repeated`: the rows of a part with
    fewer heads than ranks, each of `unit` rows."""
    rows, first = [], 0
    for length in joined:
        part = ranks.part(length, unit if length == repeated else 1)
        rows.append(range(first + part.start, first + part.stop))
        first += length
    return rows


def _cut(weight: Weight, ranks: TensorRanks, repeated: int, unit: int) -> MatrixCut:
    """Returns how ranks share a matrix; the rest is as of `_rows`. Nothing declared: each computes
    all of it, with the gradient of its heads."""
    if weight.residual:
        return MatrixCut(inputs=ranks)
    alike = [ranks.size * unit // length if unit > 1 and length == repeated else 1 for length in weight.joins]
    rows = _rows(weight.joins, ranks, repeated, unit)
    if not weight.joins:
        alike, rows = [ranks.size], [range(weight.shape[0])]
    shared = tuple((one.start, one.stop, ranks.rank % count == 0) for one, count in zip(rows, alike, strict=True))
    return MatrixCut(gradients=ranks, rows=weight.shape[0], shared=shared if max(alike) > 1 else ())


def _extend(module: nn.Module, mixin: Any, ranks: TensorRanks) -> None:
    if not isinstance(module, mixin):
        extend(module, mixin)
        module.tensor = ranks  # type: ignore[assignment]


def _keep_columns(module: nn.Module, name: str, tp: DeviceMesh, dim: int | None, ranks: TensorRanks) -> None:
    """Cuts a parameter of a matrix that writes into the residual stream. Of a quantised one, whose
    rows cannot be cut, all is kept, and this rank computes with its columns."""
    if name == "bias":
        module.adds_bias = ranks.rank == 0  # type: ignore[assignment]  # its output is a part of a sum
        return
    if dim is None:
        module.columns = ranks.part(module.in_features)  # type: ignore[arg-type,assignment]
    else:
        _keep_part(module, name, tp, dim)
    adapted: Any = module
    if hasattr(module, "lora_A"):
        _keep_part(adapted.lora_A, "weight", tp, 1)
        if adapted.lora_dropout is not None:
            adapted.lora_dropout.columns = ranks.part(adapted.in_features).start, adapted.in_features


def _keep_rows(module: nn.Module, name: str, tp: DeviceMesh, dim: int | None, rows: list[range]) -> None:
    """Cuts a parameter that gives this rank's heads. One whose rows are not equal parts is kept,
    and this rank computes with its rows."""
    adapter: Any = getattr(module, "lora_B", None) if name == "weight" else None
    part: Any
    for part in filter(None, (module, adapter)):
        if dim is None:
            part.rows_here = [(one.start, one.stop) for one in rows]  # compiled code takes no range for a constant
        else:
            _keep_part(part, name, tp, dim)


def _keep_part(module: nn.Module, name: str, tp: DeviceMesh, dim: int) -> None:
    whole = module.get_parameter(name)
    if isinstance(whole, DTensor):  # a tied matrix, under its other name
        return
    shape = [length // (tp.size() if at == dim else 1) for at, length in enumerate(whole.shape)]
    local = torch.empty(shape, dtype=whole.dtype, device="meta")
    part = DTensor.from_local(local, tp, [Shard(dim)], run_check=False)
    setattr(module, name, nn.Parameter(part, requires_grad=whole.requires_grad))


class _Gathering(nn.Module):
    """A block that takes the tokens of all ranks. `gathers_again`: it does not keep them."""

    tensor: TensorRanks
    gathers_again: bool

    def forward(self, x_BtC: Tensor, *rest: Any) -> Any:
        """Maps `[B, t, C]` to `[B, t, C]`, and to what later layers take besides."""
        x_BTC = self.tensor.gathered(x_BtC)
        out: Any = super().forward(x_BTC, *rest)
        if self.gathers_again and torch.is_grad_enabled():
            self.tensor.let_go(x_BTC, x_BtC, out[0] if isinstance(out, tuple) else out)
        return out


class _IntoResidual(nn.Module):
    """A matrix whose columns the ranks share: what their parts give is one sum."""

    tensor: TensorRanks

    def forward(self, x: Tensor) -> Tensor:
        """Maps a part of the input `[B, T, c]` to the output of this rank's tokens `[B, t, C]`."""
        if torch.compiler.is_compiling() or getattr(self, "lora_dropout", None) is not None:
            return self._summed(x)
        return product(self._summed, x)  # a recomputation takes over the sum, not the part

    def _summed(self, x: Tensor) -> Tensor:
        return self.tensor.spread(super().forward(x))


class _NormOverRanks(RMSNorm):
    """Normalises all heads together, of which each rank has some."""

    tensor: TensorRanks

    def forward(self, x: Tensor) -> Tensor:
        """Normalises this rank's part of the last dim: `[..., width / tp]` to the same."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = self.tensor.total(wide.square().sum(-1, keepdim=True))
        normed = wide * torch.rsqrt(squares / (x.shape[-1] * self.tensor.size) + self.eps)
        return (normed * weight_here(self)).to(x.dtype)


class _RowsOfRank(Lookup):
    """Embeds all tokens, ids `[B, T]`, of which the weight has this rank's rows: `[B, t, C]`."""

    tensor: TensorRanks

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps ids `[B, T]` to `[B, t, C]`."""
        rows = self.tensor.part(self.num_embeddings)
        ids_BT = tokens - rows.start
        elsewhere_BT = (ids_BT < 0) | (ids_BT >= len(rows))
        part_BTC = super().forward(ids_BT.masked_fill(elsewhere_BT, 0))
        return self.tensor.spread(part_BTC.masked_fill(elsewhere_BT[..., None], 0))


def is_split(parameter: Tensor) -> bool:
    """Whether the ranks of a tp group hold different parts of a parameter `[...]`."""
    return isinstance(parameter, DTensor) and TP in (parameter.device_mesh.mesh_dim_names or ())


@torch.no_grad()
def sum_replicated(stages: Iterable[nn.Module], group: dist.ProcessGroup) -> None:
    """Adds up the gradients of the trained parameters that every rank of a tp group holds whole.
    Called once a step, when they are complete. Collective over the group."""
    gradients = []
    for stage in stages:
        for parameter in stage.parameters():
            if parameter.requires_grad and not is_split(parameter):
                if parameter.grad is None:
                    parameter.grad = zero_gradient(parameter)
                gradients.append(local_part(parameter.grad))
    for large in [one for one in gradients if one.numel() > _ALONE]:
        dist.all_reduce(large, group=group)
    for dtype in sorted({one.dtype for one in gradients}, key=str):
        _sum_together([one for one in gradients if one.numel() <= _ALONE and one.dtype == dtype], group)


def _sum_together(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    if gradients:
        flat = torch.cat([one.reshape(-1) for one in gradients])
        dist.all_reduce(flat, group=group)
        for one, total in zip(gradients, torch.split(flat, [one.numel() for one in gradients]), strict=True):
            one.copy_(total.view_as(one))
