"""`check_plan` and `make_plan` agree on every job."""

from hypothesis import given, settings
from hypothesis import strategies as st
from planned_jobs import job_with

from raypp.planning.check import check_plan
from raypp.planning.plan import Grounds, make_plan
from raypp.planning.resolve import resolve_pipeline
from raypp.planning.schedules.catalogue import SCHEDULES

small = st.integers(1, 4)
weight = st.one_of(st.just("auto"), st.integers(0, 4), st.floats(0, 4))
meshes = st.fixed_dictionaries(
    {"pp": st.integers(1, 6), "fsdp": small, "dp_replicate": small, "cp": small, "ep": small}
)
pipelines = st.fixed_dictionaries(
    {
        "schedule": st.sampled_from([*SCHEDULES.names(), "auto"]),
        "stages_per_rank": st.integers(1, 3),
        "microbatches": st.integers(1, 12),
        "lookahead": st.one_of(st.just("auto"), st.integers(0, 2)),
        "input_weight": weight,
        "output_weight": weight,
        "layers_per_stage": st.one_of(st.none(), st.lists(st.integers(0, 5), min_size=1, max_size=4)),
    }
)
trains = st.fixed_dictionaries(
    {
        "precision": st.sampled_from(["fp32", "bf16"]),
        "activation_checkpointing": st.sampled_from(["none", "selective", "full"]),
    }
)


@settings(max_examples=30, deadline=None)
@given(meshes, pipelines, trains, st.integers(1, 20), st.sampled_from(["llama", "qwen3_moe"]))
def test_a_job_has_problems_with_fixes_or_a_plan(
    mesh: dict, pipeline: dict, train: dict, layers: int, kind: str
) -> None:
    job = job_with(mesh=mesh, pipeline=pipeline, train=train, model={"num_layers": layers, "kind": kind})
    problems = check_plan(job)
    assert all(problem.key and problem.fault and problem.fix for problem in problems)
    if problems:
        return
    plan = make_plan(job, Grounds(link_gbps=1.0))
    pipeline = resolve_pipeline(job)
    assert plan.cut == pipeline.cut and sum(plan.cut) == layers and min(plan.cut) > 0
    assert [layer for held in pipeline.layers_of_stage for layer in held] == list(range(layers))
    assert len(plan.cut) == sum(map(len, pipeline.stages_of_rank)) == job.num_stages
    assert all(stage in pipeline.stages_of_rank[rank] for stage, rank in enumerate(pipeline.rank_of_stage))
    for program in (pipeline.program, pipeline.forward_program()):
        assert sorted(program) == list(range(job.mesh.pp))
        for rank, stages in enumerate(pipeline.stages_of_rank):
            assert {action.stage for action in program[rank]} == set(stages)
    assert len(plan.ranks) == job.mesh.world
    assert all(rank.total > 0 for rank in plan.memory)
    assert 0 <= plan.simulated_bubble < 1
