"""Initial values that depend only on the seed and the global name of the parameter.

Each parameter is drawn whole, on the CPU, with its own generator; a rank keeps the slice it holds.
So the initial model is bitwise the same for every mesh, cut, construction order and device.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable

import torch
from torch import Tensor, nn

from raypp.spec.families import family_of
from raypp.spec.family import Weight
from raypp.spec.models import DecoderOptions

WriteSlice = Callable[[Tensor, Tensor], None]

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_RESIDUAL = ("o_proj.weight", "down_proj.weight", "experts.down_proj", "experts.w2")
"""Suffixes of matrices that write into the residual stream, for models from a user's factory."""


def initial_value(name: str, shape: torch.Size, options: DecoderOptions, seed: int) -> Tensor:
    """Returns the whole initial value of one parameter.

    Norm gains are 1 and biases 0, unless the family says otherwise. Matrices are normal with
    standard deviation `options.init_std`. Those that write into the residual stream use init_std /
    sqrt(2 · num_layers) (GPT-2, section 2.3).

    Args:
        name: The global name of the parameter.
        shape: Its whole shape.
        options: The `model:` section.
        seed: train.seed.

    Returns:
        A tensor `[*shape]` on the CPU, in torch's default dtype (fp32).
    """
    declared = _declared(name, options)
    if declared is not None and declared.initial is not None:
        return torch.full(shape, declared.initial)
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
    std = options.init_std
    if name.endswith(_RESIDUAL) if declared is None else declared.residual:
        std /= (2 * options.num_layers) ** 0.5
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def _declared(name: str, options: DecoderOptions) -> Weight | None:
    """Returns what the family declares of a parameter; None for a user's own factory."""
    family, match = family_of(options), _LAYER.fullmatch(name)
    if family is None:
        return None
    layers = range(int(match[1]), int(match[1]) + 1) if match else range(0)
    return family.stage_weights(options, layers, first=True, last=True)[name]


@torch.no_grad()
def initialise(stage: nn.Module, options: DecoderOptions, seed: int, write: WriteSlice) -> None:
    """Writes the initial value of every parameter of a stage that has memory.

    Args:
        stage: The stage on its device, possibly sharded.
        options: The `model:` section.
        seed: train.seed.
        write: Copies a whole value into a parameter that may be sharded; see
            `parallel.shard.write_whole`.
    """
    for name, parameter in stage.named_parameters():
        write(parameter, initial_value(name, parameter.shape, options, seed))
