"""Which snapshots in memory an attempt goes on from; pure, from what every rank sees on its node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Snapshots:
    """One step of one attempt that could be gone on from.

    Attributes:
        step: Optimizer steps done.
        attempt: Who took them.
        holders: By rank: the ranks on whose node its snapshot lies.
        committed: The newest commit that was known when they were taken.
    """

    step: int
    attempt: int
    holders: dict[int, list[int]]
    committed: int

    def source(self, owner: int) -> int:
        """Who gives a rank its snapshot: itself, when it lies on its node."""
        return owner if owner in self.holders[owner] else min(self.holders[owner])


def choose(seen: Sequence[Sequence[Sequence[int]]], newest_commit: int) -> tuple[Snapshots | None, str]:
    """The snapshots to go on from, and in words why there are none.

    Args:
        seen: By rank: attempt, step, rank whose state it is, newest commit known then, of every snapshot it sees.
        newest_commit: Step of the newest commit in the store.
    """
    found: dict[tuple[int, int], Snapshots] = {}
    for rank, snapshots in enumerate(seen):
        for attempt, step, owner, committed in snapshots:
            known = found.setdefault((step, attempt), Snapshots(step, attempt, {}, committed))
            known.holders.setdefault(owner, []).append(rank)
            found[step, attempt] = replace(known, committed=max(known.committed, committed))
    newer = [found[key] for key in sorted(found, reverse=True) if key[0] > newest_commit]
    if not newer:
        return None, "memory has no snapshot" if not found else "no snapshot in memory is newer"
    gone_back = [one for one in newer if one.committed > newest_commit]
    if len(gone_back) == len(newer):
        why = f"step {gone_back[0].committed} was committed and is gone: snapshots taken after it are not used"
        return None, why
    newer = [one for one in newer if one.committed <= newest_commit]
    whole = next((one for one in newer if all(rank in one.holders for rank in range(len(seen)))), None)
    if whole is not None:
        return whole, ""
    missing = [rank for rank in range(len(seen)) if rank not in newer[0].holders]
    ranks = f"rank {missing[0]}'s snapshot" if len(missing) == 1 else f"the snapshots of ranks {missing}"
    return None, f"{ranks} of step {newer[0].step} {'is' if len(missing) == 1 else 'are'} in no memory"
