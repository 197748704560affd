"""Initial values that depend on the seed and the parameter's global name, and on nothing else.

Every parameter is drawn whole, on the CPU, by a generator of its own; a rank keeps the slice it holds. So the
mesh, the cut, the order of construction and the device do not change a single bit of the initial model.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable

import torch
from torch import Tensor, nn

from raypp.spec.families import family_of
from raypp.spec.models import DecoderOptions

WriteSlice = Callable[[Tensor, Tensor], None]

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_RESIDUAL = ("o_proj.weight", "down_proj.weight", "experts.down_proj", "experts.w2")
"""Names of matrices that write into the residual stream, in models of a user's own factory."""


def initial_value(name: str, shape: torch.Size, options: DecoderOptions, seed: int) -> Tensor:
    """The whole initial value of one parameter, on the CPU in torch's default dtype (fp32).

    Norm gains are 1 and biases 0; matrices are normal with `options.init_std`, those that write into the residual
    stream with init_std / sqrt(2 · num_layers) (GPT-2, section 2.3).
    """
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
    std = options.init_std
    if _writes_residual(name, options):
        std /= (2 * options.num_layers) ** 0.5
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def _writes_residual(name: str, options: DecoderOptions) -> bool:
    """Whether a parameter writes into the residual stream, as its family declares."""
    family, match = family_of(options), _LAYER.fullmatch(name)
    if family is None:
        return name.endswith(_RESIDUAL)
    weights = family.weights(options, int(match[1])) if match else ()
    return any(weight.residual and match and weight.name == match[2] for weight in weights)


@torch.no_grad()
def initialise(stage: nn.Module, options: DecoderOptions, seed: int, write: WriteSlice) -> None:
    """Gives every parameter of a materialised stage its initial value.

    Args:
        stage: On its device, possibly sharded.
        options: The `model:` section.
        seed: train.seed.
        write: Copies a whole value into a (possibly sharded) parameter; `parallel.shard.write_whole`.
    """
    for name, parameter in stage.named_parameters():
        write(parameter, initial_value(name, parameter.shape, options, seed))
