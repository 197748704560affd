"""Compares each schedule's measured step with the simulated one: `python -m benchmarks.schedules`.

It uses two pipeline ranks on CPU. The simulator gets the time that one process needs for a forward
and a backward of each stage, measured in the same run. Links, optimizer and everything else cost
nothing.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks.sizes import MICROBATCHES, model_options
from benchmarks.surroundings import announce
from benchmarks.throughput import WARM, torchrun
from raypp.planning.flops import end_weights
from raypp.planning.plan import stage_times
from raypp.planning.resolve import resolve_pipeline
from raypp.schedules.simulate import simulate
from raypp.spec.job import Job
from raypp.spec.load import parse_job

VARIANTS = [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("looped_bfs", 2), ("interleaved_zero_bubble", 2),
            ("zbv", 2), ("dualpipev", 2)]  # fmt: skip


def job_of(schedule: str, stages_per_rank: int, pp: int = 2) -> Job:
    pipeline = {"schedule": schedule, "stages_per_rank": stages_per_rank, "microbatches": MICROBATCHES}
    return parse_job({"name": "bench", "model": model_options().model_dump(), "mesh": {"pp": pp}, "pipeline": pipeline})


def pipeline_seconds(schedule: str, stages_per_rank: int, steps: int, ranks: int) -> float:
    """Returns the median seconds that the schedule itself takes in a step, on rank 0."""
    settings = [f"pipeline.schedule={schedule}", f"pipeline.stages_per_rank={stages_per_rank}"]
    arguments = ["--steps", str(steps), *(word for setting in settings for word in ("--set", setting))]
    found = torchrun("benchmarks.timed_rank", arguments, ranks)
    return statistics.median(part["pipeline"] for part in found[0]["parts"][WARM:])


def predicted(schedule: str, stages_per_rank: int, layer_s: float) -> tuple[float, float]:
    """Returns makespan (s) and bubble of the simulation; a layer's forward takes `layer_s`."""
    job = job_of(schedule, stages_per_rank)
    pipeline = resolve_pipeline(job)
    timeline = simulate(pipeline.program, stage_times(pipeline, layer_s))
    return timeline.makespan, timeline.bubble


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    announce()
    alone: list[float] = []
    measured: dict[tuple[str, int], list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(options.rounds):
        alone.append(pipeline_seconds("1f1b", 1, options.steps, 1))
        for variant in VARIANTS:
            measured[variant].append(pipeline_seconds(*variant, options.steps, 2))
    layers = model_options().num_layers + sum(end_weights(job_of("1f1b", 1)))
    layer_s = statistics.median(alone) / MICROBATCHES / layers / 3  # a backward takes as long as two forwards
    print(f"\none process: {statistics.median(alone):.3f} s; a layer's forward {layer_s * 1e3:.1f} ms")
    print("\n| schedule | stages per rank | measured, s | simulated, s | measured ÷ simulated | simulated bubble |")
    print("|---|---|---|---|---|---|")
    for (schedule, stages_per_rank), values in measured.items():
        seconds = statistics.median(values)
        makespan, bubble = predicted(schedule, stages_per_rank, layer_s)
        print(
            f"| {schedule} | {stages_per_rank} | {seconds:.3f} | {makespan:.3f} | {seconds / makespan:.2f} "
            f"| {bubble:.1%} |"
        )


if __name__ == "__main__":
    main()
