"""Tensor parallelism with sequence parallelism (mesh.tp; arXiv:1909.08053, arXiv:2205.05198).

A matrix that writes into the residual stream is cut by its columns, the others of attention and of
feed-forward blocks by rows, as are the embedding and the projection: `split_tensors` follows what
the family declares. Each is one DTensor under its global name, so checkpoints, optimizers and norms
need to know nothing of tp. What every rank holds whole (norms, experts, routers, adapters' halves)
gets gradients of its own tokens, or heads, on each: `sum_replicated` adds them up once a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from raypp.job.known_families import FAMILIES
from raypp.job.models import DecoderOptions
from raypp.stages.models.lora import extend
from raypp.stages.models.products import Lookup, Projection
from raypp.stages.models.stage import DecoderStage
from raypp.stages.models.tensor_ranks import TensorRanks
from raypp.stages.parallel.shard import local_part, zero_gradient

TP = "tp"
_ALONE = 1 << 20
"""Gradients of more numbers are summed by themselves, others together."""


def split_tensors(stage: nn.Module, options: DecoderOptions, mesh: DeviceMesh) -> TensorRanks:
    """Keeps this rank's part of a stage's matrices, and makes its blocks compute with the others'.
    `stage`: of a family, on the meta device, with its adapters, neither sharded nor compiled.
    `mesh`: has the axis tp. `planning.check` refuses what cannot be split."""
    assert isinstance(stage, DecoderStage)
    tp = mesh[TP]
    ranks = stage.tensor = TensorRanks(tp.get_group())
    for index, layer in stage.model.layers.named_children():
        declared = FAMILIES[options.kind].layer(options, int(index))
        weights = [weight for weight in declared.weights(options, int(index)) if weight.part != "norm"]
        blocks = [str(layer.mixer_name), *(() if declared.routes else (declared.mlp_name,))]
        for block in blocks:
            extend(layer.get_submodule(block), _OverRanks)
            layer.get_submodule(block).tensor = ranks  # type: ignore[assignment]
        back = {weight.name.rpartition(".")[0] for weight in weights if weight.residual}
        for weight in weights:
            inside, _, name = weight.name.rpartition(".")
            if inside.partition(".")[0] in blocks:
                _split(layer.get_submodule(inside), name, tp, columns=inside in back, ranks=ranks)
    ends = [stage.model.embed_tokens, stage.lm_head]
    for end in ends:
        if end is not None:
            _split(end, "weight", tp, columns=False, ranks=ranks)
    if isinstance(stage.model.embed_tokens, Lookup):
        extend(stage.model.embed_tokens, _RowsOfRank)
        stage.model.embed_tokens.tensor = ranks  # type: ignore[assignment]
    return ranks


def _split(module: nn.Module, name: str, tp: DeviceMesh, *, columns: bool, ranks: TensorRanks) -> None:
    """Cuts a parameter of a module, and those of its adapter, by columns or by rows."""
    if name == "bias" and columns:
        assert isinstance(module, Projection)
        module.adds_bias = ranks.rank == 0  # its output is one of the parts of a sum
        return
    _keep_part(module, name, tp, 1 if columns else 0)
    adapter = getattr(module, "lora_A" if columns else "lora_B", None)
    if adapter is not None and name == "weight":
        _keep_part(adapter, "weight", tp, 1 if columns else 0)


def _keep_part(module: nn.Module, name: str, tp: DeviceMesh, dim: int) -> None:
    whole = module.get_parameter(name)
    if isinstance(whole, DTensor):  # a tied matrix, under its other name
        return
    shape = [length // (tp.size() if at == dim else 1) for at, length in enumerate(whole.shape)]
    local = torch.empty(shape, dtype=whole.dtype, device="meta")
    part = DTensor.from_local(local, tp, [Shard(dim)], run_check=False)
    setattr(module, name, nn.Parameter(part, requires_grad=whole.requires_grad))


class _OverRanks(nn.Module):
    """Computes a block with the other ranks: of this rank's tokens `[B, t, C]`, the same."""

    tensor: TensorRanks

    def forward(self, x_BtC: Tensor, *rest: Any) -> Tensor:
        """Maps `[B, t, C]` to `[B, t, C]`."""
        part_BTC: Tensor = super().forward(self.tensor.gathered(x_BtC), *rest)
        return self.tensor.spread(part_BTC)


class _RowsOfRank(Lookup):
    """Embeds all tokens, ids `[B, T]`, of which the weight has this rank's rows: `[B, t, C]`."""

    tensor: TensorRanks

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps ids `[B, T]` to `[B, t, C]`."""
        held = self.num_embeddings // self.tensor.size
        ids_BT = tokens - self.tensor.rank * held
        elsewhere_BT = (ids_BT < 0) | (ids_BT >= held)
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
