"""A rank's part of the training state, as named slices of global tensors.

Names are the model's global names; the optimizer state of a parameter is `optim/<parameter>/<key>`.
Names depend on neither the mesh nor the cut, so any other mesh finds its slices. Frozen parameters
are not part of the state: every attempt loads them from where they came from.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from raypp.records import AXES, Coordinates
from raypp.stages.models.stage import holds_both_ends, tied_copies
from raypp.stages.parallel.outer_sync import agreed_weights, host_zeros, outer_state_of
from raypp.stages.parallel.replica_sums import Residuals, residuals_of
from raypp.stages.parallel.shard import zeros_beside
from raypp.state.checkpoint.tensor_file import OPTIMIZER
from raypp.torch_private import compute_local_shape_and_global_offset

SCALE = "_scale"
"""Ends the key of an optimizer's tensor that has its parameter's shape but for the last dim, and is
sharded like it: the scales of quantised values."""
RESIDUAL = "residual."
"""Begins the key of a residual of quantised sums, followed by the number of its replica."""
RESIDUAL_OF_COPY = "residual_of_copy."
"""The same, of the copy of a tied weight that the last stage holds."""
OUTER_MOMENTUM = "outer_momentum"
"""The key of a parameter's momentum of outer steps (`parallel.outer_sync`)."""
OWN_WEIGHT = "outer_own_weight"
"""The key of a replica's own weight, where it differs from what replicas last agreed on, which has
the parameter's name."""
OF_REPLICA = ".replica"
"""Ends, with its number, the key of an optimizer state or own weight of a replica that trains
apart, other than the first."""


@dataclass(frozen=True)
class Slice:
    """A rank's part of one global tensor.

    Attributes:
        tensor: The local values, in the slice's shape: the live storage, not a copy.
        global_shape: Shape of the whole tensor, with as many dims as `tensor`.
        offset: Where the slice begins, per dim.
        python: "int", "float" or "bool" for a plain number, kept as a 0-dim tensor; else "".
        moving: Whether it may change without an optimizer step (a buffer, written by a forward).
    """

    name: str
    tensor: Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    python: str = ""
    moving: bool = False

    @property
    def whole(self) -> bool:
        return tuple(self.tensor.shape) == self.global_shape


def gather_state(
    stages: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None,
    coordinates: Coordinates | None = None,
    *,
    copies: bool = False,
) -> dict[str, Slice]:
    """Returns the slices that this rank must write. Not a collective; no gradients may be pending.
    `optimizer`: the optimizer over those that are trained; its state may still be empty.
    `coordinates`: this rank's place in the mesh. Only the first of the ranks that hold the same
    values writes them. None: this rank writes all it holds. `copies`: includes tied weights whose
    first copy another stage holds. Returns slices by global name. Empty slices (a shard without
    elements) are left out."""
    slices: dict[str, Slice] = {}
    agreed = {name: value for stage in stages for name, value in agreed_weights(stage).items()}
    for name, tensor in _model_tensors(stages, copies=copies):
        _add(slices, name, agreed.get(name, tensor), coordinates, moving=not isinstance(tensor, nn.Parameter))
    if optimizer is not None:
        for full_name, value in _outer_momenta(stages, copies=copies):
            _add(slices, full_name, value, coordinates)
        number, _ = _apart(stages)
        if coordinates is not None and number:
            coordinates = replace(coordinates, dp_replicate=0)  # the first that holds this replica's
        for name, parameter in _parameters(stages, copies=copies):
            own = {OWN_WEIGHT: parameter} if name in agreed else {}
            for key, value in {**optimizer.state.get(parameter, {}), **own}.items():
                if value is not None:
                    _add(slices, f"{OPTIMIZER}{name}/{key}{_of_replica(number)}", value, coordinates)
        for full_name, value, *_ in _residuals(stages):
            _add(slices, full_name, value, None)  # each replica has its own
    return slices


def state_in_objects(
    stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer, coordinates: Coordinates
) -> tuple[list[Slice], list[Slice]]:
    """Returns all that this rank holds: what it writes to a checkpoint, and what others write."""
    written = gather_state(stages, optimizer, coordinates)
    held = gather_state(stages, optimizer, copies=True)
    return list(written.values()), [part for name, part in held.items() if name not in written]


def model_slices(stages: Sequence[nn.Module], *, frozen: bool = False) -> dict[str, list[Slice]]:
    """Returns the live tensors of this rank that a checkpoint's model tensors are loaded into.
    `frozen`: the frozen parameters instead, which no checkpoint has, and buffers. The slices are by
    global name, one for each place of that name: a tied weight held by two stages has two."""
    targets: dict[str, list[Slice]] = {}
    for name, tensor in _model_tensors(stages, frozen=frozen):
        targets.setdefault(name, []).append(slice_of(name, tensor))
    return targets


def optimizer_slices(
    stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer, saved: dict[str, tuple[tuple[int, ...], torch.dtype]]
) -> tuple[dict[str, list[Slice]], list[tuple[Tensor, str, Any]]]:
    """Allocates tensors for the checkpoint's optimizer state of this rank's parameters.

    The tensors are not yet in the optimizer. A state tensor of its parameter's shape is sharded
    like the parameter, and so are the scales of quantised values (`SCALE`); any other (a step
    counter) is whole. `saved`: global shape and dtype of each saved `optim/…` tensor. Returns
    targets by global name; and the optimizer's entries once filled: parameter, key, tensor.
    """
    keys: dict[str, list[str]] = {}
    end = _of_replica(_origin(stages, saved))
    for full_name in saved:
        name, _, key = full_name[len(OPTIMIZER) :].rpartition("/")
        of_optimizer = not key.startswith((RESIDUAL, RESIDUAL_OF_COPY, OUTER_MOMENTUM, OWN_WEIGHT))
        if of_optimizer and (key.endswith(end) if end else OF_REPLICA not in key):
            keys.setdefault(name, []).append(key[: len(key) - len(end)])
    on_device = {
        id(parameter)
        for group in optimizer.param_groups
        if group.get("fused") or group.get("capturable")
        for parameter in group["params"]
    }
    # `train.optimizer_offload`: the device may have no room for all of the state.
    to_host: Callable[[Tensor], Tensor] = getattr(optimizer, "to_host", lambda value: value)
    targets: dict[str, list[Slice]] = {}
    entries: list[tuple[Tensor, str, Any]] = []
    seen: set[int] = set()
    for name, parameter in _parameters(stages):
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        for key in keys.get(name, ()):
            full_name = f"{OPTIMIZER}{name}/{key}{end}"
            shape, dtype = saved[full_name]
            if shape == tuple(parameter.shape):
                value = to_host(torch.zeros_like(parameter, dtype=dtype, requires_grad=False))
            elif key.endswith(SCALE) and shape[:-1] == tuple(parameter.shape[:-1]):
                value = to_host(zeros_beside(parameter, shape[-1], dtype))
            else:
                # A step counter is on the device only if the optimizer's kernel reads it there.
                value = torch.zeros(
                    shape, dtype=dtype, device=parameter.device if id(parameter) in on_device else "cpu"
                )
            targets.setdefault(full_name, []).append(slice_of(full_name, value))
            entries.append((parameter, key, value))
    return targets, entries


@dataclass(frozen=True)
class SavedResiduals:
    """How a checkpoint's residuals of quantised sums and momenta of outer steps fill this rank's.
    `targets`: where saved residuals go, by global name. `added`: residuals that are added to this
    rank's own once they are filled. `cleared`: this rank's residuals that the checkpoint does not
    have. `remark`: what is not as it was saved, for people; "" if all is."""

    targets: dict[str, list[Slice]]
    added: list[tuple[Tensor, Tensor]]
    cleared: list[Tensor]
    remark: str

    @torch.no_grad()
    def finish(self) -> None:
        """Adds and clears. Call it once the targets are filled."""
        for own, other in self.added:
            own.add_(other)
        for own in self.cleared:
            own.zero_()


def residual_slices(stages: Sequence[nn.Module], saved: Collection[str]) -> SavedResiduals:
    """Plans how to load residuals that may be those of another number of replicas.

    What counts is their sum over the replicas: that is what the weights have not received yet. With
    fewer replicas, each takes the residuals of several; with more, some begin at zero. What is sent
    by replicas that train apart counts in a mean: each takes the residual of the one that it goes
    on as. `saved`: names of the checkpoint's `optim/…` tensors.
    """
    replicas_of: dict[str, list[int]] = {}
    for full_name in saved:
        start, _, number = full_name.rpartition(".")
        if f"{start}.".endswith((f"/{RESIDUAL}", f"/{RESIDUAL_OF_COPY}")) and number.isdecimal():
            replicas_of.setdefault(f"{start}.", []).append(int(number))
    before = max((len(numbers) for numbers in replicas_of.values()), default=0)
    now, apart, origin = 0, _apart(stages)[1], _origin(stages, saved)
    plan = SavedResiduals({}, [], [], "")
    for full_name, value, held, starts in _residuals(stages):
        now, own = held.replicas, slice_of(full_name, value).tensor
        numbers = [(start, n) for start in starts for n in sorted(replicas_of.get(start, ()))]
        taken = [f"{start}{n}" for start, n in numbers if (n == origin if apart else n % now == held.replica)]
        for position, name in enumerate(taken):
            into = own if position == 0 else torch.zeros_like(own)
            plan.targets.setdefault(name, []).append(replace(slice_of(name, value), tensor=into))
            if position:
                plan.added.append((own, into))
        if not taken:
            plan.cleared.append(own)
    for full_name, value in _outer_momenta(stages, copies=True):
        part = slice_of(full_name, value)
        if full_name in saved:
            plan.targets.setdefault(full_name, []).append(part)
        else:
            plan.cleared.append(part.tensor)
    for full_name, value in _own_weights(stages, saved):
        plan.targets.setdefault(full_name, []).append(slice_of(full_name, value))
    remarks = "" if apart and before else _residuals_remark(before, now), _apart_remark(saved, apart)
    return replace(plan, remark="; ".join(filter(None, remarks)))


def of_one_replica(full_name: str) -> bool:
    """Whether a tensor is of one replica alone: a residual, or its optimizer's state. The first
    replica's state has the names of a state that all share. But beside it there are others then."""
    key = full_name.rpartition("/")[2]
    return key.startswith((RESIDUAL, RESIDUAL_OF_COPY)) or OF_REPLICA in key


def _of_replica(number: int) -> str:
    """Returns what the keys of a replica's optimizer state end with."""
    return f"{OF_REPLICA}{number}" if number else ""


def _apart(stages: Sequence[nn.Module]) -> tuple[int, int]:
    """Returns which replica this is of those that train apart, and their number: else 0 of 0."""
    held = outer_state_of(stages[0]) if stages else None
    return (0, 0) if held is None else (held.replica, held.replicas)


def _replicas_there(saved: Collection[str]) -> list[int]:
    """Returns the replicas whose own parts (optimizer, weights, residuals) a state has; else [0]. A
    checkpoint has all. In memory, each rank sees those of the replica that it goes on as."""
    replicas, apart = set(), _has_momenta(saved)
    for full_name in saved:
        key, end, number = full_name.rpartition("/")[2].partition(OF_REPLICA)
        if key.startswith((RESIDUAL, RESIDUAL_OF_COPY)):
            number = key.rpartition(".")[2]
            if apart and number.isdecimal():
                replicas.add(int(number))
        elif not key.startswith(OUTER_MOMENTUM) and (not end or number.isdecimal()):
            replicas.add(int(number or 0))
    return sorted(replicas) or [0]


def _has_momenta(saved: Collection[str]) -> bool:
    """Whether a state is of replicas that trained apart."""
    return any(full_name.endswith(f"/{OUTER_MOMENTUM}") for full_name in saved)


def _origin(stages: Sequence[nn.Module], saved: Collection[str]) -> int:
    """Returns the replica of a saved state that this one goes on as."""
    saved_replicas = _replicas_there(saved)
    return saved_replicas[_apart(stages)[0] % len(saved_replicas)]


def _outer_momenta(stages: Sequence[nn.Module], *, copies: bool) -> Iterator[tuple[str, Tensor]]:
    """Yields the momenta of outer steps, `[...]`, that this rank holds."""
    for stage in stages:
        held = outer_state_of(stage)
        for name, value in held.momentum.items() if held is not None else ():
            if copies or name not in tied_copies(stage):
                yield f"{OPTIMIZER}{name}/{OUTER_MOMENTUM}", value


def _own_weights(stages: Sequence[nn.Module], saved: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Yields where own weights of a checkpoint go, `[...]`, until outer steps begin."""
    for stage in stages:
        held = outer_state_of(stage)
        if held is None:
            continue
        held.own.clear()
        end = _of_replica(_origin(stages, saved))
        for name, parameter in stage.named_parameters():
            if (full_name := f"{OPTIMIZER}{name}/{OWN_WEIGHT}{end}") in saved:
                held.own[name] = host_zeros(parameter)
                yield full_name, held.own[name]


def _apart_remark(saved: Collection[str], now: int) -> str:
    """Says what becomes of the state of replicas that trained apart, on so many that do."""
    momentum = _has_momenta(saved)
    before = len(_replicas_there(saved)) if momentum else 0
    if momentum and not now:
        return "replicas no longer train apart: the momentum of outer steps is dropped, the first's optimizer goes on"
    if saved and now and not momentum:
        return "replicas train apart from here: each goes on with the optimizer's state, outer steps begin at rest"
    return (
        "" if before == now else f"of {before} replicas that trained apart, {now} go on: replica r as r modulo {before}"
    )


def _residuals_remark(before: int, now: int) -> str:
    """Says what becomes of the residuals of so many replicas on so many."""
    if before == now:
        return ""
    if not before:
        return "the checkpoint has no residuals of quantised sums: they begin at zero"
    if not now:
        return (
            f"what replicas send is no longer quantised: the residuals of {before} replicas, what rounding took from "
            "earlier sums, are dropped"
        )
    return f"residuals of quantised sums: those of {before} replicas go to {now}, their sum unchanged"


def _residuals(stages: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor, Residuals, tuple[str, ...]]]:
    """Yields this rank's residuals of quantised sums: the name; the values `[...]`, sharded like
    the parameter; all residuals of the stage; and what names of saved residuals of the same weight
    begin with. A stage with both ends also takes those of a tied weight's copy."""
    for stage in stages:
        held = residuals_of(stage)
        if held is None:
            continue
        copies = tied_copies(stage)
        for name, value in held.parts.items():
            one, other = (f"{OPTIMIZER}{name}/{key}" for key in (RESIDUAL, RESIDUAL_OF_COPY))
            own = other if name in copies else one
            starts = (one, other) if holds_both_ends(stage) else (own,)
            yield f"{own}{held.replica}", value, held, starts


def slice_of(name: str, tensor: Tensor) -> Slice:
    """Returns the part of a tensor, sharded or not, that this rank holds. `name`: global name.
    `tensor`: a plain tensor, which is whole, or a DTensor of any shape."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return Slice(name, tensor, tuple(tensor.shape), (0,) * tensor.ndim)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local()
    if tuple(local.shape) != tuple(shape):
        raise RuntimeError(f"{name}: torch computes a local shape of {tuple(shape)}, but it is {tuple(local.shape)}")
    return Slice(name, local, tuple(tensor.shape), tuple(offset))


def _add(
    slices: dict[str, Slice], name: str, value: Any, coordinates: Coordinates | None, *, moving: bool = False
) -> None:
    python = ""
    if not isinstance(value, Tensor):
        if not isinstance(value, (bool, int, float)):
            raise TypeError(f"{name} is a {type(value).__name__}: only tensors and numbers can be saved")
        python = type(value).__name__
        value = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    if coordinates is not None and not _writes(value, coordinates):
        return
    part = slice_of(name, value)
    if part.tensor.numel() and name not in slices:
        slices[name] = Slice(name, part.tensor, part.global_shape, part.offset, python, moving)


def _writes(tensor: Tensor, place: Coordinates) -> bool:
    """Returns whether this rank is the first that holds these values of a tensor `[...]`."""
    axes: tuple[str, ...] = ()
    if isinstance(tensor, DTensor):
        coordinates = tensor.device_mesh.get_coordinate()
        axes = tuple(tensor.device_mesh.mesh_dim_names or ())
        if coordinates is None:
            return False
        for index, layout in zip(coordinates, tensor.placements, strict=True):
            if isinstance(layout, Replicate) and index:
                return False
    if "ep" in axes or "fsdp_cp" in axes:
        # The meshes of experts, and of weights under context parallelism, name these differently.
        axes = (*axes, *(axis.name for axis in AXES if axis.shards))
    return all(getattr(place, axis.name) == 0 for axis in AXES[1:] if axis.name not in axes)


def _model_tensors(
    stages: Sequence[nn.Module], *, copies: bool = True, frozen: bool = False
) -> Iterator[tuple[str, Tensor]]:
    yield from _parameters(stages, copies=copies, frozen=frozen)
    for stage in stages:
        kept = stage.state_dict(keep_vars=True)
        for name, buffer in stage.named_buffers(remove_duplicate=False):
            if name in kept:
                yield name, buffer


def _parameters(
    stages: Sequence[nn.Module], *, copies: bool = True, frozen: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields names and parameters, tied ones under each name, FSDP's weights sharded."""
    for stage in stages:
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        left_out: frozenset[str] = frozenset() if copies else tied_copies(stage)
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            if name not in left_out and parameter.requires_grad != frozen:
                yield name, parameter


_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype, tensor_name: str) -> str:
    """Returns the safetensors name of a dtype; raises TypeError if it has none."""
    if dtype not in _NAMES:
        raise TypeError(f"{tensor_name} has dtype {dtype}, which cannot be saved")
    return _NAMES[dtype]
