"""Decides how many thread blocks (CTAs) of NCCL carry a message between stages.

A posted receive holds them, each about a processor of the GPU, until its message arrives. NCCL's
default is up to 32 on NVLink.
"""

from __future__ import annotations

from itertools import pairwise

from raypp.errors import JobError
from raypp.job.job import Job
from raypp.planning.costs import device_named
from raypp.planning.decision import Facts
from raypp.planning.geometry import Mesh
from raypp.planning.machines import Machines, Node
from raypp.planning.reduction import FAST_GBPS

_MOST = 4
_SLOW_GBPS = 100.0


def ctas_for(gbps: float) -> int:
    """Returns the thread blocks that carry a rate: 1 up to 100 Gbit/s, 2 above, 4 on NVLink. One is
    expected to carry about 160 Gbit/s (not measured). `gbps`: the link's rate in Gbit/s; 0:
    unknown, as of a virtual interface."""
    if 0 < gbps <= _SLOW_GBPS:
        return 1
    return 2 if gbps < FAST_GBPS else _MOST


def pipeline_ctas(job: Job, facts: Facts) -> tuple[int, str]:
    """Decides the thread blocks of all messages between stages. All groups of the pipeline have the
    same, by the slowest boundary that any of them crosses: faster ones wait for it in every
    microbatch. Returns the number, and why, in words; "" without messages on GPUs."""
    mesh = Mesh.of(job.mesh)
    if facts.device == "cpu" or job.mesh.pp == 1 or sum(facts.gpus) < mesh.world:
        return _MOST, ""
    nodes = Machines(tuple(Node(str(index), count) for index, count in enumerate(facts.gpus)))
    seats = nodes.seats(mesh, apart=job.outer is not None)
    rates = {"in a node": _inside(facts.cards), "between nodes": facts.network_gbps}
    crossed = {
        "in a node" if seats[one].name == seats[other].name else "between nodes"
        for ranks in mesh.groups("pp")
        for one, other in pairwise((*ranks, ranks[0]))
    }
    ctas, rate, where = min((ctas_for(rates[where]), rates[where], where) for where in crossed)
    known = f"{rate:,.0f} Gbit/s" if rate else "an unknown rate"
    blocks = f"{ctas} thread block{'s' if ctas > 1 else ''} of NCCL"
    return ctas, f"a message between stages gets {blocks}: the slowest boundary, {where}, has {known}"


def _inside(cards: tuple[str, ...]) -> float:
    try:
        return min((device_named(card).inside_gbps for card in cards), default=0.0)
    except JobError:  # an unknown card
        return 0.0
