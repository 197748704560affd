"""The one collective that starts a step: all ranks agree on lengths, token count and what to do.

Every rank reads its own replica's rows, so it knows what it has but not what the others have. One `all_reduce(MAX)`
of a small int64 vector on the CPU tells everybody, for every replica: the length of each microbatch, the number of
tokens with a label, a digest of the rows (which all ranks of a replica must have in common), and whether somebody was
asked to save or to stop, or is still saving. Nothing else is exchanged about shapes, so no rank can wait for a message
that another rank does not know of.

`pack` and `unpack` alone know where a number stands in the vector. A minimum travels as the maximum of its negation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from raypp.errors import DataError, Problem
from raypp.records import Requests

_UNSAID = -(2**62)
"""In the places of other replicas: smaller than anything that a rank says."""
_FLAGS = 4
_MEMORY = 5


@dataclass(frozen=True)
class SnapshotState:
    """Where the snapshots in host memory stand, on one rank or on all.

    Attributes:
        every: Steps between two snapshots; of all ranks, the most.
        own: Step of the newest whole snapshot, -1 without one; of all ranks, the oldest.
        arrived: Step of the newest copy that has arrived on another node, -1 without one; of all ranks, the oldest.
        trouble: 0, or how much of the memory tier must be given up; of all ranks, the most.
        unready: Its files are not made yet; of all ranks, whether of any.
    """

    every: int
    own: int
    arrived: int
    trouble: int
    unready: bool


@dataclass(frozen=True)
class StepProposal:
    """What one rank brings to the agreement on a step.

    Attributes:
        seq_lens: Padded length of each of its replica's microbatches, in tokens.
        tokens: Tokens with a label in its replica's rows.
        digest: Of its replica's rows, 0 ≤ digest < 2**62.
        requests: What it was asked for.
        saving: Whether its last save is still under way.
        snapshots: Of the memory tier; None when there is none, on any rank.
        compute_us: Microseconds that the last step computed: the rank's own in its place, zeros in the others'. Empty,
            on every rank, when that step was not timed.
    """

    seq_lens: Sequence[int]
    tokens: int
    digest: int
    requests: Requests
    saving: bool = False
    snapshots: SnapshotState | None = None
    compute_us: Sequence[int] = ()


@dataclass(frozen=True)
class StepPlan:
    """What all ranks know about a step before it runs.

    Attributes:
        seq_lens: Padded length of each of this replica's microbatches, in tokens.
        global_tokens: Tokens with a label, over all replicas.
        requests: What the operator wants, as all ranks see it now.
        saving: Whether some rank has not finished its last save.
        snapshots: Of the memory tiers of all ranks; None when there are none.
        compute_us: Microseconds that every rank computed in the last step, by rank; empty when it was not timed.
    """

    seq_lens: tuple[int, ...]
    global_tokens: int
    requests: Requests
    saving: bool = False
    snapshots: SnapshotState | None = None
    compute_us: tuple[int, ...] = ()


def padded_length(tokens: int, *, cp: int = 1, multiple: int = 1, bucket: int = 0) -> int:
    """The length a microbatch is padded to: every cp rank's share is a multiple of `multiple`.

    ceil(ceil(N / cp) / multiple) · multiple · cp; with a bucket, first up to a multiple of that.
    """
    if bucket:
        tokens = math.ceil(tokens / bucket) * bucket
    return math.ceil(math.ceil(tokens / cp) / multiple) * multiple * cp


def agree_on_step(
    proposal: StepProposal, *, replica: int, replicas: int, group: dist.ProcessGroup | None = None
) -> StepPlan:
    """Agrees on a step with every other rank.

    Collective over `group` (the world): all must call it, once per step.

    Args:
        proposal: This rank's.
        replica: This rank's replica, of `replicas`.

    Raises:
        DataError: Two ranks of one replica read different rows; raised on every rank alike.
    """
    vector = pack(proposal, replica, replicas)
    dist.all_reduce(vector, op=dist.ReduceOp.MAX, group=group)
    return unpack(vector, proposal, replica, replicas)


def pack(proposal: StepProposal, replica: int, replicas: int) -> Tensor:
    """The vector of one rank.

    Returns:
        int64 `[replicas · (M + 3) + 4 + 5 + W]` with M microbatches: of each replica its lengths, tokens, digest and
        negated digest; four flags; five numbers of the memory tier, if there is one; W = world microseconds, if the
        last step was timed.
    """
    count, asked, memory = len(proposal.seq_lens), proposal.requests, proposal.snapshots
    slots = replicas * (count + 3)
    last_save_wanted = asked.stop and asked.save_before_stop
    rest: list[int] = [asked.save, asked.stop, last_save_wanted, proposal.saving]
    if memory is not None:
        rest += [memory.every, -memory.own, -memory.arrived, memory.trouble, memory.unready]
    rest += proposal.compute_us
    vector = torch.full((slots + len(rest),), _UNSAID, dtype=torch.int64)
    own = vector[replica * (count + 3) : (replica + 1) * (count + 3)]
    own[:] = torch.tensor([*proposal.seq_lens, proposal.tokens, proposal.digest, -proposal.digest])
    vector[slots:] = torch.tensor(rest)
    return vector


def unpack(vector: Tensor, proposal: StepProposal, replica: int, replicas: int) -> StepPlan:
    """The plan, from the maximum of all ranks' vectors.

    Args:
        vector: As `pack` lays it out.
        proposal: This rank's: what it has, all have.

    Raises:
        DataError: Two ranks of one replica read different rows.
    """
    count = len(proposal.seq_lens)
    slots = replicas * (count + 3)
    table = vector[:slots].view(replicas, count + 3)
    differing = [r for r in range(replicas) if int(table[r, -2]) != -int(table[r, -1])]
    if differing:
        raise DataError(
            Problem(
                "data.path",
                f"the ranks of replica {differing[0]} read different rows for one step",
                "the data differs between nodes: put the same files on each, or on one shared file system",
            )
        )
    rest = vector[slots:].tolist()
    save, stop, last_save, saving = (bool(flag) for flag in rest[:_FLAGS])
    rest, memory = rest[_FLAGS:], None
    if proposal.snapshots is not None:
        every, own, arrived, trouble, unready = rest[:_MEMORY]
        rest, memory = rest[_MEMORY:], SnapshotState(every, -own, -arrived, trouble, bool(unready))
    return StepPlan(
        seq_lens=tuple(int(length) for length in table[replica, :count]),
        global_tokens=int(table[:, count].sum()),
        requests=Requests(save=save, stop=stop, save_before_stop=last_save or not stop),
        saving=saving,
        snapshots=memory,
        compute_us=tuple(rest),
    )
