"""The device of a job's ranks, by the nodes of a cluster."""

import math
from dataclasses import replace
from typing import Any

import pytest

from raypp.api.checked_job import plan
from raypp.control.client import device_for, facts_of, precision_remark
from raypp.control.clusters.dashboard import NodeResources
from raypp.errors import JobError, ResourcesError
from raypp.job.job import Job
from raypp.job.load import parse_job
from raypp.planning import fit_search
from raypp.planning.costs import DEVICES, device_named
from raypp.planning.decide import settle
from raypp.planning.levers import LEVERS
from raypp.planning.machines import Machines

GIB = 1 << 30


def node(ip: str, gpus: float = 0, free: float = 0, memory: int = 0) -> NodeResources:
    return NodeResources(ip, ip, ip, 16, gpus, 16, free, memory)


def job(**sections: Any) -> Job:
    usual = {"mesh": {"pp": 2}, "resources": {"device": "cuda"}, "data": {"kind": "synthetic"}}
    return parse_job({"name": "placed", **usual, **sections})


def test_missing_gpus_are_listed_node_by_node() -> None:
    with pytest.raises(ResourcesError) as refused:
        device_for(job(), [node("10.0.0.1"), node("10.0.0.2", 8, 1)])
    fault = refused.value.problems[0].fault
    assert fault == "2 ranks need 2 GPUs; 1 are free (10.0.0.1 has no GPU, 10.0.0.2 1 of 8)"
    with pytest.raises(ResourcesError) as refused:
        device_for(job(), [node("10.0.0.1")])
    assert "10.0.0.1 has no GPU" in refused.value.problems[0].fault and "device cpu" in refused.value.problems[0].fix


def test_missing_cpus_beside_free_gpus_are_an_error() -> None:
    four = job(mesh={"pp": 4}, resources={"device": "cuda", "cpus_per_rank": 8})
    with pytest.raises(ResourcesError) as refused:
        device_for(four, [node("10.0.0.1", 4, 4)])
    problem = refused.value.problems[0]
    assert problem.fault == "4 ranks need 4 GPUs with 8 CPUs each; 2 are free (10.0.0.1 2 of 4 with 16 CPUs free)"
    assert "lower resources.cpus_per_rank" in problem.fix and "add nodes" not in problem.fix
    with pytest.raises(ResourcesError) as refused:
        device_for(four, [replace(node("10.0.0.1", 4, 4), free_cpus=0)])
    assert "10.0.0.1 0 of 4 with 0 CPUs free" in refused.value.problems[0].fault
    assert "lower resources.cpus_per_rank" in refused.value.problems[0].fix


def test_a_job_that_fits_into_no_gpu_is_refused_before_it_starts() -> None:
    large = job(
        model={"num_layers": 32, "hidden_size": 4096, "num_heads": 32, "ffn_size": 11008, "vocab_size": 32000},
        data={"kind": "synthetic", "seq_len": 4096},
    )
    small, big = node("10.0.0.1", 8, 8, 15 * GIB), node("10.0.0.2", 8, 8, 2000 * GIB)
    with pytest.raises(ResourcesError, match=r"a device has 15 GiB; ranks are planned to need more: pp0 "):
        device_for(large, [small])
    assert device_for(large, [small, big]) == "cuda", "it may get the large ones"
    assert device_for(large, [node("10.0.0.1", 8, 8)]) == "cuda", "the ranks check what is unknown here"
    assert device_for(job(), [small]) == "cuda"


def test_an_elastic_job_starts_on_fewer_gpus_only_if_it_fits_there() -> None:
    def elastic(options: Any, **mesh: int) -> Job:
        model = {"num_layers": 32, "hidden_size": 4096, "num_heads": 32, "ffn_size": 14336, "vocab_size": 32000}
        train = {"precision": "bf16_pure", "activation_checkpointing": "full", "optimizer": {"state": "8bit"}}
        return job(model=model, mesh=mesh, train=train, recovery={"elastic": options})

    def three_of_four(gib: int) -> list[NodeResources]:
        return [node(f"10.0.0.{host}", 1, float(host < 4), gib * GIB) for host in (1, 2, 3, 4)]

    assert device_for(elastic(True, pp=4), three_of_four(80)) == "cuda"
    assert device_for(elastic(True, pp=4), three_of_four(0)) == "cuda", "unknown"
    with pytest.raises(ResourcesError) as refused:
        device_for(elastic(True, pp=4), three_of_four(20))
    (problem,) = refused.value.problems
    assert "4 ranks need 4 GPUs; 3 are free" in problem.fault and problem.fix == "end another run, or add nodes"
    assert problem.fault.endswith("; on fewer, ranks are planned to need more memory than a GPU has (20 GiB)")
    free = [node("10.0.0.1", 4, 4, 20 * GIB)]
    assert device_for(elastic(True, pp=4), free) == "cuda"
    with pytest.raises(ResourcesError, match=r"a device has 20 GiB; ranks are planned to need more: pp0 "):
        device_for(elastic({"max_ranks": 2}, pp=4), free)


def test_offloading_to_nodes_with_too_little_memory_is_refused() -> None:
    offloading = job(
        model={"num_layers": 8, "hidden_size": 4096, "num_heads": 32, "ffn_size": 11008, "vocab_size": 32000},
        train={"precision": "bf16", "optimizer": {"offload": True}},
    )

    def nodes(free: int) -> list[NodeResources]:
        return [replace(node("10.0.0.1", 8, 8, 80 * GIB), free_bytes=free)]

    with pytest.raises(ResourcesError, match=r"offloading needs .* GiB for a rank; 1 node has 8 GiB free"):
        device_for(offloading, nodes(8 * GIB))
    assert device_for(offloading, nodes(64 * GIB)) == "cuda"
    assert device_for(offloading, nodes(0)) == "cuda", "the ranks check what is unknown here"


@pytest.mark.parametrize(
    ("device", "card", "precision", "remark"),
    [
        ("cpu", "", "fp32", "train.precision: auto is fp32 on CPUs"),
        ("cuda", "NVIDIA H100 80GB HBM3", "bf16", "train.precision: auto is bf16 on these GPUs"),
        (
            "cuda",
            "Tesla T4",
            "fp16",
            "train.precision: auto is fp16 with loss scaling on these GPUs, of which some have",
        ),
        ("cuda", "NVIDIA GeForce RTX 2080 Ti", "fp16", "train.precision: auto is fp16 with loss scaling on these GPUs"),
        ("cuda", "Tesla P100-PCIE-16GB", "fp32", "train.precision: auto is fp32 on these GPUs, of which some have no"),
    ],
)
def test_precision_follows_the_device_and_a_remark_says_so(device: str, card: str, precision: str, remark: str) -> None:
    nodes = [node("10.0.0.1"), replace(node("10.0.0.2", 8, 8), gpu_names=(card,))]
    asked = job(model={"lora": {}})
    decided = settle(asked, facts_of(device, nodes))
    assert decided.train.precision == decided.model.lora.base == precision
    facts = facts_of(device, nodes)
    assert precision_remark(asked, decided, facts).startswith(remark)
    explicit = job(train={"precision": "bf16_pure"})
    assert settle(explicit, facts_of(device, nodes)).train.precision == "bf16_pure"
    assert not precision_remark(explicit, explicit, facts)
    fp16 = job(train={"precision": "fp16"})
    assert ("no loss scale" in precision_remark(fp16, fp16, facts)) == (precision == "bf16")


def test_a_device_is_planned_in_the_precision_that_a_cluster_of_its_cards_gets() -> None:
    for device in DEVICES.values():
        nodes = [replace(node("10.0.0.2", 8, 8), gpu_names=(device.name.upper().replace("RTX20", "RTX 20"),))]
        planned = plan(job(), device=device.name).decision.job.train.precision
        assert planned == settle(job(), facts_of(device.kind, nodes)).train.precision
        assert (planned == "fp16") == (device.name in ("t4", "v100-16", "v100-32", "rtx2080ti"))


def test_a_plan_refuses_bf16_on_a_card_without_it_and_says_that_fp16_is_not_needed_on_others() -> None:
    for precision in ("bf16", "bf16_pure"):
        with pytest.raises(
            JobError, match=r"train.precision: a t4 has compute capability 7.5; bf16(_pure)? needs 8.0 or newer"
        ):
            plan(job(train={"precision": precision}), device="T4")
    grouped = job(model={"kind": "qwen3_moe"}, train={"precision": "fp8", "fp8": {"experts": True}})
    with pytest.raises(JobError, match=r"train.fp8.experts: true, but a l40s has no products"):
        plan(grouped, device="l40s")
    assert plan(grouped, device="h200")
    fp16 = job(train={"precision": "fp16"})
    said = {card: "no loss scale" in "".join(plan(fp16, device=card).remarks) for card in ("t4", "h100", None)}
    assert said == {"t4": False, "h100": True, None: False}


def test_no_lever_computes_in_what_the_card_lacks() -> None:
    fp32 = job(train={"precision": "fp32"})
    for card, offered in (("t4", set()), ("rtx3090", {"bf16", "bf16_pure"}), ("cpu", {"bf16", "bf16_pure"})):
        search = fit_search._Search(Machines.alike(2, 1, None), device_named(card), math.inf, {})
        levels = [changes for lever in LEVERS for changes in search._levels(lever, fp32)]
        assert {str(changes["train.precision"]) for changes in levels if "train.precision" in changes} == offered
