"""`raypp report`: one page that needs nothing else, and on which text of others is text."""

import html.parser
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import hostile_world as hostile
import pytest
from traces import two_ranks

from raypp.cli.main import run
from raypp.job.load import job_document, parse_job
from raypp.planning.decide import decide
from raypp.records import Coordinates, Event, RunState, StepReport
from raypp.state.checkpoint.run_spec import write_decision
from raypp.state.run_records.json_lines import document, step_line
from raypp.state.run_records.recorder import RunRecorder
from raypp.state.run_records.status import RankStatus, RunStatus
from raypp.storage import ObjectStore
from raypp.tools.report.charts import COLUMNS, means, thinned

MESH = {"pp": 2, "dp_replicate": 1, "fsdp": 1, "cp": 1, "tp": 1, "ep": 1}
RANKS = tuple(RankStatus(pp, Coordinates(pp), f"10.0.0.{pp + 1}", 100 + pp, "done") for pp in range(2))


class Page(html.parser.HTMLParser):
    """The elements of a page, its text, and whatever would ask for something elsewhere."""

    VOID = ("meta", "br", "path", "line", "rect")

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.unclosed: list[str] = []
        self.feed(content)
        self.close()

    def handle_starttag(self, name: str, attributes: Any) -> None:
        self.tags.append((name, dict(attributes)))
        if name not in self.VOID:
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        if name in self.VOID:
            return
        if not self.open or self.open.pop() != name:
            self.unclosed.append(name)

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    def text(self) -> str:
        return " ".join(" ".join(texts) for name, texts in self.texts.items() if name not in ("style", "script"))

    def faults(self) -> list[str]:
        names = {name for name, _ in self.tags}
        found = [f"<{name}>" for name in names & {"a", "img", "link", "iframe", "object", "embed", "base", "form"}]
        found += [f"{name} {key}" for name, given in self.tags for key in given if key.startswith("on")]
        found += [f"{name} {key}" for name, given in self.tags for key in given if key in ("src", "href", "srcset")]
        found += [f"{len(self.texts.get('script', []))} scripts"] * (len(self.texts.get("script", [])) != 1)
        for style in self.texts["style"]:
            found += re.findall(r"url\(|@import|https?:", style)
        found += [f"not closed: {name}" for name in (*self.unclosed, *self.open)]
        policy = next(given["content"] for name, given in self.tags if given.get("http-equiv"))
        return found + ([] if policy and policy.startswith("default-src 'none'") else ["no policy"])


def write(store: ObjectStore, name: str = "r", lr: float = 0.001) -> None:
    job = parse_job({"name": name, "data": {"kind": "synthetic"}, "mesh": {"pp": 2}, "model": {"num_layers": 4},
                     "train": {"optimizer": {"lr": lr}}})  # fmt: skip
    store.put(f"{name}/spec.json", json.dumps(job_document(job)).encode())
    write_decision(store, decide(job), 2)
    with RunRecorder(store, name, "a1", interval_s=60) as recorder:
        recorder.status(RunStatus(name, RunState.SUCCEEDED, 8, 8, 2.5, 1e4, 2, 1, None, MESH, RANKS))
        for step in range(1, 9):
            report = StepReport(step, 4 / step, 0.5, 1000, 64, 0.1, 1e4, 1 + step // 5, lr, extras={"aux_loss": 1.0})
            report = replace(report, peak_bytes=[step * 10**9, 2 * 10**9] if step > 1 else [])
            recorder.step(replace(report, loss=math.nan) if step == 3 else report)
        details = {"bytes": 5_000_000, "seconds": 1.5, "stall_s": 0.012}
        recorder.event(Event("committed", "step 4", 100.0, 1, 4, 0, details=details))
        recorder.event(Event("rank_failed", "pp1 was killed", 101.0, 1, 5, 1))
        recorder.event(Event("evaluated", "held out", 102.0, 2, 6, details={"loss": 1.25, "tokens": 9, "seconds": 1.0}))
        recorder.event(Event("sampled", "one", 103.0, 2, 7, details={"prompt": "In the", "text": " beginning <i>"}))
    for one in two_ranks():
        store.put(one.key().replace("r/", f"{name}/", 1), one.to_bytes())
    store.put(f"{name}/step-00000004/COMMIT", b"{}")


def report(store: ObjectStore, *names: str) -> Page:
    assert run(["report", *(f"{store.url}/{name}" for name in names), "--out", "r.html"]) == 0
    return Page(Path("r.html").read_text())


def test_the_page_of_a_run_shows_all_that_it_recorded(store: ObjectStore) -> None:
    write(store)
    page = report(store, "r")
    assert page.faults() == []
    shown = page.text()
    for words in (
        "SUCCEEDED", "Loss", "held out", "Gradient norm", "Learning rate", "Throughput", "Step time", "Balance loss",
        "Memory", "pp0", "pp1",
        "attempts", "failures", "checkpoints", "5.0 MB", "1.50 s", "12 ms", "pp1 was killed", "beginning <i>",
        "predicted: ", "pp 2, 2 ranks on 2 nodes", "layers 0–", "10.0.0.2", "num_layers: 4", "clocks agree within",
    ):  # fmt: skip
        assert words in shown, words
    curves = [given for name, given in page.tags if name == "path" and "curve" in str(given["class"])]
    (losses, *_) = (str(given["data-points"]).split() for given in curves)
    assert [pair.split(":")[0] for pair in losses] == ["1", "2", "4", "5", "6", "7", "8"]  # the third is no number
    most, least = (str(given["data-points"]) for given in curves if "2:2" in str(given["data-points"]).split()[:1])
    assert (most.split()[-1], least.split()[-1]) == ("8:8", "8:2"), "GB of the fullest and the emptiest pipeline rank"
    attempts = [given["title"] for name, given in page.tags if given.get("class") == "attempt"]
    assert attempts == ["attempt 1: steps 1 to 4", "attempt 2: steps 5 to 8"]


def test_two_runs_are_laid_over_each_other_and_their_jobs_compared(store: ObjectStore) -> None:
    write(store, "one")
    write(store, "two", lr=0.01)
    page = report(store, "one", "two")
    assert page.faults() == []
    curves = [given["class"] for name, given in page.tags if name == "path" and "curve" in str(given["class"])]
    assert curves[:4] == ["curve a", "curve b", "curve a eval", "curve b eval"]
    cells = page.texts["td"]
    assert "train.optimizer.lr" in cells and cells[cells.index("train.optimizer.lr") + 1 :][:2] == ["0.001", "0.01"]
    assert not {"name", "mesh.pp"} & set(cells)


def test_a_run_that_wrote_nothing_is_an_error(store: ObjectStore, capsys: pytest.CaptureFixture[str]) -> None:
    store.put("r/spec.json", b"{}")
    assert run(["report", f"{store.url}/r"]) == 2
    assert "r has written neither events nor steps" in capsys.readouterr().err
    assert not Path("report.html").exists()
    assert run(["report", f"{store.url}/none"]) == 2
    assert run(["report", "a", "b", "c"]) == 2
    assert "3 runs are named" in capsys.readouterr().err


# A status with half of a surrogate pair is refused, by every command.
@pytest.mark.parametrize("name", [name for name in hostile.TEXTS if name != "surrogate"])
def test_text_of_others_stays_text(store: ObjectStore, name: str) -> None:
    hostile.write_run(store, "a", hostile.TEXTS[name])  # type: ignore[arg-type]
    page = report(store, "a")
    assert page.faults() == []
    assert hostile.MARK in page.text()
    content = Path("r.html").read_text()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", content)
    assert page.text().count("alert(1)") == content.count("alert(1)") - sum(
        str(given).count("alert(1)") for _, given in page.tags
    )


@pytest.mark.parametrize(("steps", "each"), [(20_000, 34), pytest.param(100_000, 167, marks=pytest.mark.slow)], ids=str)
def test_a_long_history_makes_a_small_page(store: ObjectStore, steps: int, each: int) -> None:
    reports = (StepReport(step, 2 + math.sin(step), 0.5, 100, 64, 0.1, 1e4, 1) for step in range(1, steps + 1))
    store.put("r/history/a1-00001.jsonl", b"".join(step_line(one, 1e9 + one.step) for one in reports))
    with RunRecorder(store, "r", "a1", interval_s=60) as recorder:
        for number_ in range(2_000):
            recorder.event(Event("rank_failed", "x" * 50, 1e9 + number_, 1, 50 * number_))
    store.put("r/status.json", document(RunStatus("r", RunState.FAILED, steps, steps, updated_at=1e9).as_dict()))
    page = report(store, "r")
    assert Path("r.html").stat().st_size < 1_500_000
    assert f"every {each} of {steps:,} steps" in page.text() and "1,700 older events are not listed" in page.text()


def test_a_thinned_curve_keeps_every_extreme() -> None:
    points = [(step, 0.0) for step in range(50_000)]
    points[31_234], points[40_000], points[77] = (31_234, 9.0), (40_000, -9.0), (77, math.nan)
    found = thinned(points)
    assert len(found) <= 2 * COLUMNS and {(31_234, 9.0), (40_000, -9.0)} <= set(found)
    assert [step for step, _ in found] == sorted(step for step, _ in found)
    assert thinned(points[:100]) == [point for point in points[:100] if point[0] != 77]
    assert means(points[:100]) == [] and len(means(points)) <= 122
