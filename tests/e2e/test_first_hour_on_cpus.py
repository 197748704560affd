"""`raypp doctor --first-hour` on a laptop without cards: its checks run on CPUs."""

import pytest
from laptop import Laptop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_without_cards_the_first_hour_runs_what_cpus_can_and_writes_its_page(laptop: Laptop) -> None:
    answer = laptop.raypp("doctor", "--first-hour", "--store", "s3://raypp/hour", "--out", "page.md", timeout=800)
    assert answer.code == 0, answer
    results = [line.partition(": ")[2].partition(":")[0] for line in answer.out.splitlines()]
    run, skipped = "passed", "skipped"
    expected = [run, skipped, run, skipped, skipped, run, skipped, skipped, run, run]
    assert results == expected, answer.out
    page = (laptop.directory / "page.md").read_text()
    assert "| 2 | Kernels on one card | skipped: needs a card; there is none | 0 |" in page
    assert '"restarts": 1' in page and "CPUs only" in page
