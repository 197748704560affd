"""The plan knows what messages a rank holds until they are known to have arrived."""

from typing import Any

import pytest
from harness import run_in_turn
from training import document

from raypp.job.load import parse_job
from raypp.planning.resolve import resolve_pipeline
from raypp.planning.schedules.waiting import Waiting, waiting_sends
from raypp.rank.own_seat import local_seat
from raypp.rank.step.step import StepRunner
from raypp.tools.parity import train_some_steps

UPPER = {"rank": 2, "base": "fp32", "targets": ["layers.6.self_attn.q_proj", "layers.7.self_attn.q_proj"]}
"""Adapters of the two uppermost layers: the stages below have no backward."""


JOBS = {
    "1f1b": document(pp=3),
    "lookahead": document(pp=3, pipeline={"lookahead": 2}),
    "int8": document(pp=3, pipeline={"wire": {"compression": "int8"}}),
    "interleaved": document(pp=2, schedule="interleaved_1f1b", pipeline={"stages_per_rank": 2}),
    "zbv": document(pp=2, schedule="zbv", pipeline={"stages_per_rank": 2}),
    "frozen below": document(pp=2, layers=8, model={"lora": UPPER}),
}


def held_at_actions(rank: int, world: int, port: int, given: dict[str, Any]) -> dict[str, list[int]]:
    """Returns the activations and gradients that the runtime holds for their sends when each action
    of a step begins, by the action's name."""
    job, held = parse_job(given), {}

    def watch(step: int, runner: StepRunner) -> None:
        runtime = runner.built.runtime

        def note(name: str) -> None:
            forward = sum(message.kind == "F" for message in runtime._sends)
            held.setdefault(name, [forward, len(runtime._sends) - forward])

        runtime.mark = note

    train_some_steps(job, local_seat(rank, world, port, job), 1, lambda *_: None, before=watch)
    return held


@pytest.mark.parametrize("world", [2, 3])
def test_the_runtime_holds_what_the_plan_says(world: int) -> None:
    jobs = {name: job for name, job in JOBS.items() if job["mesh"]["pp"] == world}
    results = run_in_turn(world, held_at_actions, [(job,) for job in jobs.values()])
    for (name, job), ranks in zip(jobs.items(), results, strict=True):
        planned = waiting_sends(resolve_pipeline(parse_job(job)).program)
        most = Waiting()
        for rank, held in enumerate(ranks):
            for action, waiting in planned[rank].items():
                assert held[str(action)] == [waiting.activations + waiting.frozen, waiting.gradients], (name, rank)
                most = Waiting(*map(max, most, waiting))
        assert most.gradients > 1 or name == "frozen below"
        assert (most.frozen > 4) is (name == "frozen below")
