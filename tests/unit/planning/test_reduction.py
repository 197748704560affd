"""When gradients are summed (mesh.reduce_gradients), names of devices, rates inside nodes."""

from dataclasses import replace
from typing import Any

import pytest
from planned_jobs import job_with

from raypp.api.checked_job import grounds_of
from raypp.errors import JobError
from raypp.job.checks import check_training
from raypp.job.job import Job
from raypp.planning.costs import DEVICES, device_named
from raypp.planning.decide import decide_reduction, reduction_on
from raypp.planning.forecast import forecast
from raypp.planning.machines import Link, Machines
from raypp.planning.memory import peak_memory
from raypp.planning.plan import Grounds

WIDE = {"num_layers": 8, "hidden_size": 2048, "num_heads": 16, "ffn_size": 5504, "vocab_size": 32000}


def sharded(reduce: str = "auto", sync: str = "exact", microbatches: int = 4, **mesh: int) -> Job:
    train = {"precision": "bf16", "sync": {"kind": sync}}
    sizes = {"pp": 1, "fsdp": 8, "reduce_gradients": reduce, **mesh}
    return job_with(model=WIDE, mesh=sizes, pipeline={"microbatches": microbatches}, train=train)


@pytest.mark.parametrize(
    ("job", "per_node", "inside", "choice", "why"),
    [
        (sharded(), 8, 3000.0, "each_microbatch", "the 8 ranks that share weights are in one node, at 3,000 Gbit/s"),
        (sharded(), 8, 120.0, "last_microbatch", "the 8 ranks that share weights have 120 Gbit/s between them"),
        (sharded(), 4, 3000.0, "last_microbatch", "the 8 ranks that share weights are in several nodes"),
        (sharded(sync="int8", fsdp=4, dp_replicate=2), 8, 3000.0, "last_microbatch", "sums over replicas are in int8"),
        (sharded(fsdp=1), 8, 3000.0, "last_microbatch", ""),
        (sharded("last_microbatch"), 8, 3000.0, "last_microbatch", ""),
    ],
)
def test_auto_sums_in_every_backward_inside_a_fast_node(
    job: Job, per_node: int, inside: float, choice: str, why: str
) -> None:
    decided, said = decide_reduction(job, Machines.alike(8, per_node, 400.0, inside_gbps=inside), 0, "cuda")
    assert decided.mesh.reduce_gradients == choice
    assert why in said and bool(why) == bool(said)
    assert decide_reduction(job, Machines.alike(8, 8, None, inside_gbps=inside), 0, "cpu")[0].reduces_each is False


def test_auto_sums_in_every_backward_where_ranks_would_not_fit_otherwise() -> None:
    each, last = (peak_memory(sharded(when), "cuda") for when in ("each_microbatch", "last_microbatch"))
    assert each < 0.8 * last
    machines = Machines.alike(8, 4, 25.0)
    for memory, chosen in ((last, False), (each, True), (each - 1, False)):
        decided, said = decide_reduction(sharded(), machines, memory, "cuda")
        assert decided.reduces_each == chosen
        assert chosen == ("a rank would need" in said)


def test_a_run_decides_once_by_the_cards_of_its_nodes() -> None:
    assert reduction_on(sharded(), [8, 8], ["NVIDIA H100 80GB HBM3"] * 2, 0).reduces_each
    for devices, names in (
        ([8], ["NVIDIA GeForce RTX 4090"]),
        ([8], ["Unheard Of"]),
        ([4, 4], ["NVIDIA H200"]),
        ([], []),
    ):
        assert reduction_on(sharded(), devices, names, 0).mesh.reduce_gradients == "last_microbatch"


def test_int8_sums_refuse_sums_in_every_backward_by_name() -> None:
    (problem,) = check_training(sharded("each_microbatch", "int8", fsdp=4, dp_replicate=2))
    assert problem.key == "mesh.reduce_gradients" and "int8" in problem.fault


def test_sums_in_every_backward_cost_their_time_over_a_slow_link() -> None:
    def pipeline_s(reduce: str, gbps: float) -> float:
        return forecast(sharded(reduce), Machines.alike(8, 1, gbps), DEVICES["h100"], kind="cuda").parts["pipeline"]

    assert pipeline_s("each_microbatch", 10.0) > 2 * pipeline_s("last_microbatch", 10.0)
    assert pipeline_s("each_microbatch", 1e6) < 1.05 * pipeline_s("last_microbatch", 1e6)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("8x A100", "a100-80"),
        ("RTX 4090", "rtx4090"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("a100 40gb", "a100-40"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"),
        ("NVIDIA L4", "l4"),
        ("AMD Instinct MI300X", "mi300x"),
        ("V100", "v100-16"),
        ("Tesla V100-SXM2-32GB", "v100-32"),
        ("Tesla V100S-PCIE-32GB", "v100-32"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx2080ti"),
    ],
)
def test_a_device_is_understood_as_people_and_drivers_name_it(typed: str, name: str) -> None:
    assert device_named(typed).name == name


@pytest.mark.parametrize("typed", ["P100", "Tesla T40", "H20", "rtx4900", ""])
def test_another_device_is_refused_with_those_that_are_known(typed: str) -> None:
    with pytest.raises(JobError, match="unknown"):
        device_named(typed)


def given(**changes: Any) -> Grounds:
    nothing: dict[str, Any] = dict.fromkeys(("device", "link_gbps", "links", "per_node", "costs", "inside_gbps"))
    return grounds_of(sharded(), **{**nothing, **changes})


def test_a_rate_inside_nodes_replaces_that_of_the_device_and_measured_ones() -> None:
    job = sharded()
    assert given(device="h100").machines_for(job).inside_gbps == 3000
    assert given(device="h100", inside_gbps=900.0).machines_for(job).inside_gbps == 900
    links = {frozenset(("a",)): Link(2000.0), frozenset(("a", "b")): Link(25.0)}
    measured = replace(Machines.alike(8, 8, None), links=links)
    assert Grounds(machines=measured, device="h100").machines_for(job).between("a", "a") == Link(2000.0)
    typed = Grounds(machines=measured, device="h100", inside_gbps=900.0).machines_for(job)
    assert (typed.between("a", "a"), typed.between("a", "b")) == (Link(900.0), Link(25.0))


def test_a_rate_inside_nodes_below_the_share_of_the_link_is_refused() -> None:
    with pytest.raises(JobError, match="--inside-gbps 40 is less than the 50 Gbit/s"):
        given(inside_gbps=40.0, link_gbps=400.0, per_node=8)
    assert given(inside_gbps=3000.0, link_gbps=3200.0, per_node=8).inside_gbps == 3000
