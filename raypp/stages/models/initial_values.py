"""Initial weights that depend only on the seed and the global name of the parameter.

Each number is a hash of the parameter's name, the seed, and the number's place in the whole
parameter. So a rank draws only what it holds, on its own device, and the initial model is bitwise
the same for every mesh, cut, construction order and device. Rows that are stored quantised are
quantised there, too.

Legend: R rows of a parameter, all dims but the last counted together; L width of a row.
"""

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from raypp.job.family import Weight
from raypp.job.known_families import family_of
from raypp.job.models import DecoderOptions
from raypp.records import Progress, no_progress
from raypp.stages.models.adapter_dropout import hash_key, splitmix
from raypp.stages.models.quantised import stored_formats

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_RESIDUAL = ("o_proj.weight", "down_proj.weight", "experts.down_proj", "experts.w2")
"""Suffixes of matrices that write into the residual stream, for models from a user's factory."""
_CHUNK = 1 << 20
_CHUNK_ON_CUDA = 1 << 22
"""Numbers drawn at a time; bounds the memory for intermediate results."""
_STEPS = 1 << 16
"""A normal number lies between two of so many quantiles."""


class HeldRows(Protocol):
    """Which part of a parameter this rank holds; see `parallel.shard.LocalRows`."""

    @property
    def rows_R(self) -> Tensor: ...
    @property
    def start(self) -> int: ...


@dataclass(frozen=True)
class Law:
    """How the numbers of one parameter are distributed. `kind`: `constant`, `normal` with mean 0,
    `uniform` around 0, or `decay`: the logarithm of a number uniform in 0.01 to `size`. `size`: the
    constant; the standard deviation; the bound."""

    kind: Literal["constant", "normal", "uniform", "decay"]
    size: float

    def draw(self, rows_R: Tensor, width: int, key: int) -> Tensor:
        """Returns whole rows, fp32 `[R, L]`, on the device of their numbers.

        A hash of 64 bits serves two neighbouring columns. Of 32 bits, a normal number takes 16 to
        choose two neighbouring quantiles, and 16 for its place between them. Only operations that
        every device rounds alike are used, each one a kernel of its own.

        Args:
            rows_R: Numbers of the rows in the whole parameter, int64 `[R]`.
            width: L.
            key: From `hash_key`.
        """
        if self.kind == "constant":
            return torch.full((len(rows_R), width), self.size, dtype=torch.float32, device=rows_R.device)
        words = -(-width // 2)
        counters = (rows_R * words).unsqueeze(1) + torch.arange(words, device=rows_R.device)
        bits = splitmix(counters, key).view(torch.int32)[:, :width]
        if self.kind == "uniform":
            return (bits >> 8).to(torch.float32).mul_(self.size / (1 << 23))
        if self.kind == "decay":
            middles = (torch.arange(_STEPS, dtype=torch.float64, device="cpu") + 0.5) / _STEPS
            logs = (0.01 + (self.size - 0.01) * middles).log().float().to(rows_R.device)
            return logs.index_select(0, (bits >> 16).add_(_STEPS // 2).flatten()).view(-1, width)
        lower, rise = _normal(self.size, rows_R.device)
        index = (bits >> 16).add_(_STEPS // 2).flatten()
        between = (bits & (_STEPS - 1)).flatten().to(torch.float32).mul_(1 / _STEPS)
        return rise.index_select(0, index).mul_(between).add_(lower.index_select(0, index)).view(-1, width)


@lru_cache(maxsize=8)
def _normal(std: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns quantiles of a normal distribution, and the distance to the next, fp32 `[_STEPS]`.
    The outermost are those of a quarter of a step: 4.5 standard deviations."""
    share = torch.arange(_STEPS + 1, dtype=torch.float64, device="cpu") / _STEPS
    quantiles = torch.special.ndtri(share.clamp(0.25 / _STEPS, 1 - 0.25 / _STEPS)) * std
    return quantiles[:-1].float().to(device), quantiles.diff().float().to(device)


def law_of(name: str, dims: int, columns: int, options: DecoderOptions) -> Law:
    """Returns the law of one parameter.

    Norm gains are 1 and biases 0, unless the family says otherwise. Matrices are normal with
    standard deviation `options.init_std`. Those that write into the residual stream use init_std /
    sqrt(2 · num_layers) (GPT-2, section 2.3). Of an adapter, B is 0, and A is uniform within ±1 /
    sqrt(its columns), as PEFT draws it. `columns`: size of its last dim.
    """
    declared = _declared(name, options)
    if declared is not None and declared.initial is not None:
        return Law("decay", 16.0) if declared.initial == "decay" else Law("constant", declared.initial)
    if dims <= 1:
        return Law("constant", 0.0 if name.endswith(".bias") else 1.0)
    if ".lora_B." in name:
        return Law("constant", 0.0)
    if ".lora_A." in name:
        return Law("uniform", columns**-0.5)
    residual = name.endswith(_RESIDUAL) if declared is None else declared.residual
    return Law("normal", options.init_std / ((2 * options.num_layers) ** 0.5 if residual else 1))


def initial_value(name: str, shape: torch.Size, options: DecoderOptions, seed: int) -> Tensor:
    """Returns the whole initial value `[*shape]` of one parameter by its global name, on the CPU,
    in torch's default dtype (fp32)."""
    rows_R = torch.arange(shape[:-1].numel())
    drawn = law_of(name, len(shape), shape[-1], options).draw(rows_R, shape[-1], _key(name, seed))
    return drawn.view(shape).to(torch.get_default_dtype())


@torch.no_grad()
def initialise(
    stage: nn.Module,
    options: DecoderOptions,
    seed: int,
    part_of: Callable[[Tensor], HeldRows],
    *,
    frozen: bool | None = None,
    skip: Collection[str] = (),
    progress: Progress = no_progress,
) -> None:
    """Writes the initial values of the parameters of a stage that has memory. Not collective.

    Args:
        stage: The stage on its device, possibly sharded.
        part_of: Tells which part of a parameter this rank holds: `parallel.shard.local_rows`.
        frozen: True: only frozen parameters. False: only those that are trained. None: all.
        skip: Names of parameters that have their values.
        progress: Called as numbers are written.
    """
    chosen: dict[str, tuple[Tensor, Tensor]] = {
        name: (parameter, parameter.to_local() if isinstance(parameter, DTensor) else parameter)
        for name, parameter in stage.named_parameters()
        if name not in skip and (frozen is None or frozen != parameter.requires_grad)
    }
    if frozen in (None, options.lora is not None):  # state belongs to the frozen weights if there are any
        chosen |= {name: (state, state) for name, state in stage.named_buffers() if _declared(name, options)}
    formats, done = dict(stored_formats(stage)), 0
    total = sum(local.numel() for _, local in chosen.values())
    for name, (parameter, local) in chosen.items():
        if not local.numel():
            continue
        form = formats.get(name)
        width = form.width if form is not None else parameter.shape[-1] if parameter.ndim else 1
        law, key = law_of(name, parameter.ndim, width, options), _key(name, seed)
        part = part_of(parameter)
        held_RL = local.reshape(len(part.rows_R), -1)  # a copy only of an own model's transposed matrix
        for first, last in _chunks(held_RL, width):
            drawn = law.draw(part.rows_R[first:last], width, key)
            stored = drawn if form is None else form.quantise(drawn)
            held_RL[first:last].copy_(stored.narrow(1, part.start, held_RL.shape[1]))
            done += (last - first) * held_RL.shape[1]
            progress(done, total)
        if not local.is_contiguous():
            local.copy_(held_RL.view(local.shape))


def _chunks(held_RL: Tensor, width: int) -> Iterator[tuple[int, int]]:
    step = max(1, (_CHUNK_ON_CUDA if held_RL.is_cuda else _CHUNK) // width)
    for first in range(0, len(held_RL), step):
        yield first, min(first + step, len(held_RL))


def _key(name: str, seed: int) -> int:
    return hash_key(f"initial:{seed}:{name}")


def _declared(name: str, options: DecoderOptions) -> Weight | None:
    """Returns what the family declares of a parameter; None for adapters and a user's factory."""
    family, match = family_of(options), _LAYER.fullmatch(name)
    if family is None:
        return None
    layers = range(int(match[1]), int(match[1]) + 1) if match else range(0)
    return family.stage_weights(options, layers, first=True, last=True).get(name)
