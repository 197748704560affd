"""The device of a job's ranks, by the nodes of a cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raypp.clusters.dashboard import NodeResources
from raypp.control.client import device_for, facts_of, precision_remark
from raypp.errors import ResourcesError
from raypp.planning.decide import settle
from raypp.spec.job import Job
from raypp.spec.load import parse_job

GIB = 1 << 30


def node(ip: str, gpus: float = 0, free: float = 0, memory: int = 0) -> NodeResources:
    return NodeResources(ip, ip, ip, 16, gpus, 16, free, memory)


def job(**sections: Any) -> Job:
    return parse_job({"name": "placed", "mesh": {"pp": 2}, "resources": {"device": "cuda"}, **sections})


def test_gpus_that_are_missing_are_told_node_by_node() -> None:
    with pytest.raises(ResourcesError) as refused:
        device_for(job(), [node("10.0.0.1"), node("10.0.0.2", 8, 1)])
    fault = refused.value.problems[0].fault
    assert fault == "2 ranks need 2 GPUs; 1 are free (10.0.0.1 has no GPU, 10.0.0.2 1 of 8)"
    with pytest.raises(ResourcesError) as refused:
        device_for(job(), [node("10.0.0.1")])
    assert "10.0.0.1 has no GPU" in refused.value.problems[0].fault and "device cpu" in refused.value.problems[0].fix


def test_cpus_that_are_missing_beside_free_gpus_are_told() -> None:
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
        ("cuda", "NVIDIA RTX 2000 Ada Generation", "bf16", "train.precision: auto is bf16 on these GPUs"),
        ("cuda", "Tesla T4", "fp32", "train.precision: auto is fp32 on these GPUs, of which some have no bf16"),
        (
            "cuda",
            "NVIDIA GeForce RTX 2080 Ti",
            "fp32",
            "train.precision: auto is fp32 on these GPUs, of which some have ",
        ),
    ],
)
def test_precision_follows_the_device_and_is_told(device: str, card: str, precision: str, remark: str) -> None:
    nodes = [node("10.0.0.1"), replace(node("10.0.0.2", 8, 8), gpu_names=(card,))]
    asked = job(model={"lora": {}})
    decided = settle(asked, facts_of(device, nodes))
    assert decided.train.precision == decided.model.lora.base == precision
    assert (precision_remark(asked, decided, device) or "").startswith(remark)
    explicit = job(train={"precision": "bf16_pure"})
    assert settle(explicit, facts_of(device, nodes)).train.precision == "bf16_pure"
    assert precision_remark(explicit, explicit, device) is None
