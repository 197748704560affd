"""Where tensor parallelism pays, and what a forecast counts of it. Expected ratios: an H100 has
375 GB/s to its neighbours, so 8 ranks of an 8B model wait for a third of their time; a 70B model on
two nodes has few rows for a pipeline of 16."""

from typing import Any

import pytest

from raypp.job.job import Job
from raypp.job.load import parse_job
from raypp.planning.costs import DEVICES, computed_costs
from raypp.planning.forecast import forecast
from raypp.planning.machines import Machines
from raypp.planning.plan import Grounds, make_plan
from raypp.planning.search import search, tensor_ranks

H100 = DEVICES["h100"]
ONE_NODE = Machines.alike(8, 8, None, 0.0, H100.inside_gbps)
TWO_NODES = Machines.alike(16, 8, 100.0, 0.0, H100.inside_gbps)
SIZES = {
    "8b": {"num_layers": 32, "hidden_size": 4096, "num_heads": 32, "ffn_size": 14336},
    "70b": {"num_layers": 80, "hidden_size": 8192, "num_heads": 64, "ffn_size": 28672},
}


def llama(size: str, rows: int, seq_len: int = 8192, **mesh: int) -> Job:
    """Returns a job of whole training with microbatches of one row."""
    small, extent = size == "8b", {"8b": "selective", "70b": "full"}[size]
    document: dict[str, Any] = {
        "name": "tensor",
        "model": {"kind": "llama", "num_kv_heads": 8, "vocab_size": 128256, **SIZES[size]},
        "data": {"kind": "synthetic", "seq_len": seq_len},
        "mesh": mesh,
        "pipeline": {"microbatches": rows // mesh.get("fsdp", 1)},
        "train": {
            "precision": "bf16" if small else "bf16_pure",
            "activation_checkpointing": extent,
            "micro_batch_size": 1,
        },
    }
    return parse_job(document)


def test_8b_on_one_node_with_many_rows_is_slower_with_tp_and_the_search_does_not_choose_it() -> None:
    plain, split = (forecast(llama("8b", 64, **mesh), ONE_NODE, H100).step_s for mesh in ({"fsdp": 8}, {"tp": 8}))
    assert 0.55 < plain / split < 0.7
    found = search(llama("8b", 64, fsdp=8), ONE_NODE, H100, device_memory=H100.memory, patience_s=600)
    assert not found.out_of_time and found.best[0].job.mesh.tp == 1


@pytest.mark.gate
def test_70b_on_two_nodes_with_few_rows_is_faster_with_tp_and_the_search_chooses_it() -> None:
    meshes = ({"pp": 16}, {"pp": 2, "tp": 8})
    plain, split = (forecast(llama("70b", 32, **mesh), TWO_NODES, H100).step_s for mesh in meshes)
    assert 1.2 < plain / split < 1.35
    found = search(llama("70b", 32, pp=16), TWO_NODES, H100, device_memory=H100.memory, patience_s=600)
    assert found.best[0].job.mesh.tp > 1


def test_tp_is_tried_within_nodes_where_the_model_can_be_cut() -> None:
    job = llama("8b", 64, fsdp=8)
    assert tensor_ranks(job, ONE_NODE) == [1, 2, 4, 8]
    assert tensor_ranks(job, Machines.alike(8, 2, 1.0)) == [1, 2]
    few_heads = job.model.model_copy(update={"num_kv_heads": 2})
    assert tensor_ranks(job.model_copy(update={"model": few_heads}), ONE_NODE) == [1, 2]


def test_a_layer_waits_for_its_messages_and_its_launches_are_not_divided() -> None:
    slow, fast = (
        forecast(llama("8b", 8, tp=8), Machines.alike(8, 8, None, 0.0, gbps), H100).parts["pipeline"]
        for gbps in (300.0, 3000.0)
    )
    sent = 8192 * 4096 * 2 * 7 / 8 * 8 / 1e9  # Gbit of one collective
    # four in a forward, six in a backward that gathers inputs again; one for each end, both ways
    collectives = 8 * (32 * (4 + 6) + 2)
    assert slow - fast == pytest.approx(collectives * sent * (1 / 300 - 1 / 3000), rel=1e-6)
    short, split = (computed_costs(llama("8b", 8, 64, tp=tp), H100).layer.forward for tp in (1, 8))
    assert split >= 8 * short


def test_a_plan_says_where_tp_is_slower_than_fsdp() -> None:
    grounds = Grounds(device="h100", per_node=8)
    told, untold = (make_plan(llama("8b", 64, tp=8), grounds), make_plan(llama("8b", 64, fsdp=8), grounds))
    assert any("mesh.fsdp 8" in remark and "mesh.tp" in remark for remark in told.remarks)
    assert not any("mesh.tp" in remark for remark in untold.remarks)
    assert told.axes["tp"] == 8
