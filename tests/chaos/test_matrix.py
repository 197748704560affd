"""Kinds of faults, moments of a run and victims: each case ends like an undisturbed run."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faulted_run import FaultedRun, reference_chain
from injected_faults import Strike
from laptop import Laptop
from matrix import CASES, CHAINS, EACH_KIND, Chain, title

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Survived = Callable[[Chain], FaultedRun]


@pytest.fixture(scope="module")
def survived(laptop: Laptop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Survived]:
    """Returns the run of a chain, which executes on first use."""
    lived: dict[str, FaultedRun] = {}
    place = tmp_path_factory.mktemp("chaos")

    def get(chain: Chain) -> FaultedRun:
        if chain.name not in lived:
            lived[chain.name] = faulted = FaultedRun(laptop, chain, place / chain.name)
            faulted.live()
            print(f"\n{chain.name}: {faulted.state} after {faulted.seconds:.0f} s")
        return lived[chain.name]

    yield get


@pytest.fixture(scope="module")
def table() -> Iterator[list[dict[str, object]]]:
    """Collects a row per case and prints them, also to the file that CHAOS_TABLE names."""
    rows: list[dict[str, object]] = []
    yield rows
    lines = ["| what | when | run | comes of it | known after | next step after |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {r['what']} | {r['when']} | {r['run']} | {r['outcome']} | {r['known']} | {r['seconds']} |" for r in rows
    ]
    print("\n" + "\n".join(lines))
    if "CHAOS_TABLE" in os.environ:
        Path(os.environ["CHAOS_TABLE"]).write_text("\n".join(lines) + "\n" + json.dumps(rows) + "\n")


def _marks(chain: Chain) -> list[pytest.MarkDecorator]:
    return [pytest.mark.gate] if chain.name == EACH_KIND else []


def _case_id(case: tuple[Chain, Strike]) -> str:
    chain, strike = case
    return f"{chain.name}-{strike.number}-{title(chain, strike)} at {strike.moment}".replace(" ", "_")


@pytest.mark.parametrize("case", [pytest.param(case, marks=_marks(case[0]), id=_case_id(case)) for case in CASES])
def test_a_fault_is_reported_truthfully_and_survived(
    case: tuple[Chain, Strike], survived: Survived, table: list[dict[str, object]]
) -> None:
    chain, strike = case
    faulted = survived(chain)
    row: dict[str, object] = {
        "what": title(chain, strike),
        "when": _when(faulted, strike),
        "run": chain.name,
        "outcome": "FAILS",
        "known": _in_seconds(faulted.known_s(strike)),
        "seconds": _in_seconds(faulted.recovery_s(strike)),
    }
    table.append(row)
    faulted.judge_strike(strike)
    row["outcome"] = "the same"


def _in_seconds(duration: float | None) -> str:
    return "–" if duration is None else f"{duration:.1f} s"


def _when(faulted: FaultedRun, strike: Strike) -> str:
    step = faulted.fallen.get(strike.number, {}).get("step")
    return f"{strike.moment}, step {step}" if step else strike.moment


@pytest.mark.parametrize("chain", [pytest.param(chain, marks=_marks(chain), id=chain.name) for chain in CHAINS])
def test_a_run_that_suffered_it_all_ends_bit_for_bit_like_an_undisturbed_one(chain: Chain, survived: Survived) -> None:
    faulted = survived(chain)
    reference = survived(reference_chain(chain.shape))
    reference.judge_run(None)
    faulted.judge_run(reference)
