"""Whom a hang is blamed on, when the ranks report where their devices are.

Each trace is played from the program that ranks on GPUs run: every device goes as far as its
messages, the collectives of its stage and the harm let it.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest

from raypp.control.recovery.hang_analysis import Blame, RankActivity, find_culprit
from raypp.job.load import parse_job
from raypp.planning.geometry import Mesh
from raypp.planning.resolve import resolve_pipeline
from raypp.planning.schedules.posting import posting_on
from raypp.planning.schedules.waiting import arrivals
from raypp.records import Coordinates
from raypp.stages.pipeline.runtime import lower
from raypp.torch_private import Computation

MICROBATCHES = 6
_COMPUTES = {Computation.FORWARD: "F", Computation.FULL_BACKWARD: "B"}


@dataclass(frozen=True)
class Harm:
    """What is wrong.

    Attributes:
        cards: Ranks and the marks at which their devices stop.
        hosts: Ranks and the marks at which their hosts stop; their devices come that far.
        cables: Pipeline ranks, from and to, between which no message arrives.
        gathers: Marks of actions whose weights never arrive.
    """

    cards: Collection[tuple[int, str]] = ()
    hosts: Collection[tuple[int, str]] = ()
    cables: Collection[tuple[int, int]] = ()
    gathers: Collection[str] = ()


@dataclass
class Device:
    """A rank's device: its marks, the message that ends the wait of each, how far it has come."""

    marks: list[str] = field(default_factory=list)
    needs: list[tuple[str, int, int] | None] = field(default_factory=list)
    at: int = 0
    since: int = 0

    def add(self, mark: str, needs: tuple[str, int, int] | None = None) -> None:
        self.marks.append(mark)
        self.needs.append(needs)


def devices(pp: int) -> list[Device]:
    job = parse_job(
        {"name": "x", "model": {"num_layers": 8}, "mesh": {"pp": pp}, "pipeline": {"microbatches": MICROBATCHES}}
    )
    program = resolve_pipeline(job).program
    lowered = lower(program, list(range(pp)), MICROBATCHES, posting_on("cuda"))
    assert arrivals(program)[0]
    devices = []
    for rank in range(pp):
        device = Device()
        for action in lowered[rank]:
            kind, name = _COMPUTES.get(action.computation_type), str(action)
            source = action.stage_index + (-1 if kind == "F" else 1)
            device.add(name)
            if kind and 0 <= source < pp and action.microbatch_index is not None:
                device.add(f"{name} waits", (kind, source, action.microbatch_index))
                device.add(name)
        for mark in ("sends", "sums", "sum"):
            device.add(mark)
        devices.append(device)
    return devices


def played(mesh: Mesh, harm: Harm) -> list[RankActivity]:
    """What the ranks report once nothing moves any more."""
    of = [devices(mesh.sizes.pp)[mesh.coordinates(rank).pp] for rank in range(mesh.world)]
    of = [Device(list(one.marks), list(one.needs)) for one in of]
    # At the last such mark: the one before it says that the rank waits for the action's message.
    stops = (*harm.cards, *harm.hosts)
    stuck = {rank: len(of[rank].marks) - 1 - of[rank].marks[::-1].index(mark) for rank, mark in stops}

    def stage(rank: int) -> list[int]:
        return [other for other in range(mesh.world) if mesh.coordinates(other).pp == mesh.coordinates(rank).pp]

    def peer(rank: int, pp: int) -> int:
        place = mesh.coordinates(rank)
        column = (place.dp_replicate, place.fsdp, place.cp)
        return next(
            other
            for other in range(mesh.world)
            if (one := mesh.coordinates(other)).pp == pp and (one.dp_replicate, one.fsdp, one.cp) == column
        )

    def passed(rank: int, mark: str) -> bool:
        return mark in of[rank].marks[: of[rank].at]

    def moves(rank: int) -> bool:
        device, pp = of[rank], mesh.coordinates(rank).pp
        mark, needs = device.marks[device.at], device.needs[device.at]
        if stuck.get(rank) == device.at or mark in ("sum", *harm.gathers):
            return False
        if needs is not None:
            kind, source, microbatch = needs
            return (source, pp) not in harm.cables and passed(peer(rank, source), f"{source}SEND_{kind}{microbatch}")
        if mark == "sends":
            return not any(source == pp for source, _ in harm.cables)
        if mark == "sums" or re.fullmatch(r"\d[FB]\d", mark):  # its weights are gathered from the stage
            return all(of[other].at >= device.at for other in stage(rank))
        return True

    clock, moved = 0, True
    while moved:
        moved = False
        for rank in range(mesh.world):
            if moves(rank):
                clock, moved = clock + 1, True
                of[rank].at, of[rank].since = of[rank].at + 1, clock
    hosts = dict(harm.hosts)
    return [
        RankActivity(
            rank,
            mesh.labels()[rank],
            mesh.coordinates(rank),
            f"step {device.marks[device.at]}",
            60.0 + 0.01 * (clock - device.since),
            f"node-{rank}",
            reached=0
            if device.marks[device.at] == "sum" or hosts.get(rank) == device.marks[device.at]
            else device.at + 1,
        )
        for rank, device in enumerate(of)
    ]


def blamed(harm: Harm, pp: int = 4, fsdp: int = 1) -> Blame:
    mesh = Mesh(Coordinates(pp, 1, fsdp, 1, 1))
    return find_culprit(played(mesh, harm), list(range(pp)))


ACTIONS = [
    (rank, f"{rank}{kind}{microbatch}") for rank in range(4) for kind in "FB" for microbatch in range(MICROBATCHES)
]


@pytest.mark.parametrize(("rank", "mark"), ACTIONS)
def test_a_stuck_card_is_blamed_wherever_it_stops(rank: int, mark: str) -> None:
    blame = blamed(Harm(cards=[(rank, mark)]))
    assert blame.rank == rank and f"`step {mark}`" in blame.cause


@pytest.mark.parametrize(("rank", "mark"), ACTIONS[::5])
def test_a_host_that_stops_queueing_is_blamed(rank: int, mark: str) -> None:
    assert blamed(Harm(hosts=[(rank, mark)])).rank == rank


@pytest.mark.parametrize(
    "harm",
    [*(Harm(cards=[(3, mark)]) for mark in ("1F0", "1F3", "1SEND_B2", "1B4", "1B5")), Harm(hosts=[(3, "1F3")])],
    ids=str,
)
def test_in_a_stage_of_several_cards_the_one_that_is_behind_is_blamed(harm: Harm) -> None:
    """The other waits for it in the next action's gather."""
    assert blamed(harm, pp=2, fsdp=2).rank == 3


@pytest.mark.parametrize("cables", [[(1, 2), (2, 1)], [(1, 2)], [(2, 1)]])
def test_of_a_cut_cable_both_ends_are_named_and_none_is_blamed(cables: list[tuple[int, int]]) -> None:
    blame = blamed(Harm(cables=cables))
    assert blame.rank is None and blame.ring
    assert "pp1 (rank 1, node node-1)" in blame.cause and "pp2 (rank 2, node node-2)" in blame.cause
    assert "the link between them may carry nothing" in blame.cause


def test_a_link_that_carries_no_last_message_is_named_at_the_rank_that_sends() -> None:
    """The rest has arrived, so the receiver's step is done."""
    activities = played(Mesh(Coordinates(2, 1, 1, 1, 1)), Harm(cards=[(1, "sends")]))
    assert [one.phase for one in activities] == ["step sum", "step sends"]
    assert find_culprit(activities, [0, 1]).rank == 1


@pytest.mark.parametrize("ranks", [(0, 2), (1, 3), (0, 3)])
def test_of_two_stuck_cards_one_is_blamed(ranks: tuple[int, int]) -> None:
    assert blamed(Harm(cards=[(rank, f"{rank}F3") for rank in ranks])).rank in ranks


def test_a_sum_of_all_ranks_that_does_not_end_is_nobodys() -> None:
    blame = blamed(Harm())
    assert blame.rank is None and "all its ranks have been in the sum of loss and norms" in blame.cause


def test_cards_of_a_stage_that_stand_at_one_action_are_named_and_none_is_blamed() -> None:
    """One of them is stuck, or what is between them: the trail does not tell which."""
    blame = blamed(Harm(gathers=["1F3"]), pp=2, fsdp=2)
    assert blame.rank is None and blame.ring
    assert "pp1-fsdp0 (rank 2, node node-2) waits for `step 1F3` with pp1-fsdp1" in blame.cause


def test_a_card_that_is_stuck_in_its_update_is_blamed_from_the_next_step() -> None:
    mesh = Mesh(Coordinates(3, 1, 1, 1, 1))
    phases = {0: ("step 0B0 waits", 90), 1: ("step update", 50), 2: ("step 2F0 waits", 88)}
    activities = [
        RankActivity(rank, mesh.labels()[rank], mesh.coordinates(rank), phase, 61.0, reached=reached)
        for rank, (phase, reached) in phases.items()
    ]
    assert find_culprit(activities, [0, 1, 2]).rank == 1
