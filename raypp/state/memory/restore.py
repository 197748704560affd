"""Restores an attempt from snapshots in memory, on the mesh that took them or on another.

All ranks exchange what their nodes have, and choose the same step; replicas that train apart each
their newest step since the same outer step. What a rank's node lacks comes from a rank that has it.
If something turns out to be missing or damaged, all leave it out and choose again.
"""

import hashlib
import json
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raypp.errors import CheckpointError
from raypp.job.job import Job
from raypp.job.load import job_document
from raypp.planning.geometry import Mesh
from raypp.records import Coordinates, Reporter, Seat
from raypp.state.checkpoint.commit import job_identity
from raypp.state.checkpoint.load_checkpoint import Load
from raypp.state.checkpoint.state import of_one_replica
from raypp.state.memory.fetch import from_rank_zero, gather_json, give, take
from raypp.state.memory.files import CONTROL_BYTES, LARGEST_TAIL, SlotName, life_of, peek
from raypp.state.memory.peer import parse_facts
from raypp.state.memory.rank_slots import RunLife
from raypp.state.memory.slot import Slot, StoredSlot, reading, snapshot_name
from raypp.state.memory.tier import Apart, MemoryTier
from raypp.storage import ObjectStore
from raypp.storage.rate_limit import Pace

_TRIES = 8
_MISSING_SHOWN = 8
Here = dict[tuple[int, int, int], tuple[SlotName, Path, dict[str, Any]]]
"""This node's snapshots, by attempt, step and the rank whose state it is."""


@dataclass(frozen=True)
class Snapshots:
    """The snapshots of one step of one attempt, a candidate to resume from.

    Attributes:
        attempt: The attempt that took the snapshots.
        mesh: The length of each axis of its mesh.
        layout: Hash of its mesh and pipeline.
        holders: For each rank of that mesh, the ranks on whose node its snapshot lies. Of replicas
            that train apart: those whose snapshots are all there.
        committed: The newest commit that was known when the snapshots were taken.
        steps: The step of each rank, where they differ.
    """

    step: int
    attempt: int
    mesh: Coordinates
    layout: str
    holders: dict[int, list[int]]
    committed: int
    steps: Mapping[int, int] = field(default_factory=dict)

    def step_of(self, owner: int) -> int:
        """Returns the step of a rank's snapshot."""
        return self.steps.get(owner, self.step)

    def replica_of(self, owner: int) -> int:
        """Returns which replica of dp_replicate a rank belongs to."""
        return Mesh(self.mesh).coordinates(owner).dp_replicate

    @property
    def replicas(self) -> dict[int, int]:
        """The step of each replica that is there."""
        return {self.replica_of(owner): self.step_of(owner) for owner in sorted(self.holders)}

    def origins(self, now: int) -> list[int]:
        """Returns for each of `now` replicas the one that it goes on as: if they are fewer, those
        that had done most; if they are more, some twice."""
        most = sorted(self.replicas, key=lambda replica: (-self.replicas[replica], replica))
        newest_steps = sorted(most[:now])
        return [newest_steps[replica % len(newest_steps)] for replica in range(now)]

    @property
    def world(self) -> int:
        return Mesh(self.mesh).world

    @property
    def missing(self) -> list[int]:
        """The first ranks whose snapshot is nowhere."""
        return list(islice((rank for rank in range(self.world) if rank not in self.holders), _MISSING_SHOWN))

    @property
    def may_suffice(self) -> bool:
        """Whether each part of the state is there, if ranks of different replicas hold the same."""
        if not self.missing:
            return True
        places = (Mesh(self.mesh).coordinates(rank) for rank in self.holders if rank < self.world)
        return len({replace(place, dp_replicate=0) for place in places}) == self.world // self.mesh.dp_replicate

    def source(self, owner: int, reader: int) -> int:
        """Returns the rank that provides `owner`'s snapshot: `reader` itself if its node has it."""
        return reader if reader in self.holders[owner] else min(self.holders[owner])

    def in_no_memory(self) -> str:
        ranks = self.missing
        if len(ranks) == 1:
            return f"{snapshot_name(ranks[0], self.step)} is in no memory"
        return f"the snapshots of ranks {ranks} of step {self.step} are in no memory"


def choose(
    seen: Sequence[Sequence[Sequence[Any]]],
    newest_commit: int,
    refused: Collection[tuple[int, int]] = (),
    job: Job | None = None,
) -> tuple[Snapshots | None, str]:
    """Returns the snapshots to resume from, or None and the reason why there are none. `seen`: by
    rank, the snapshots it sees, each as attempt, step, rank whose state it is, the newest commit
    known when it was taken, and the mesh and its hash. `newest_commit`: step of the newest commit
    in the store. `refused`: step and attempt of snapshots that turned out to lack something. `job`:
    a job whose replicas train apart. Snapshots of as many replicas as it needs come first."""
    candidates: dict[tuple[int, int], Snapshots] = {}
    for rank, snapshots in enumerate(seen):
        for attempt, step, owner, committed, mesh, layout in snapshots:
            known = candidates.setdefault(
                (step, attempt), Snapshots(step, attempt, Coordinates(*mesh), layout, {}, committed)
            )
            known.holders.setdefault(owner, []).append(rank)
            candidates[step, attempt] = replace(known, committed=max(known.committed, committed))
    first = [candidates[key] for key in sorted(candidates, reverse=True)]
    if job is not None:
        most = job.mesh.dp_replicate
        first = sorted(
            _by_period(candidates, job), key=lambda one: (-min(most, len(one.replicas)), -one.step, -one.attempt)
        )
    newer = [one for one in first if one.step > newest_commit and (one.step, one.attempt) not in refused]
    if candidates and not first:
        return None, candidates[max(candidates)].in_no_memory()
    if not newer:
        return None, "memory has no snapshot" if not candidates else "no snapshot in memory is newer"
    gone_back = [one for one in newer if one.committed > newest_commit]
    if len(gone_back) == len(newer):
        why = f"step {gone_back[0].committed} was committed but is gone: snapshots taken after it are not used"
        return None, why
    newer = [one for one in newer if one.committed <= newest_commit]
    best = next((one for one in newer if one.may_suffice), None)
    return best, "" if best is not None else newer[0].in_no_memory()


def _by_period(candidates: Mapping[tuple[int, int], Snapshots], job: Job) -> list[Snapshots]:
    """Returns the snapshots that belong together of replicas that train apart: of one attempt and
    period, of each replica the newest step of which all its ranks have one."""
    together: dict[tuple[int, int], Snapshots] = {}
    for (step, attempt), one in sorted(candidates.items()):
        for replica in range(one.mesh.dp_replicate):
            ranks = [rank for rank in range(one.world) if one.replica_of(rank) == replica]
            if not all(rank in one.holders for rank in ranks):
                continue
            key = (job.period(step), attempt)
            before = together.get(key, replace(one, holders={}))
            holders = before.holders | {rank: one.holders[rank] for rank in ranks}
            steps = {**before.steps, **dict.fromkeys(ranks, step)}
            committed = max(before.committed, one.committed)
            together[key] = replace(before, step=step, holders=holders, steps=steps, committed=committed)
    return list(together.values())


@dataclass
class FoundInMemory:
    """The result of looking for snapshots in memory.

    Attributes:
        best: The snapshots that were restored; None if none were.
        reason: Why these or why none were restored; may be empty.
        slot: This rank's own snapshot, to keep and to overwrite later. None, on every rank, if some
            rank has none on its node that fits this mesh.
        extra: The JSON that the trainer stored with it; rank 0's also contains the recent reports.
        from_partner: Ranks whose snapshot came from another node.
        remark: What is not as it was kept, for people; "" if all is.
        origins: For each replica that trains apart the one that it goes on as.
    """

    nodes: list[int]
    addresses: list[tuple[str, int] | None]
    step: int = 0
    best: Snapshots | None = None
    reason: str = ""
    slot: Slot | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    from_partner: list[int] = field(default_factory=list)
    remark: str = ""
    origins: list[int] = field(default_factory=list)

    @property
    def steps(self) -> set[int]:
        """The steps that ranks have restored: those of a replica the same."""
        if self.best is None or not self.origins:
            return {self.step}
        return {self.best.replicas[origin] for origin in self.origins}

    def in_words(self, step: int, newest_commit: int) -> str:
        """Returns the message of the event that reports where the attempt starts from."""
        if self.best is None:
            return f"from the store: step {step}; {self.reason}"
        through = ""
        if self.from_partner:
            ranks = "rank" if len(self.from_partner) == 1 else "ranks"
            through = f" ({ranks} {', '.join(map(str, self.from_partner))} from the copy on another node)"
        if self.best.world != len(self.nodes):
            through = f", of {self.best.world} ranks' snapshots"
        if others := sorted(self.steps - {step}):
            through += f", other replicas from step {', '.join(map(str, others))}"
        commit = f"newest commit is step {newest_commit}" if newest_commit >= 0 else "nothing is committed"
        refused = f"; {self.reason}" if self.reason else ""
        return f"from memory: step {step} on all {len(self.nodes)} ranks{through}; {commit}{refused}"


def open_memory_tier(
    job: Job, seat: Seat, store: ObjectStore, reporter: Reporter, pace: Pace | None = None, apart: Apart | None = None
) -> MemoryTier | None:
    """Creates this rank's memory tier, not yet started; None if the job has none. Collective."""
    if not job.checkpoint.memory_tier:
        return None
    # Without a controller, the ranks have no other channel than their process group.
    drawn = "" if seat.secret else secrets.token_hex(32)
    life, secret = from_rank_zero([life_of(store, job), drawn] if seat.rank == 0 else None)
    sections = job_identity(job_document(job))
    layout = _hash([sections.pop("mesh"), sections.pop("pipeline")])
    same_job = _hash([sections, job.mesh.replicas * job.pipeline.microbatches])  # a step's rows are the same
    about = RunLife(job.name, life, same_job, layout, bytes.fromhex(seat.secret or secret))
    return MemoryTier(about, seat, job.checkpoint.memory_every_steps, reporter, pace, apart)


def load_from_memory(
    tier: MemoryTier, newest_commit: int, stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer
) -> FoundInMemory:
    """Restores the newest step whose whole state is in memory, if no commit is as new. Collective
    over the world. Replaces the weights and optimizer state of every rank or of none.
    `newest_commit`: step of the newest commit, the same on every rank; -1 if there is none."""
    seat, address = tier.seat, tier.listen()
    damaged: set[Path] = set()
    refused: set[tuple[int, int]] = set()
    result: FoundInMemory | None = None
    reasons: list[str] = []
    for _ in range(_TRIES):
        local_snapshots = _snapshots_here(tier, damaged)
        seen = [
            [*key, about["committed"], about["mesh"], about["layout"]] for key, (_, _, about) in local_snapshots.items()
        ]
        answers = gather_json({"node": seat.node_rank, "address": address, "seen": seen})
        if result is None:
            where = [None if one["address"] is None else tuple(one["address"]) for one in answers]
            result = FoundInMemory([one["node"] for one in answers], where)
        job = None if tier.apart is None else tier.apart.job
        best, why = choose([one["seen"] for one in answers], newest_commit, refused, job)
        if best is None:
            result.reason = "; ".join([*reasons, why])
            return result
        with ExitStack() as files:
            attempt = _Try(tier, best, local_snapshots, result, damaged, files)
            if attempt.load(stages, optimizer):
                break
        reasons += attempt.reasons
        if not attempt.damage:
            refused.add((best.step, best.attempt))
    assert result is not None
    result.reason = "; ".join(reasons)
    if result.best is not None and attempt.same_mesh:
        result.from_partner = [rank for rank in range(seat.world_size) if rank not in result.best.holders[rank]]
        if not result.from_partner:
            result.slot = _own_slot(local_snapshots, result.best, seat.rank)
    return result


def _own_slot(here: Here, best: Snapshots, rank: int) -> Slot | None:
    """Takes over this rank's snapshot. Collective: every rank does, or none."""
    name, path, _ = here[best.attempt, best.step_of(rank), rank]
    slot = Slot.open(path, name) if name.kind == "own" else None
    if all(gather_json(slot is not None)):
        return slot
    if slot is not None:
        slot.close()
    return None


class _Try:
    """One try to restore certain snapshots. All ranks make the same calls. `same_mesh`: ranks need
    only their own snapshots. `reasons`: why it failed. `damage`: a file is to be left out next."""

    def __init__(
        self, tier: MemoryTier, best: Snapshots, here: Here, result: FoundInMemory, damaged: set[Path], files: ExitStack
    ) -> None:
        self._me, self._best, self._here = tier.seat.rank, best, here
        self._result, self._damaged, self._files = result, damaged, files
        self._slots: dict[int, StoredSlot] = {}
        self._given: dict[int, StoredSlot] = {}
        self._failure = ""
        self._bad: list[int] = []
        self.same_mesh = best.layout == tier.life.layout and not best.missing
        self._now = Mesh(tier.seat.mesh_sizes)
        self._origins = [] if tier.apart is None else best.origins(tier.seat.mesh_sizes.dp_replicate)
        self.reasons: list[str] = []
        self.damage = False

    def load(self, stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> bool:
        """Returns whether every rank's state has been replaced; if not, none has."""
        for owner, source, reader in self._transfers():
            self._guarded(owner, partial(self._pass_header, owner, source, reader))
        wants: dict[int, list[tuple[int, int, int]]] = {}
        load: Load | None = None
        if not self._failure:
            # Of equal slices the first is read: what is on this node comes first.
            ordered = sorted(self._slots.items(), key=lambda item: (item[0] != self._me, item[1].data is None, item[0]))
            try:
                self._check_own_state()
                files = [file for _, slot in ordered for file in slot.files]
                load = Load(files, stages, optimizer, f"step {self._best.step}")
            except CheckpointError as error:
                self._failure = self._best.in_no_memory() if self._best.missing else _words(error)
            else:
                for owner, slot in self._slots.items():
                    if slot.data is None:
                        wants[owner] = [
                            (number, begin, end)
                            for number, file in enumerate(slot.files)
                            for begin, end in file.blocks(load.ranges.get(file.record.key, ()))
                        ]
        answers = self._agree(wants)
        if answers is None:
            return False
        for owner, source, reader in self._transfers():
            for number, begin, end in answers[reader].get(str(owner), ()):
                self._guarded(owner, partial(self._pass_data, owner, source, reader, number, begin, end))
        if load is not None and not self._failure:
            try:
                load.fetch()
            except CheckpointError as error:
                self._failure = _words(error)
                keys = {file.record.key: owner for owner, slot in self._slots.items() for file in slot.files}
                self._bad += [keys[problem.key] for problem in error.problems if problem.key in keys]
        if self._agree({}) is None or load is None:
            return False
        remark, before, result = load.apply(), self._best.mesh.dp_replicate, self._result
        if self._origins:
            who = f"of {before} replicas that trained apart, {len(self._origins)} go on"
            remark = f"{who}, with the states of replicas {', '.join(map(str, self._origins))}"
            remark = "" if self._origins == list(range(before)) else remark
        result.best, result.origins, result.remark = self._best, self._origins, remark
        result.extra, result.step = self._slots[min(self._slots)].extra, self._best.step_of(min(self._slots))
        return True

    def _needed(self, reader: int) -> list[int]:
        if self.same_mesh:
            return [reader]
        owners = sorted(self._best.holders)
        if not self._origins:
            return owners
        origin = self._origins[self._now.coordinates(reader).dp_replicate]
        return [owner for owner in owners if self._best.replica_of(owner) == origin]

    def _transfers(self) -> Iterator[tuple[int, int, int]]:
        """Yields owner, sender and reader of what this rank reads or sends, on all in one order."""
        for reader in range(self._now.world):
            for owner in self._needed(reader):
                source = self._best.source(owner, reader)
                if self._me in (source, reader):
                    yield owner, source, reader

    def _guarded(self, owner: int, action: Callable[[], None]) -> None:
        """Notes why an action fails; the ranks then tell each other."""
        try:
            action()
        except (CheckpointError, ValueError, OSError) as error:
            who = snapshot_name(owner, self._best.step_of(owner))
            self._failure = self._failure or (_words(error) if isinstance(error, CheckpointError) else f"{who} {error}")
            self._bad.append(owner)

    def _pass_header(self, owner: int, source: int, reader: int) -> None:
        if source == reader:
            self._slots[owner] = self._open(owner)
        elif self._me == source:
            try:
                slot = self._given[owner] = self._open(owner)
            except CheckpointError:
                give(None, reader)
                raise
            give(_bytes(json.dumps(slot.control).encode() + b"\n" + slot.tail), reader)
        else:
            received = take(source, 0, CONTROL_BYTES + 1 + LARGEST_TAIL).numpy().tobytes()
            step = self._best.step_of(owner)
            control, tail = parse_facts(received, step, owner, f"rank {source}'s node")
            self._slots[owner] = StoredSlot(control, tail)

    def _pass_data(self, owner: int, source: int, reader: int, number: int, begin: int, end: int) -> None:
        if self._me != source:
            data = take(source, end - begin, end - begin).numpy().data
            self._slots[owner].sources[number].pieces.append((begin, data))
            return
        try:
            part = _bytes(self._given[owner].sources[number].view(begin, end))
        except LookupError:
            give(None, reader)
            raise ValueError(f"has no bytes {begin} to {end}, which rank {reader} asks for") from None
        give(part, reader)

    def _open(self, owner: int) -> StoredSlot:
        if owner in self._given:
            return self._given[owner]
        name, path, _ = self._here[self._best.attempt, self._best.step_of(owner), owner]
        return self._files.enter_context(reading(path, name))

    def _check_own_state(self) -> None:
        """Raises CheckpointError if state is lost that no other replica holds."""
        if (
            not self._origins
            and self._best.missing
            and any(
                of_one_replica(entry.name)
                for slot in self._slots.values()
                for file in slot.files
                for entry in file.header.entries
            )
        ):
            raise CheckpointError(self._best.in_no_memory())

    def _agree(self, wants: Mapping[int, Any]) -> list[dict[str, Any]] | None:
        """Tells the others of a failure; returns what each rank wants, or None if one failed."""
        nodes, bad = self._result.nodes, [[owner, self._best.source(owner, self._me)] for owner in self._bad]
        answers = gather_json({"failure": self._failure, "bad": bad, "wants": wants})
        for owner, source in (pair for one in answers for pair in one["bad"]):
            self.damage = True
            key = (self._best.attempt, self._best.step_of(owner), owner)
            if nodes[source] == nodes[self._me] and key in self._here:
                self._damaged.add(self._here[key][1])
        self.reasons = list(dict.fromkeys(one["failure"] for one in answers if one["failure"]))
        return None if self.reasons else [one["wants"] for one in answers]


def _snapshots_here(tier: MemoryTier, damaged: set[Path]) -> Here:
    """Returns the complete snapshots of this job that lie on this node, a rank's own first."""
    slots: Here = {}
    for name, path in sorted(tier.earlier(), key=lambda one: one[0].kind != "own"):
        about = None if name.step is None or path in damaged else peek(path)
        if about is None or not {"committed", "mesh", "layout"} <= about.keys():
            continue
        named = {"rank": name.rank, "step": name.step, "attempt": name.attempt, "job": tier.life.job, "complete": True}
        if named.items() <= about.items():
            slots.setdefault((name.attempt, about["step"], name.rank), (name, path, about))
    return slots


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _bytes(data: bytes | memoryview) -> Tensor:
    """Returns bytes as a uint8 tensor `[N]`, which torch makes of no empty buffer."""
    if not len(data):
        return torch.zeros(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data) if isinstance(data, bytes) else data, dtype=torch.uint8)


def _words(error: CheckpointError) -> str:
    problem = error.problems[0]
    return f"{problem.key} {problem.fault}".strip()
