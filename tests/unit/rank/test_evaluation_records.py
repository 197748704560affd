"""The records of an evaluation, as a reader of the run and a terminal show them."""

from pathlib import Path

from raypp.job.checks import check_spec
from raypp.job.load import parse_job
from raypp.rank.step.evaluate import Evaluation
from raypp.state.run_records.reader import RunReader
from raypp.state.run_records.recorder import RunRecorder
from raypp.storage.directory import DirectoryStore


def test_an_evaluation_comes_back_from_the_store_and_the_last_attempt_counts(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    with RunRecorder(store, "r", "a1", interval_s=0.01) as recorder:
        for step, loss, attempt in ((2, 3.25, 1), (4, 3.0, 1), (4, 2.75, 2)):
            recorder.event(Evaluation(loss, 1000, 0.5).event(step, attempt))
    assert RunReader(store, "r").evaluations() == [
        {"step": 2, "loss": 3.25, "tokens": 1000, "seconds": 0.5, "attempt": 1},
        {"step": 4, "loss": 2.75, "tokens": 1000, "seconds": 0.5, "attempt": 2},
    ]


def job(**train: int) -> dict[str, object]:
    return {"name": "r", "data": {"kind": "synthetic"}, "train": train}


def test_evaluating_without_a_held_out_part_is_refused() -> None:
    (problem,) = check_spec(parse_job(job(eval_every_steps=3)))
    assert problem.key == "train.eval_every_steps" and "eval: {fraction" in problem.fix
