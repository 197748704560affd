"""The ten checks of `raypp doctor --first-hour`, on whatever cards there are."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_doctor import _node, _report

from raypp.api.checked_job import load_checked_job
from raypp.cli.doctor_command import cards_of
from raypp.cli.main import COMMANDS
from raypp.errors import JobError
from raypp.tools.doctor.first_hour import Cards, Done, Step, page, steps

H100 = "NVIDIA H100 80GB HBM3"
CARDS = {
    "no card": Cards((("a", 4),)),
    "no card on two nodes": Cards((("a", 2), ("b", 2))),
    "one": Cards((("a", 1),), H100, "h100", True, True),
    "two": Cards((("a", 2),), H100, "h100", True, True),
    "eight": Cards((("a", 8),), H100, "h100", True, True),
    "two nodes of one": Cards((("a", 1), ("b", 1)), H100, "h100", True, True),
    "two nodes of eight": Cards((("a", 8), ("b", 8)), H100, "h100", True, True, store="s3://bucket/hour"),
    "small and unknown": Cards((("a", 2),), "Card 9", "cuda", True, True, lambda *_: False),
}
RUN = {
    "no card": [3, 6, 9, 10],
    "no card on two nodes": [3, 6, 8, 9, 10],
    "one": [2, 4, 5],
    "two": [2, 3, 4, 5, 6, 7, 9, 10],
    "eight": [2, 3, 4, 5, 6, 7, 9, 10],
    "two nodes of one": [2, 3, 4, 5, 8, 9],
    "two nodes of eight": [2, 3, 4, 5, 6, 7, 8, 9, 10],
    "small and unknown": [2, 3, 4, 5, 6, 7, 9, 10],
}


@pytest.mark.parametrize("name", CARDS)
def test_what_the_cards_allow_runs_and_the_rest_is_skipped_with_its_reason(name: str) -> None:
    found = steps(CARDS[name], "hour")
    assert [number for number, step in enumerate(found, 2) if not step.skipped] == RUN[name]
    assert all("needs" in step.skipped and step.expects and step.otherwise for step in found if step.skipped)
    for step in found:
        for words in () if step.skipped else step.commands:
            assert words[0] != "raypp" or words[1] in COMMANDS
            overrides = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
            if overrides:  # a job that would be refused fails here
                (file,) = (word for word in words if word.endswith(".yaml"))
                load_checked_job(file, overrides)


def test_without_sources_or_profiler_the_checks_that_need_them_say_so() -> None:
    reasons = [step.skipped for step in steps(Cards((("a", 2),), H100, "h100"), "hour")]
    assert "clone of the repository" in reasons[0] and "clone" in reasons[2] and "nsys" in reasons[5]


END = {"state": "SUCCEEDED", "restarts": 0, "tokens_per_s": 100.0}
LOSSES = "\n".join(json.dumps({"step": step, "loss": 1 / step}) for step in (1, 2, 3))
PARITY = json.dumps({"steps": [{"step": 1, "loss": [1.0, 1.0]}]})
PLAN = json.dumps({"predictions": [{"tokens_per_s": 300.0}], "played": [{"total": 10}]})


@pytest.mark.parametrize(
    ("number", "printed", "fault"),
    [
        (3, [END, LOSSES, PARITY], ""),
        (3, [END, LOSSES.replace("1.0", "1.1"), PARITY], "the loss of step 1 is 1.1, not 1.0"),
        (3, [END | {"state": "FAILED"}, LOSSES, PARITY], "the run ended as FAILED"),
        (5, [END, PLAN], "a rank used 11 bytes; planned: 10"),
        (6, [END, PLAN], "100 tokens/s, where the plan expects 300"),
        (9, [END, LOSSES, LOSSES], "0 restarts, where 2 were expected"),
        (9, [END | {"restarts": 2}, LOSSES, LOSSES], ""),
        (9, [END | {"restarts": 2}, "", LOSSES], "the loss of step 1 is None, not 1.0"),
    ],
)
def test_a_check_reports_what_is_wrong_with_what_was_printed(number: int, printed: list[Any], fault: str) -> None:
    step = steps(Cards((("a", 2),), H100, "h100", peaks=lambda _run: [9, 11]), "hour")[number - 2]
    assert step.check([one if isinstance(one, str) else json.dumps(one) for one in printed]) == fault


def test_the_page_has_every_check_with_its_command_and_what_to_do() -> None:
    bad = Step("Links", "40 GB/s", "look at the cable", "", (("raypp", "doctor", "--set", "a={b: 1}"),))
    text = page([Done(bad, "slow | asymmetric\nmore", "said", 2.0)], CARDS["one"], "torch 2.13", "now")
    assert "| 1 | Links | FAILED: slow \\| asymmetric | 2 |" in text
    assert "raypp doctor --set 'a={b: 1}'" in text and "If not: look at the cable." in text and H100 in text


@pytest.mark.parametrize(
    ("named", "fault"),
    [("10.0.0.9", "no node 10.0.0.9 with"), ("10.0.0.1,", "an empty name"), ("10.0.0.1", "place runs on 10.0.0.2")],
)
def test_nodes_that_are_not_there_or_not_all_are_refused(named: str, fault: str) -> None:
    with pytest.raises(JobError, match=fault):
        cards_of(_report(), named, "")
    assert cards_of(_report(), "10.0.0.1, 10.0.0.2", "").nodes == (("10.0.0.1", 2), ("10.0.0.2", 2))


def test_the_cards_are_those_that_torch_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "links.json").write_text(json.dumps({"nodes": ["10.0.0.1"], "devices": [{"node": "10.0.0.1"}] * 2}))
    card = {"kind": H100, "flops": 1e14}
    nodes = [_node("10.0.0.1", gpus=2, torch={"devices": [card] * 2}), _node("10.0.0.2")]
    cards = cards_of({**_report(), "nodes": nodes}, "", "")
    assert (cards.nodes, cards.kind, cards.device) == ((("10.0.0.1", 2),), H100, "h100")
    assert cards.fits("lora-8b", ("mesh={pp: 2}",)) and not cards.fits("seventy-b", ("mesh={pp: 2}",))
