"""The plan of sums over replicas: their bytes in both kinds, and what a step hides of them."""

from dataclasses import replace

import pytest
from planned_jobs import job_with

from raypp.errors import JobError
from raypp.job.job import Job
from raypp.planning.costs import Costs, Part
from raypp.planning.forecast import Forecast, forecast
from raypp.planning.machines import Link, Machines, Node
from raypp.planning.memory import stage_trained
from raypp.planning.plan import Grounds, make_plan, with_every_steps
from raypp.planning.search import advice

UNIT = Costs(Part(1.0, 2.0), Part(0.0, 0.0), Part(0.0, 0.0))
MESH = {"pp": 2, "dp_replicate": 2}
CPU = {"device": "cpu"}


def square(kind: str = "exact", **sections: dict[str, object]) -> Job:
    train = {"sync": {"kind": kind}, **sections.pop("train", {})}
    pipeline = {"microbatches": 4, "layers_per_stage": [2, 2], "lookahead": 0}
    return job_with(model={"num_layers": 4}, mesh=MESH, pipeline=pipeline, train=train, resources=CPU, **sections)


def hosts(gbps: float) -> Machines:
    return Machines(tuple(Node(name, 1) for name in "abcd"), Link(gbps))


def of(job: Job, gbps: float) -> Forecast:
    found = forecast(job, hosts(gbps), UNIT, kind="cpu")
    assert found.replica_sums is not None
    return found


def largest(job: Job) -> int:
    return max(stage_trained(job, stage, [2, 2])[0] for stage in range(2))


def test_the_bytes_of_both_kinds() -> None:
    for kind in ("exact", "int8"):
        sums = of(square(kind), 1.0).replica_sums
        assert sums is not None and sums.kind == kind
        assert sums.exact_bytes == 2 * largest(square()) * 4 // 2
        assert sums.int8_bytes == pytest.approx(largest(square()) * (1 + 4 / 256), rel=1e-6)
    four = job_with(mesh={"pp": 1, "dp_replicate": 4}, resources=CPU)
    sums = forecast(four, hosts(1.0), UNIT, kind="cpu").replica_sums
    assert sums is not None
    numbers = stage_trained(four, 0, [8])[0]
    assert sums.exact_bytes == pytest.approx(numbers * 4 * 2 * 3 / 4)
    assert sums.int8_bytes == pytest.approx(numbers * 3 * 260 / 256, rel=1e-6)


def test_without_replicas_there_are_none() -> None:
    found = forecast(job_with(), Machines.alike(2, 1, 1.0), UNIT)
    assert found.replica_sums is None and found.parts["reduce"] == 0


def test_sums_that_are_short_beside_a_backward_are_hidden_but_for_the_last_block() -> None:
    job = square()
    numbers = [stage_trained(job, stage, [2, 2])[0] for stage in range(2)]
    # The first stage's sums take 0.4 s: less than a layer's backward, 2 s. Messages take far less.
    gbps = numbers[0] * 4 * 8 / 0.4 / 1e9
    sums = of(job, gbps).replica_sums
    assert sums is not None
    assert sums.exposed_s == pytest.approx(0.2)  # the sum of the block that is done last
    assert sums.hidden_s == pytest.approx(sums.seconds - 0.2)


def test_long_sums_begin_when_the_first_block_is_done_and_the_rest_makes_the_step_longer() -> None:
    job = square()
    numbers = stage_trained(job, 0, [2, 2])[0]
    gbps = numbers * 4 * 8 / 40 / 1e9
    found = of(job, gbps)
    assert found.replica_sums is not None
    # The last backward of stage 0 takes 4 s; its first block is done after 2 s.
    first = 40 - 2
    assert found.replica_sums.exposed_s >= first
    assert found.parts["reduce"] == pytest.approx(found.replica_sums.exposed_s)
    quantised = of(square("int8"), gbps)
    assert quantised.step_s < found.step_s - 0.7 * found.replica_sums.exposed_s


def test_sums_that_are_cast_are_not_hidden_on_cpus() -> None:
    job = square(train={"precision": "bf16", "reduce_dtype": "bf16"})
    on_cpu = of(job, 0.1).replica_sums
    on_gpu = forecast(job, hosts(0.1), UNIT, kind="cuda").replica_sums
    assert on_cpu is not None and on_gpu is not None
    assert on_cpu.hidden_s == 0 and on_cpu.exposed_s == on_cpu.seconds
    assert on_gpu.hidden_s > 0


def test_int8_is_advised_where_it_helps_and_allowed() -> None:
    job = square()
    slow = of(job, 0.01)
    assert "train.sync.kind int8 (changes the numbers)" in dict(advice(job, hosts(0.01), UNIT, slow))
    fast = of(job, 1e6)
    assert not [text for text, _ in advice(job, hosts(1e6), UNIT, fast) if "sync" in text]
    pure = square(train={"precision": "bf16_pure"})
    assert not [text for text, _ in advice(pure, hosts(0.01), UNIT, of(pure, 0.01)) if "sync" in text]


def test_the_plan_has_them_and_counts_the_residuals() -> None:
    exact, int8 = make_plan(square()), make_plan(square("int8"))
    found = int8.as_dict()["predictions"][0]["replica_sums"]
    assert found["kind"] == "int8" and found["int8_bytes"] < 0.26 * found["exact_bytes"]
    assert make_plan(job_with()).as_dict()["predictions"][0]["replica_sums"] is None
    for rank, (one, other) in enumerate(zip(exact.memory, int8.memory, strict=True)):
        numbers = stage_trained(square(), rank, exact.cut)[0]
        assert other.total > one.total
        assert other.optimizer - one.optimizer == 4 * numbers
    assert int8.host.state - exact.host.state == 4 * largest(square())


def test_the_kind_of_device_that_quantises_costs_time() -> None:
    free = Machines((Node("a", 4),), Link(1e9))
    job = square("int8")
    sums = forecast(job, replace(free, inside_gbps=1e9), UNIT, kind="cpu").replica_sums
    assert sums is not None and 0 < sums.exposed_s < 1


def test_outer_steps_send_the_weights_once_in_many_steps() -> None:
    job = square("outer", train={"sync": {"kind": "outer", "every_steps": 10}})
    found = of(job, 0.1)
    sums = found.replica_sums
    assert sums is not None and (sums.kind, sums.every_steps) == ("outer", 10)
    assert sums.outer_bytes == sums.exact_bytes == largest(job) * 4
    assert sums.seconds == pytest.approx(sums.outer_bytes * 8 / 0.1e9)
    assert found.parts["reduce"] == sums.exposed_s == pytest.approx(sums.seconds / 10)
    alone_job = square().model_copy(update={"mesh": job.mesh.model_copy(update={"dp_replicate": 1})})
    apart, alone = make_plan(job), make_plan(alone_job)
    for rank, (one, other) in enumerate(zip(apart.memory, alone.memory, strict=True)):
        numbers = stage_trained(job, rank, [2, 2])[0]
        assert one.optimizer - other.optimizer == 8 * numbers, "weights and momentum of outer steps"
        assert one.gathered == other.gathered, "FSDP knows one replica"
    assert apart.host.state - alone.host.state == 8 * largest(job), "snapshots hold momentum and own weights, too"


def test_fragments_wait_for_what_is_not_hidden_beside_the_steps() -> None:
    sync = {"kind": "outer", "every_steps": 10, "fragments": 2, "overlap_steps": 2}
    job = square("outer", train={"sync": sync})
    sums = of(job, 1e-6).replica_sums
    assert sums is not None and sums.fragments == 2
    assert sums.seconds == pytest.approx(sums.outer_bytes * 8 / 1e3)
    pipeline = of(job, 1e-6).parts["pipeline"]
    assert sums.exposed_s == pytest.approx((sums.seconds - 2 * 2 * pipeline) / 10)
    hidden = of(job, 1.0).replica_sums
    assert hidden is not None and hidden.seconds > 0 and hidden.exposed_s == 0
    shared = of(square("outer", train={"sync": {**sync, "link_gbps": 1e-6}}), 1e6).replica_sums
    everything = sum(stage_trained(job, stage, [2, 2])[0] for stage in range(2))
    assert shared is not None and shared.seconds == pytest.approx(everything * 4 * 8 / 1e3)


def test_auto_takes_the_fewest_steps_that_the_link_allows() -> None:
    sync = {"kind": "outer", "every_steps": "auto", "fragments": 2, "overlap_steps": 1}
    grounds = Grounds(machines=hosts(1e6), costs=UNIT)

    def asking(**more: float) -> Job:
        return square("outer", train={"steps": 400, "sync": sync | more}, checkpoint={"every_steps": 120})

    def chosen(gbps: float) -> int:
        job = asking(link_gbps=gbps)
        decided, remark = with_every_steps(job, grounds)
        sums = make_plan(decided, grounds=grounds).predictions[-1].replica_sums
        steps = make_plan(decided, grounds=grounds).step_s
        assert sums is not None and sums.every_steps == decided.train.sync.every
        assert sums.exposed_s <= 0.05 * (steps - sums.exposed_s) or sums.every_steps == 120
        assert make_plan(job, grounds=grounds).remarks[0] == remark
        assert remark.startswith(f"train.sync.every_steps: auto is {sums.every_steps}")
        return sums.every_steps

    assert asking().outer_intervals() == [4, 6, 8, 10, 12, 20, 24, 30, 40, 60, 120]
    found = [chosen(gbps) for gbps in (1.0, 0.005, 0.002, 1e-9)]
    assert found == sorted(found) and found[0] == 10 and found[-1] == 120 and len(set(found)) > 2
    with pytest.raises(JobError, match="auto needs the rate of the link"):
        make_plan(asking())


def test_fragments_beside_the_compute_are_proposed_where_they_hide_the_exchange() -> None:
    def asking(every: object, **sync: object) -> Job:
        train = {"steps": 400, "sync": {"kind": "outer", "every_steps": every, **sync}}
        return square("outer", train=train, checkpoint={"every_steps": 120})

    def proposed(job: Job) -> dict[str, float]:
        return {text: gain for text, gain in advice(job, hosts(1e9), UNIT, of(job, 1e9)) if "fragments" in text}

    fast = of(asking(60), 1e9)
    numbers = sum(stage_trained(asking(60), stage, [2, 2])[0] for stage in range(2))
    link = {"link_gbps": numbers * 4 * 8 / (7.9 * fast.step_s) / 1e9}  # an exchange takes 7.9 steps
    gain = 1 - fast.step_s / of(asking(60, **link), 1e9).step_s
    text = "train.sync.fragments 2, overlap_steps 4 (changes the numbers)"
    assert gain > 0.1 and proposed(asking(60, **link)) == {text: pytest.approx(gain)}
    assert not proposed(asking(60))

    grounds = Grounds(machines=hosts(1e9), costs=UNIT)
    job, remark = with_every_steps(asking("auto", **link), grounds)
    assert job.train.sync.every == 120
    assert remark.endswith("auto is 120; with fragments: 2 and overlap_steps: 4, which change the numbers, too, 10")
    job, remark = with_every_steps(asking("auto", fragments=2, overlap_steps=4, **link), grounds)
    assert remark.endswith("auto is 10") and of(job, 1e9).step_s == pytest.approx(fast.step_s)
