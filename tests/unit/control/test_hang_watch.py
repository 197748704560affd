"""A hang is detected, and the rank that stopped first is named."""

import pytest

from raypp.control.hang_watch import HangWatch, Stall
from raypp.control.seats import Rank
from raypp.records import Coordinates

RANKS = [Rank(n, f"pp{n}", Coordinates(n), n, "", f"node-{n}", 100 + n) for n in range(3)]


def training(timeout_s: float = 60.0, step_s: float = 1.0) -> HangWatch:
    watch = HangWatch(RANKS, timeout_s, 0.0, [0, 1, 2])
    watch.add_step(step_s)
    return watch


def hear(watch: HangWatch, now: float, *beats: tuple[str, float] | tuple[str, float, int]) -> Stall | None:
    """Returns the verdict on a heartbeat of each rank: phase, idle seconds, the device's mark."""
    for rank, (phase, idle_s, *reached) in enumerate(beats):
        watch.add_heartbeat(rank, phase, idle_s, now, reached=reached[0] if reached else 0)
    return watch.stalled(now)


def test_ranks_that_move_are_left_alone() -> None:
    watch = training()
    for now in range(0, 1000, 10):
        assert hear(watch, float(now), *[("step 0F1", 3.0)] * 3) is None


def test_the_rank_that_the_others_wait_for_is_named_with_what_it_does() -> None:
    watch = training()
    for rank, (phase, idle_s) in enumerate([("step 0B2 waits", 80.0), ("step 1F7", 75.0), ("step 2F7 waits", 79.0)]):
        watch.add_heartbeat(rank, phase, idle_s, 200.0, "all_gather" if rank == 1 else "")
    stall = watch.stalled(200.0)
    assert stall is not None and stall.rank == 1
    assert "pp1 (rank 1, node node-1, pid 101), which has been in all_gather for 75 s (`step 1F7`)" in stall.cause
    assert "allowed: 60 s" in stall.cause
    assert stall.details.splitlines()[0] == "pp0: `step 0B2 waits` for 80 s"


def test_the_rank_whose_device_stands_is_named_though_all_hosts_are_at_the_end_of_their_step() -> None:
    stall = hear(training(), 200.0, ("step 0B2 waits", 80.0, 9), ("step 1F7", 75.0, 7), ("step sum", 90.0, 0))
    assert stall is not None and stall.rank == 1
    assert stall.details.splitlines()[1:] == ["pp1: device at `step 1F7` for 75 s", "pp2: `step sum` for 90 s"]


@pytest.mark.parametrize(
    "beats",
    [
        [("step 0B2", 90.0), ("step 1F7", 1.0), ("step 2F7", 90.0)],
        [("step 0B2 waits", 80.0, 9), ("step 1F7", 4.0, 7), ("step sum", 90.0, 0)],
        [("finish", 400.0)] * 3,
    ],
    ids=["a rank that others wait for moves", "a slow device moves", "the last upload"],
)
def test_what_still_moves_is_no_hang(beats: list[tuple[str, float]]) -> None:
    assert hear(training(), 500.0, *beats) is None


def test_a_load_that_takes_hours_is_no_hang_while_it_moves_and_is_one_when_it_stands() -> None:
    watch = HangWatch(RANKS, 60.0, 0.0, [0, 1, 2])
    for now in range(0, 7820, 10):
        for rank in (0, 1):
            watch.add_heartbeat(rank, "load 100 %", float(now), float(now), "broadcast")
        watch.add_heartbeat(2, f"load {min(now, 7200) // 72} %", max(5.0, now - 7200.0), float(now))
        assert now == 7810 or watch.stalled(float(now)) is None
    stall = watch.stalled(7810.0)
    assert stall is not None and stall.rank == 2
    assert stall.cause.endswith("which has been waiting for the store for 610 s (`load 100 %`) (allowed: 600 s)")


def test_a_rank_that_has_ended_is_not_taken_for_frozen_before_its_process_can_report_how() -> None:
    watch = training()
    hear(watch, 0.0, *[("ended", 0.0)] * 3)
    assert watch.stalled(300.0) is None and watch.stalled(1000.0) is not None


def test_a_frozen_rank_is_named_before_those_that_wait_for_it() -> None:
    watch = training()
    watch.add_heartbeat(1, "step 1F7", 0.0, 100.0)
    for rank in (0, 2):
        watch.add_heartbeat(rank, "step 0B2", 64.0, 166.0)
    stall = watch.stalled(166.0)
    assert stall is not None and stall.rank == 1
    assert "has not reported" in stall.cause


def test_no_verdict_before_the_news_of_a_late_rank_is_overdue() -> None:
    """Else the frozen rank's last word would make a ring with its neighbour's wait."""
    watch = training(4.0, step_s=0.1)
    watch.add_heartbeat(1, "step agree", 0.2, 100.0)  # frozen in forward 0 just behind it

    def after(seconds: float) -> Stall | None:
        for rank, phase in ((0, "step 0B0 waits"), (2, "step 2F0 waits")):
            watch.add_heartbeat(rank, phase, seconds - 0.1, 100.0 + seconds)
        return watch.stalled(100.0 + seconds)

    assert after(4.6) is None
    stall = after(5.3)
    assert stall is not None and stall.rank == 1
    assert "has not reported" in stall.cause


def test_slow_steps_are_given_more_time() -> None:
    watch = HangWatch(RANKS, 60.0, now=0.0)
    watch.add_step(30.0)
    assert watch.limit_s() == 300.0


def test_the_start_of_a_run_is_given_minutes() -> None:
    watch = HangWatch(RANKS, 5.0, now=0.0)
    assert hear(watch, 300.0, *[("build", 300.0)] * 3) is None
    assert hear(watch, 700.0, *[("build", 700.0)] * 3) is not None


def test_a_pause_of_everything_is_no_hang() -> None:
    """The first reports after it say that every rank has been idle since before."""
    watch, other = training(3.0, step_s=0.1), training(3.0, step_s=0.1)
    for one in (watch, other):
        hear(one, 100.0, *[("step 0F1", 0.1)] * 3)
    assert other.stalled(110.0) is not None, "no pause, or nobody noticed"
    assert watch.is_paused(110.0), "judged before the reports that wait are taken"
    watch.listen(100.1)
    watch.listen(110.0)
    assert watch.stalled(110.0) is None and not watch.is_paused(110.0)
    assert hear(watch, 110.2, *[("step 0F1", 10.3)] * 3) is None


def test_after_a_pause_a_rank_that_does_not_move_or_says_nothing_is_still_found() -> None:
    idle, silent = training(3.0, step_s=0.1), training(3.0, step_s=0.1)
    for watch in (idle, silent):
        hear(watch, 100.0, *[("step 0F1", 0.1)] * 3)
        watch.skip(9.9, 110.0)
    for seconds, detected in ((2.0, False), (4.0, True)):
        stall = hear(idle, 110.0 + seconds, *[("step 0F1", 10.1 + seconds)] * 3)
        assert (stall is not None) == detected
    for seconds, detected in ((7.0, False), (9.0, True)):
        for rank in (0, 2):
            silent.add_heartbeat(rank, "step 0F1", 0.1, 110.0 + seconds)
        stall = silent.stalled(110.0 + seconds)
        assert (stall is not None and stall.rank == 1) == detected
