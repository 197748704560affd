"""What each rank of a tp group holds of a model's weights, and keeps for its backwards. No torch.

A rank holds an equal part of what is cut, and all of the rest, such as norms, routers, experts, and
matrices whose parts are not equal.
"""

from collections.abc import Iterable
from dataclasses import replace

from raypp.job.family import Weight
from raypp.job.job import Job
from raypp.job.known_families import counted_family
from raypp.job.lora import Adapter, is_quantised, quantised_base
from raypp.job.models import DecoderOptions


def layer_on_rank(model: DecoderOptions, index: int, weights: Iterable[Weight], tp: int) -> list[Weight]:
    """Returns the weights of the layer with a global index as one of `tp` ranks holds them."""
    return [_part(weight, cut_dim(model, index, weight, tp), tp) for weight in weights]


def adapters_on_rank(model: DecoderOptions, index: int, adapters: Iterable[Adapter], tp: int) -> list[Adapter]:
    """Returns the adapters of a layer as one of `tp` ranks holds them: of each, one of both halves
    is cut as its matrix is."""
    matrices = {weight.name: weight for weight in counted_family(model).weights(model, index)} if tp > 1 else {}
    found = []
    for adapter in adapters:
        matrix = matrices.get(f"{adapter.module}.weight")
        if matrix is not None:
            columns = matrix.residual and computed_by_all(model, index, matrix)
            rows = cut_dim(model, index, matrix, tp) == 0
            a, b = _part(adapter.a, 1 if columns else None, tp), _part(adapter.b, 0 if rows else None, tp)
            adapter = replace(adapter, a=a, b=b)
        found.append(adapter)
    return found


def end_on_rank(weight: Weight, tp: int) -> Weight:
    """Returns the embedding or the projection as one of `tp` ranks holds it."""
    return _part(weight, 0 if weight.shape[0] % tp == 0 else None, tp)


def key_heads(model: DecoderOptions, tp: int) -> int:
    """Returns the key heads that one of `tp` ranks computes."""
    return -(-model.kv_heads // tp)


def keeps_parts(job: Job) -> bool:
    """Whether a block keeps only this rank's tokens of what it takes, which the backward gathers
    again, and of what it gives. Compiled code keeps all, and an adapter with dropout what it made
    of them."""
    lora = job.model.lora
    return job.mesh.tp > 1 and not job.train.compiles and not (lora is not None and lora.dropout)


def cut_dim(model: DecoderOptions, index: int, weight: Weight, tp: int) -> int | None:
    """Returns the dim along which a weight of a layer is cut; None if each rank has it whole."""
    if tp == 1 or not computed_by_all(model, index, weight):
        return None
    if weight.residual:
        return None if quantised_base(model) is not None and is_quantised(weight) else 1
    if len(weight.joins) != 1 or weight.joins[0] % tp:
        return None
    return None if weight.joins[0] == rows_of_few_heads(model, index, weight, tp) else 0


def rows_of_few_heads(model: DecoderOptions, index: int, weight: Weight, tp: int) -> int:
    """Returns the rows of a weight's part that projects to fewer key heads than there are ranks, so
    that several ranks compute with the same head; 0: it has no such part."""
    own = model.of_layer(index)
    if weight.part != "attention" or model.state_rule(index) is not None or own.kv_heads % tp == 0:
        return 0
    return own.kv_heads * own.dim_per_head


def computed_by_all(model: DecoderOptions, index: int, weight: Weight) -> bool:
    """Whether the ranks of a tp group compute the block of a weight together."""
    layer, block = counted_family(model).layer(model, index), weight.name.partition(".")[0]
    mixer = "self_attn" if (rule := model.state_rule(index)) is None else rule.block
    return block == mixer or (block == layer.mlp_name and not layer.routes)


def _part(weight: Weight, dim: int | None, tp: int) -> Weight:
    shape = tuple(length // tp if at == dim else length for at, length in enumerate(weight.shape))
    return weight if dim is None else replace(weight, shape=shape)
