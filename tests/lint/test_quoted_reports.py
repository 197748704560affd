"""Reports and messages that pages quote are what raypp says: each is made here, as by a run."""

from markdown_pages import REPOSITORY

from raypp.control.recovery.hang_analysis import Blame, RankActivity, find_culprit
from raypp.job.job_file import load_job
from raypp.job.load import job_document
from raypp.records import Coordinates
from raypp.state.checkpoint.compatibility import check_resume

PAGE = (REPOSITORY / "docs" / "tasks" / "read_a_hang.md").read_text(encoding="utf-8")


def blame(first: str, second: str, still: tuple[float, float], inside: str = "", silent: bool = False) -> Blame:
    """Returns what follows for ranks 1 and 2 of a pipeline, whose rank 0 is busy or does the same;
    rank 1 may be inside a collective, or silent."""
    zero = RankActivity(0, "pp0", Coordinates(), first if first == second else "step update", 0.0)
    one = RankActivity(1, "pp1", Coordinates(1), first, still[0], "10.0.0.1", 811, silent, inside)
    two = RankActivity(2, "pp2", Coordinates(2), second, still[1], "10.0.0.2", 812)
    return find_culprit([zero, one, two], (0, 1, 2))


def test_the_chain_of_the_page_is_what_raypp_says() -> None:
    found = blame("step 1F5", "step 2F7 waits", (41, 70), inside="all_gather")
    assert f" {found.cause} (allowed: 60 s) " in " ".join(PAGE.split())


CASES = [
    blame("step 1F5", "step 2F7 waits", (80, 80)),
    blame("step 1F5", "step 2F7 waits", (41, 70), inside="all_gather"),
    blame("step 12 read", "step agree", (61, 61)),
    blame("save upload", "step agree", (700, 700)),
    blame("step 1F5", "step 2F7 waits", (66, 61), silent=True),
]


def test_the_ends_of_a_chain_that_the_page_explains_are_what_raypp_says() -> None:
    ends = [case.cause.rpartition(", which ")[2] for case in CASES]
    assert not [end for end in ends if f"| {end} |" not in PAGE]


def test_what_the_page_explains_of_hangs_without_a_culprit_is_what_raypp_says() -> None:
    ring = blame("step 1B3 waits", "step 2F4 waits", (90, 70))
    assert ring.ring and f"| {ring.cause.partition(':')[0]}: … |" in PAGE
    assert f"| {blame('step sum', 'step sum', (61, 60)).cause} |" in PAGE


RESUMED = (REPOSITORY / "docs" / "tasks" / "resume_elsewhere.md").read_text(encoding="utf-8")


def test_changes_that_a_resume_refuses_are_refused_as_the_page_says() -> None:
    old = job_document(load_job(REPOSITORY / "jobs" / "quickstart.yaml").job)
    for section, key, value in (("pipeline", "microbatches", 16), ("train", "seed", 1)):
        problems = check_resume(old, {**old, section: {**old[section], key: value}})
        assert [f"--set {one.key}={value}: {one.fault}" in RESUMED for one in problems] == [True]
