"""The process groups of a rank: one device mesh, a second group for pipeline gradients; failures.

Ranks are in the order of `raypp.records.AXES`, and each axis has a group.
"""

import threading
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from raypp.planning.geometry import Mesh
from raypp.records import AXES, Coordinates
from raypp.stages.parallel.context import ContextShare, Ring, RingShare, UlyssesShare, WholeRows
from raypp.stages.parallel.expert import make_expert_mesh
from raypp.torch_private import backends_on

FSDP_CP = "fsdp_cp"
"""The axis that replaces fsdp and cp in the mesh of the weights when cp is more than 1."""


@dataclass(frozen=True)
class RankGroups:
    """The process groups and meshes that a rank communicates through.

    No group is bound to a device (`device_id`). A group that is has one communicator for all its
    messages, which then wait for each other: a send behind a receive that was posted before it.
    Without, NCCL connects each pair of ranks in a group by a communicator of its own. Together with
    a group for each direction, every channel of the pipeline has one.

    Attributes:
        forward: The ranks of this pipeline, for activations.
        backward: The same ranks, for gradients. With one group, gloo serialises the two directions
            of a link (measured: half the bandwidth each way); with two it does not.
        weights: Device mesh with fsdp_cp in place of fsdp and cp; `mesh` itself when cp is 1.
            Gradients are sums over tokens, so one reduction covers both ranks with other rows
            (fsdp) and ranks with other tokens of the same rows (cp).
        context: Two groups over the ranks of the cp group: one for messages to higher ranks, one
            for messages to lower ranks. None without cp.
        experts: Mesh of the same ranks with the axes pp, dp_replicate, expert_shard, ep, tp. None
            without ep.
        replica: Where replicas train apart (`parallel.outer_sync`): the ranks of this one. FSDP
            knows no other. None: they train together.
        tokens: The ranks that share the tokens of a row: those of cp and tp. None without both.
        outer: Then, the ranks that hold the same shards; a thread may use it.
    """

    mesh: DeviceMesh
    forward: dist.ProcessGroup
    backward: dist.ProcessGroup
    coordinates: Coordinates
    weights: DeviceMesh
    context: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
    experts: DeviceMesh | None = None
    replica: dist.ProcessGroup | None = None
    outer: dist.ProcessGroup | None = None
    tokens: dist.ProcessGroup | None = None

    @property
    def tensor(self) -> dist.ProcessGroup | None:
        """The ranks that compute each layer together; None without tp."""
        return self.mesh["tp"].get_group() if self.mesh["tp"].size() > 1 else None

    @property
    def data_mesh(self) -> DeviceMesh | None:
        """The mesh that weights are sharded over: (fsdp · cp) or (dp_replicate, fsdp · cp). None
        when both axes have size 1. Replicas that train apart share nothing."""
        shard = "fsdp" if self.context is None else FSDP_CP
        if self.weights["dp_replicate"].size() > 1 and self.replica is None:
            return self.weights["dp_replicate", shard]
        return self.weights[shard] if self.weights[shard].size() > 1 else None

    def context_share(self, style: str) -> ContextShare:
        """Returns the share of every row that this rank computes on. `style`: `mesh.cp_style`."""
        if self.context is None:
            return WholeRows()
        up, down = self.context
        if style == "ulysses":
            return UlyssesShare(self.coordinates.cp, up)
        return RingShare(Ring(self.coordinates.cp, up.size(), up, down))


def make_groups(sizes: Coordinates, device_type: str, ep: int = 1, *, apart: bool = False, ctas: int = 4) -> RankGroups:
    """Builds the meshes and the process groups. Collective over the world. `ep`: mesh.ep. `ctas`:
    thread blocks of a message between stages (`planning.decide`)."""
    shape = sizes.as_dict()
    cuda = device_type == "cuda"
    # Where one group of FSDP is the world, it is made with it (`train.process_group`).
    some_share = cuda and 1 < sizes.shards < sizes.world
    shared: dict[int | str, Any] = {FSDP_CP if sizes.cp > 1 else "fsdp": urgent()} if some_share else {}
    override: dict[int | str, Any] = {"pp": urgent(ctas)} if cuda else {}
    override |= shared if sizes.cp == 1 else {}
    override |= {"tp": urgent()} if cuda and 1 < sizes.tp < sizes.world else {}
    mesh = init_device_mesh(
        device_type, tuple(shape.values()), mesh_dim_names=tuple(shape), backend_override=override or None
    )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise RuntimeError(f"rank {dist.get_rank()} is outside a mesh of {shape}")
    weights, context = mesh, None
    if sizes.cp > 1:
        merged: dict[str, int] = {}
        for axis in AXES:
            name = FSDP_CP if axis.shards else axis.name
            merged[name] = merged.get(name, 1) * shape[axis.name]
        weights = init_device_mesh(
            device_type, tuple(merged.values()), mesh_dim_names=tuple(merged), backend_override=shared or None
        )
        context = mesh["cp"].get_group(), _own_group(Mesh(sizes).groups("cp"), "cp_down")
    tokens = mesh["cp" if sizes.tp == 1 else "tp"].get_group() if sizes.cp * sizes.tp > 1 else None
    if min(sizes.cp, sizes.tp) > 1:
        tokens = _own_group(Mesh(sizes).groups(("cp", "tp")), "tokens")
    others = [axis.name for axis in AXES if axis.name != "dp_replicate"]
    return RankGroups(
        mesh=mesh,
        forward=mesh["pp"].get_group(),
        backward=_own_group(Mesh(sizes).groups("pp"), "pp_backward", urgent(ctas) if cuda else None),
        coordinates=Coordinates(*coordinate),
        weights=weights,
        context=context,
        experts=make_expert_mesh(sizes, ep, device_type, urgent() if cuda else None),
        replica=_own_group(Mesh(sizes).groups(others), "replica") if apart else None,
        outer=_own_group(Mesh(sizes).groups("dp_replicate"), "outer") if apart else None,
        tokens=tokens,
    )


def few_ctas(most: int) -> Any:
    """Returns NCCL's options for a group of few thread blocks."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = most
    return options


def urgent(most: int | None = None) -> Any:
    """Returns NCCL's options for a group whose thread blocks do not queue behind those of a product
    that is under way. `most`: thread blocks of one operation; None: as NCCL chooses."""
    options = dist.ProcessGroupNCCL.Options() if most is None else few_ctas(most)
    options.is_high_priority_stream = True
    return options


def _own_group(lines: list[list[int]], name: str, options: Any = None) -> dist.ProcessGroup:
    """Creates a second group over each list of ranks; returns this rank's. Collective."""
    own: dist.ProcessGroup | None
    own, _ = dist.new_subgroups_by_enumeration(lines, pg_options=options, group_desc=name)  # type: ignore[no-untyped-call]
    assert own is not None
    return own


_aborted = threading.Event()


def before_abort() -> None:
    """Makes `check_groups` raise until `before_join`: this process aborts its communicators."""
    _aborted.set()


def before_join() -> None:
    """To be called before new groups are made."""
    _aborted.clear()


def check_groups() -> None:
    """Raises if an NCCL communicator of this process has failed. Costs microseconds.

    A failed communicator is aborted: its kernels end, and later kernels compute with what was never
    received. The error is set before the abort, so if this returns, all that the device finished
    before the call is sound. To be called before results of the device are kept or sent on.

    Raises:
        DistBackendError: A communicator failed, timed out, or was aborted by this process.
    """
    if _aborted.is_set():
        raise dist.DistBackendError("this rank aborted its NCCL communicators")
    if not (torch.cuda.is_available() and dist.is_nccl_available() and dist.is_initialized()):
        return
    for backend in backends_on(torch.device("cuda")):
        if not isinstance(backend, dist.ProcessGroupNCCL):  # gloo serves CUDA, too, where ranks compute on CPUs
            continue
        error = backend.get_error()
        if error.name != "SUCCESS":
            raise dist.DistBackendError(f"an NCCL communicator of this rank failed ({error.name}); its log says why")
