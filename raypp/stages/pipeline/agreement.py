"""The collective that starts a step: all ranks agree on lengths, token count and what to do.

One `all_reduce(MAX)` of a small int64 vector on the CPU gives every rank, for every replica, the
length of each microbatch, the tokens with a label and a digest of the rows; and whether any rank
was asked to save, stop or trace, or is still saving. Only `pack` and `unpack` know the layout. A
minimum is the maximum of its negation.

Legend: M microbatches, P pipeline ranks, W ranks of the world.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from raypp.errors import DataError, Problem
from raypp.records import Requests, SaveProgress

_UNSAID = -(2**62)
"""Fills the places of other replicas; smaller than any value a rank sends."""
_FLAGS = 6
_MEMORY = 6
_OF_REPLICA = 2
"""Numbers of the memory tier beside the rows of each replica."""


@dataclass(frozen=True)
class SnapshotState:
    """The state of the snapshots in host memory, on one rank or on all.

    Attributes:
        every: Steps between two snapshots; over all ranks, the maximum.
        own: Step of the newest complete snapshot, -1 if there is none; over all ranks, the oldest.
            Where replicas train apart: over those of this one.
        arrived: Step of the newest copy that has arrived on another node, -1 if there is none;
            likewise.
        trouble: 0, or how much of the memory tier must be given up; over all ranks, the maximum.
        unready: Whether no snapshot may be taken: files do not exist yet, or the last snapshot is
            not complete; over all ranks, whether any is not ready.
        sending: Whether a copy has not arrived yet; over all ranks, any.
        others: The oldest of all replicas' `own` in this attempt, where they train apart, when they
            were last known to be of one period; over all ranks, the newest.
        others_arrived: Likewise of `arrived`.
    """

    every: int
    own: int
    arrived: int
    trouble: int
    unready: bool
    sending: bool = False
    others: int = -1
    others_arrived: int = -1


@dataclass(frozen=True)
class StepProposal:
    """One rank's contribution to the agreement on a step.

    Attributes:
        seq_lens: M padded lengths, in tokens, of its replica's microbatches.
        tokens: Tokens with a label in its replica's rows.
        digest: Digest of its replica's rows, 0 ≤ digest < 2**62.
        requests: The operator's requests that reached this rank.
        saving: How far its last save is.
        snapshots: State of the memory tier; None, on every rank, if there is none.
        compute_us: W compute times of the last step in microseconds: its own in its place, zeros in
            the others'. Empty, on every rank, if that step was not timed.
        peak_bytes: P peaks of memory, by pipeline rank: its own in its place, zeros in the others'.
            Empty, on every rank, if they are not asked for.
        alloc_retries: Of this rank's allocator, so far.
    """

    seq_lens: Sequence[int]
    tokens: int
    digest: int
    requests: Requests
    saving: SaveProgress = SaveProgress.OVER
    snapshots: SnapshotState | None = None
    compute_us: Sequence[int] = ()
    peak_bytes: Sequence[int] = ()
    alloc_retries: int = 0


@dataclass(frozen=True)
class StepPlan:
    """What all ranks know about a step before it runs.

    Attributes:
        seq_lens: M padded lengths, in tokens, of this replica's microbatches.
        global_tokens: Tokens with a label, over all replicas whose ranks agreed.
        requests: The operator's requests, the same on all ranks.
        saving: How far the last save is on the rank where it is worst.
        snapshots: Combined state of all memory tiers; None if there are none.
        compute_us: W compute times of the last step in microseconds, by rank; empty if not timed.
        peak_bytes: P largest peaks of memory, by pipeline rank; empty if not asked for.
        alloc_retries: Most of a rank's allocator.
        replica_tokens: Tokens with a label of each replica's rows; 0 if its ranks took no part.
    """

    seq_lens: tuple[int, ...]
    global_tokens: int
    requests: Requests
    saving: SaveProgress = SaveProgress.OVER
    snapshots: SnapshotState | None = None
    compute_us: tuple[int, ...] = ()
    peak_bytes: tuple[int, ...] = ()
    alloc_retries: int = 0
    replica_tokens: tuple[int, ...] = ()

    def tokens_apart(self, replicas: int) -> list[int]:
        """Returns the tokens with a label of each of `replicas` equal groups of replicas."""
        each = len(self.replica_tokens) // replicas
        return [sum(self.replica_tokens[index * each : (index + 1) * each]) for index in range(replicas)]


def padded_length(tokens: int, *, parts: int = 1, multiple: int = 1, bucket: int = 0) -> int:
    """Returns the padded length of a microbatch: ceil(ceil(N / parts) / multiple) · multiple ·
    parts; with a bucket, N is first rounded up to a multiple of it. `parts`: mesh.cp · mesh.tp."""
    if bucket:
        tokens = math.ceil(tokens / bucket) * bucket
    return math.ceil(math.ceil(tokens / parts) / multiple) * multiple * parts


def agree_on_step(
    proposal: StepProposal, *, replica: int, replicas: int, group: dist.ProcessGroup | None = None, apart: int = 1
) -> StepPlan:
    """Agrees on a step with all other ranks.

    Collective over `group` (default: the world): every rank must call it once per step.

    Args:
        replica: This rank's replica, of `replicas`.
        group: The ranks that agree, of whole replicas; None: the world.
        apart: Number of groups of replicas that train apart.

    Raises:
        DataError: Two ranks of one replica read different rows. Raised on every rank of the group.
    """
    vector = pack(proposal, replica, replicas)
    dist.all_reduce(vector, op=dist.ReduceOp.MAX, group=group)
    return unpack(vector, proposal, replica, replicas, apart)


def pack(proposal: StepProposal, replica: int, replicas: int) -> Tensor:
    """Packs one rank's proposal into a vector. Returns int64
    `[replicas · (M + 5) + 6 + 6 + P + W]`: for each replica its lengths, tokens, digest and negated
    digest, and two negated steps of the memory tier; four flags, the steps to trace and the
    allocator's retries; six more numbers of the tier; P bytes, only if asked for; W microseconds,
    only if the last step was timed. Without a tier its numbers are left out."""
    count, asked, memory = len(proposal.seq_lens), proposal.requests, proposal.snapshots
    width = count + 3 + _OF_REPLICA * (memory is not None)
    slots = replicas * width
    last_save_wanted = asked.stop and asked.save_before_stop
    rest: list[int] = [asked.save, asked.stop, last_save_wanted, proposal.saving, asked.trace, proposal.alloc_retries]
    if memory is not None:
        rest += [memory.every, memory.trouble, memory.unready, memory.sending, memory.others, memory.others_arrived]
    rest += [*proposal.peak_bytes, *proposal.compute_us]
    vector = torch.full((slots + len(rest),), _UNSAID, dtype=torch.int64)
    figures = [*proposal.seq_lens, proposal.tokens, proposal.digest, -proposal.digest]
    figures += [] if memory is None else [-memory.own, -memory.arrived]
    vector[replica * width : (replica + 1) * width] = torch.tensor(figures)
    vector[slots:] = torch.tensor(rest)
    return vector


def unpack(vector: Tensor, proposal: StepProposal, replica: int, replicas: int, apart: int = 1) -> StepPlan:
    """Unpacks the plan from the maximum of all ranks' vectors.

    Args:
        vector: int64 `[replicas · (M + 5) + 6 + 6 + P + W]`, in the layout of `pack`.
        proposal: This rank's proposal; the optional parts are the same on all ranks.
        replica: This rank's replica, of `replicas`.
        apart: Number of groups of replicas that train apart.

    Raises:
        DataError: Two ranks of one replica read different rows.
    """
    count = len(proposal.seq_lens)
    width = count + 3 + _OF_REPLICA * (proposal.snapshots is not None)
    slots = replicas * width
    table = vector[:slots].view(replicas, width)
    proposed = table[:, count] != _UNSAID  # not by replicas outside the group
    differing = [r for r in range(replicas) if proposed[r] and int(table[r, count + 1]) != -int(table[r, count + 2])]
    if differing:
        raise DataError(
            Problem(
                "data.path",
                f"the ranks of replica {differing[0]} read different rows for one step",
                "the data differs between nodes: put the same files on every node, or on one shared file system",
            )
        )
    rest = vector[slots:].tolist()
    save, stop, last_save, saving, trace, retries = rest[:_FLAGS]
    rest, memory = rest[_FLAGS:], None
    if proposal.snapshots is not None:
        every, trouble, unready, sending, *others = rest[:_MEMORY]
        each = replicas // apart
        begin = replica // each * each
        own, arrived = table[begin : begin + each, -_OF_REPLICA:].amax(0).tolist()
        rest = rest[_MEMORY:]
        memory = SnapshotState(every, -own, -arrived, trouble, bool(unready), bool(sending), *others)
    peaks, tokens = len(proposal.peak_bytes), torch.where(proposed, table[:, count], 0).tolist()
    return StepPlan(
        seq_lens=tuple(int(length) for length in table[replica, :count]),
        global_tokens=sum(tokens),
        requests=Requests(bool(save), bool(stop), bool(last_save) or not stop, trace),
        saving=SaveProgress(saving),
        snapshots=memory,
        compute_us=tuple(rest[peaks:]),
        peak_bytes=tuple(rest[:peaks]),
        alloc_retries=retries,
        replica_tokens=tuple(tokens),
    )
