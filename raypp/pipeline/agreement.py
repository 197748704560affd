"""The one collective that starts a step: all ranks agree on lengths, token count and what to do.

Every rank reads its own replica's rows, so it knows what it has but not what the others have. One `all_reduce(MAX)`
of a small int64 vector on the CPU tells everybody, for every replica: the length of each microbatch, the number of
tokens with a label, a digest of the rows (which all ranks of a replica must have in common), and whether somebody was
asked to save or to stop, or is still saving. Nothing else is exchanged about shapes, so no rank can wait for a message
that another rank does not know of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from raypp.errors import DataError, Problem
from raypp.records import Requests

_FLAGS = 4


@dataclass(frozen=True)
class StepPlan:
    """What all ranks know about a step before it runs.

    Attributes:
        seq_lens: Padded length of each of this replica's microbatches, in tokens.
        global_tokens: Tokens with a label, over all replicas.
        requests: What the operator wants, as all ranks see it now.
        saving: Whether some rank has not finished its last save.
        signals: The maximum over all ranks of what each gave.
    """

    seq_lens: tuple[int, ...]
    global_tokens: int
    requests: Requests
    saving: bool = False
    signals: tuple[int, ...] = ()


def padded_length(tokens: int, *, cp: int = 1, multiple: int = 1, bucket: int = 0) -> int:
    """The length a microbatch is padded to: every cp rank's share is a multiple of `multiple`.

    ceil(ceil(N / cp) / multiple) · multiple · cp; with a bucket, first up to a multiple of that.
    """
    if bucket:
        tokens = math.ceil(tokens / bucket) * bucket
    return math.ceil(math.ceil(tokens / cp) / multiple) * multiple * cp


def agree_on_step(
    local_M: Sequence[int],
    tokens: int,
    digest: int,
    requests: Requests,
    *,
    replica: int,
    replicas: int,
    saving: bool = False,
    signals: Sequence[int] = (),
    group: dist.ProcessGroup | None = None,
) -> StepPlan:
    """Agrees on a step with every other rank.

    Collective over `group` (the world): all must call it, once per step.

    Args:
        local_M: Padded length of each of the M microbatches as this rank sees them, in tokens.
        tokens: Tokens with a label in this replica's rows.
        digest: Of this replica's rows, 0 ≤ digest < 2**62.
        requests: What this rank was asked for.
        replica: This rank's replica, of `replicas`.
        saving: Whether this rank's last save is still under way.
        signals: What else is wanted the maximum of; as many numbers on every rank.

    Raises:
        DataError: Two ranks of one replica read different rows; raised on every rank alike.
    """
    count = len(local_M)
    width = count + 3
    slots = replicas * width
    vector = torch.full((slots + _FLAGS + len(signals),), -(2**62), dtype=torch.int64)
    own = vector[replica * width : (replica + 1) * width]
    own[:count] = torch.tensor(local_M, dtype=torch.int64)
    own[count:] = torch.tensor([tokens, digest, -digest], dtype=torch.int64)
    last_save_wanted = requests.stop and requests.save_before_stop
    vector[slots:] = torch.tensor([requests.save, requests.stop, last_save_wanted, saving, *signals])
    dist.all_reduce(vector, op=dist.ReduceOp.MAX, group=group)

    table = vector[:slots].view(replicas, width)
    differing = [r for r in range(replicas) if int(table[r, -2]) != -int(table[r, -1])]
    if differing:
        raise DataError(
            Problem(
                "data.path",
                f"the ranks of replica {differing[0]} read different rows for one step",
                "the data differs between nodes: put the same files on each, or on one shared file system",
            )
        )
    save, stop, last_save, any_saving = (bool(flag) for flag in vector[slots : slots + _FLAGS].tolist())
    return StepPlan(
        seq_lens=tuple(int(length) for length in table[replica, :count]),
        global_tokens=int(table[:, count].sum()),
        requests=Requests(save=save, stop=stop, save_before_stop=last_save or not stop),
        saving=any_saving,
        signals=tuple(vector[slots + _FLAGS :].tolist()),
    )
