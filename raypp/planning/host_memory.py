"""Host memory of the nodes: snapshots of the memory tier, what a save buffers, what is offloaded.

The memory tier keeps whole copies of a rank's state in files. A new snapshot never overwrites the
only whole one, neither here nor at the partner, so two files on each side are the least. One more
is that which a save uploads, or lets a rank take snapshots while an older one is on its way; that
does not wait for the save with another one (docs/design/0009).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raypp.errors import Problem, size_text
from raypp.job.job import Job
from raypp.planning.decision import (
    COPIES,
    OWN_ALONE,
    OWN_FEWEST,
    OWN_WITH_PARTNER,
    TIER_SHARE,
    Kind,
    RankMemory,
    ResolvedPipeline,
)
from raypp.planning.geometry import Mesh, of_pipeline_rank
from raypp.planning.machines import Machines
from raypp.planning.memory import offloaded_bytes, outer_bytes, residual_bytes, state_of
from raypp.planning.offload import offload_in_words
from raypp.planning.resolve import resolve_pipeline

_LESS = "use nodes with more memory or more of them, a smaller optimizer state, or offload less"


@dataclass(frozen=True)
class HostMemory:
    """Host memory of the node that needs most. Bytes.

    Attributes:
        state: Trained weights and optimizer state of its largest rank: the size of one snapshot.
        files: Snapshots that each rank keeps, its own and its partner's; 0 without a tier.
        fewest_files: The same when memory is short: every failure is survived as before, but
            snapshots wait for the link between the nodes.
        saving: Buffers of a save; 0 where it uploads a snapshot.
        computing: Memory of the ranks themselves, if they run on the CPU.
        offloaded: What is kept here instead of on the devices (`planning.offload`).
        available: What the node has; 0 if that is not known.
    """

    node: str
    ranks: int
    state: int
    files: int
    fewest_files: int
    snapshots: int
    saving: int
    computing: int
    offloaded: int
    available: int

    @property
    def total(self) -> int:
        return self.snapshots + self.saving + self.computing + self.offloaded

    def problem(self) -> str:
        """Returns what will happen because the node's memory is short; empty if it is not."""
        if not self.available:
            return ""
        left = self.available - self.computing - self.offloaded
        if left < self.ranks * self.state:
            return "the node has too little memory for its ranks and a save"
        room = int(TIER_SHARE * left)
        if self.snapshots <= room:
            return ""
        if self.snapshots // max(1, self.files) * self.fewest_files <= room:
            return "too little for all snapshots: they will wait for the link between nodes"
        if self.files > OWN_ALONE and self.ranks * OWN_ALONE * self.state <= room:
            return "too little for copies on another node: a lost node resumes from the store"
        return "too little for snapshots: a failure resumes from the store"


def host_memory(
    job: Job, pipeline: ResolvedPipeline, memory: Sequence[RankMemory], machines: Machines, kind: Kind
) -> HostMemory:
    """Returns the host memory of the node that needs most. `memory`: the device memory of every
    pipeline rank. Raises ResourcesError: the job has more ranks than the machines have devices."""
    mesh = Mesh.of(job.mesh)
    seats = machines.seats(mesh, apart=job.outer is not None)
    several = len({node.name for node in seats}) > 1
    own, fewest, copies = (OWN_WITH_PARTNER, OWN_FEWEST, COPIES) if several else (OWN_ALONE, OWN_ALONE, 0)
    files, fewest_files = (own + copies, fewest + copies) if job.checkpoint.memory_tier else (0, 0)
    situations = pipeline.simulator().situations
    saved, moved = [], []
    for rank, stages in enumerate(pipeline.stages_of_rank):
        held = job, stages, pipeline.cut
        saved.append(state_of(*held, kind).saved + residual_bytes(*held) + outer_bytes(*held, saved=True))
        moved.append(offloaded_bytes(*held, situations[rank]) if kind == "cuda" else 0)
    needs = []
    pipeline_ranks: dict[str, list[int]] = {}
    for pp in range(job.mesh.pp):
        for node in of_pipeline_rank(mesh, seats, pp):
            pipeline_ranks.setdefault(node.name, []).append(pp)
    free = machines.free_memory
    alike: dict[tuple[int, ...], str] = {}  # the first node with these ranks and this memory
    for name, here in pipeline_ranks.items():
        alike.setdefault((free[name], *here), name)
    for (available, *here), name in alike.items():
        ranks = len(here)
        state = max(saved[pp] for pp in here)
        needs.append(
            HostMemory(
                node=name,
                ranks=ranks,
                state=state,
                files=files,
                fewest_files=fewest_files,
                snapshots=files * ranks * state,
                saving=0 if job.checkpoint.memory_tier else sum(saved[pp] for pp in here),
                computing=sum(memory[pp].total for pp in here) if kind == "cpu" else 0,
                offloaded=sum(moved[pp] for pp in here),
                available=available,
            )
        )
    return max(needs, key=lambda node: (node.total - node.available, node.total))


def offloaded_by_ranks(job: Job, pipeline: ResolvedPipeline | None = None) -> list[int]:
    """Returns the bytes that every pipeline rank on CUDA keeps in host memory instead."""
    pipeline = pipeline or resolve_pipeline(job)
    return [
        offloaded_bytes(job, stages, pipeline.cut, pipeline.program[rank])
        for rank, stages in enumerate(pipeline.stages_of_rank)
    ]


def offload_problems(job: Job, nodes: Mapping[str, int], kind: Kind) -> list[Problem]:
    """Returns a problem if what a job offloads fits into no node, or not into all of them together.
    `job`: one in which `check_plan` finds no problem. `nodes`: free bytes of host memory by node; 0
    if that is not known. `kind`: of device. A CPU offloads to no other memory."""
    if kind == "cpu" or not offload_in_words(job, cpu=False) or not all(nodes.values()):
        return []
    each, largest, together = offloaded_by_ranks(job), max(nodes.values(), default=0), sum(nodes.values())
    needed = sum(each) * (job.mesh.world // job.mesh.pp)
    if max(each) <= largest and needed <= together:
        return []
    key = "train.optimizer.offload" if job.train.optimizer.offload else "train.activation_checkpointing"
    fault = f"offloading needs {size_text(needed)} of host memory, up to {size_text(max(each))} for a rank; "
    have = f"{len(nodes)} node{'s have' if len(nodes) > 1 else ' has'} {size_text(together)} free"
    have += f", {size_text(largest)} the largest" if len(nodes) > 1 else ""
    return [Problem(key, fault + have, _LESS)]
